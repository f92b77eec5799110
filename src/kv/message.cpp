// Encoding and decoding of the KV control messages. Header: magic "KV", version, type; then fixed
// fields and counted lists. Trailing bytes are an error, so that nothing hides behind a message.
// SPDX-License-Identifier: Apache-2.0
#include "kv/message.hpp"

#include <algorithm>
#include <concepts>
#include <fmt/format.h>

namespace crossdock::kv::message {
namespace {

constexpr std::string_view kMagic = "KV";
enum class Type : std::uint8_t {
  kTicket = 1,
  kAbort = 2,
  kParts = 3,
  kStopped = 4,
  kReady = 5,
  kGo = 6
};

class Writer {
 public:
  explicit Writer(Type type) {
    out_ = kMagic;
    put(kVersion);
    put(static_cast<std::uint8_t>(type));
  }
  template <std::unsigned_integral T>
  void put(T value) {
    for (std::size_t i = 0; i < sizeof(T); ++i)
      out_.push_back(static_cast<char>(value >> (8 * i) & 0xff));
  }
  void text(std::string_view text) {
    text = text.substr(0, kLongestText);
    put(static_cast<std::uint16_t>(text.size()));
    out_.append(text);
  }
  std::string take() { return std::move(out_); }

 private:
  std::string out_;
};

// Reads past the end yield zeros and mark the reader bad; callers check once at the end.
class Reader {
 public:
  explicit Reader(std::string_view bytes) : rest_(bytes) {}
  template <std::unsigned_integral T>
  T get() {
    if (rest_.size() < sizeof(T)) return fail<T>();
    T value = 0;
    for (std::size_t i = 0; i < sizeof(T); ++i)
      value =
          static_cast<T>(value | static_cast<T>(static_cast<unsigned char>(rest_[i])) << (8 * i));
    rest_.remove_prefix(sizeof(T));
    return value;
  }
  std::string text() {
    const std::size_t length = get<std::uint16_t>();
    if (length > rest_.size() || length > kLongestText) return fail<std::string>();
    std::string out(rest_.substr(0, length));
    rest_.remove_prefix(length);
    return out;
  }
  // A count of records of `record_bytes` each, all of which must be there.
  std::size_t count(std::size_t record_bytes, std::size_t most) {
    const std::size_t n = get<std::uint32_t>();
    if (n > most || n * record_bytes > rest_.size()) return fail<std::size_t>();
    return n;
  }
  // An enumerator or a flag: values above `last` are malformed.
  std::uint8_t small(std::uint8_t last) {
    const auto value = get<std::uint8_t>();
    return value <= last ? value : fail<std::uint8_t>();
  }
  [[nodiscard]] bool complete() const { return !bad_ && rest_.empty(); }

 private:
  template <class T>
  T fail() {
    bad_ = true;
    rest_ = {};
    return T{};
  }
  std::string_view rest_;
  bool bad_ = false;
};

void write_layout(Writer& w, const ModelShape& shape, const LayoutOptions& layout) {
  w.put(shape.num_layers);
  w.put(shape.num_kv_heads);
  w.put(shape.head_dim);
  w.put(shape.dtype_bytes);
  w.put(static_cast<std::uint8_t>(shape.latent));
  w.put(layout.num_pages);
  w.put(layout.page_tokens);
  w.put(static_cast<std::uint8_t>(layout.order));
  w.put(static_cast<std::uint8_t>(layout.planes));
  w.put(static_cast<std::uint8_t>(layout.cell));
  w.put(layout.tp_size);
  w.put(layout.tp_rank);
}

void read_layout(Reader& r, ModelShape& shape, LayoutOptions& layout) {
  shape.num_layers = r.get<std::uint32_t>();
  shape.num_kv_heads = r.get<std::uint32_t>();
  shape.head_dim = r.get<std::uint32_t>();
  shape.dtype_bytes = r.get<std::uint32_t>();
  shape.latent = r.small(1) != 0;
  layout.num_pages = r.get<std::uint32_t>();
  layout.page_tokens = r.get<std::uint32_t>();
  layout.order = static_cast<PoolOrder>(r.small(1));
  layout.planes = static_cast<Planes>(r.small(1));
  layout.cell = static_cast<CellOrder>(r.small(1));
  layout.tp_size = r.get<std::uint32_t>();
  layout.tp_rank = r.get<std::uint32_t>();
}

std::string encode_one(const Ticket& m) {
  Writer w(Type::kTicket);
  w.put(m.request);
  w.put(m.ticket);
  w.put(m.life);
  write_layout(w, m.shape, m.layout);
  w.put(m.base);
  w.put(m.sender_tp);
  w.put(m.sender_rank);
  w.put(m.expires_ms);
  w.put(m.first_page);
  w.put(m.total_pages);
  w.put(m.chunk_first);
  w.text(m.address);
  w.put(static_cast<std::uint32_t>(m.pages.size()));
  for (const PageId page : m.pages)
    w.put(page);
  return w.take();
}

std::string encode_one(const Ready& m) {
  Writer w(Type::kReady);
  w.put(m.request);
  w.put(m.ticket);
  w.put(m.sender_rank);
  return w.take();
}

std::string encode_one(const Go& m) {
  Writer w(Type::kGo);
  w.put(m.request);
  w.put(m.ticket);
  w.put(m.life);
  w.put(m.later);
  return w.take();
}

std::string encode_one(const Abort& m) {
  Writer w(Type::kAbort);
  w.put(m.request);
  w.put(m.ticket);
  w.text(m.reason);
  return w.take();
}

std::string encode_one(const Parts& m) {
  Writer w(Type::kParts);
  w.put(m.request);
  w.put(m.ticket);
  w.put(m.sender_rank);
  w.put(static_cast<std::uint32_t>(m.parts.size()));
  for (const Part& part : m.parts) {
    w.put(part.first_layer);
    w.put(part.num_layers);
    w.put(part.first_page);
    w.put(part.num_pages);
  }
  return w.take();
}

std::string encode_one(const Stopped& m) {
  Writer w(Type::kStopped);
  w.put(m.request);
  w.put(m.ticket);
  w.put(m.sender_rank);
  w.put(static_cast<std::uint16_t>(m.code));
  w.text(m.reason);
  return w.take();
}

Any read_ticket(Reader& r) {
  Ticket m;
  m.request = r.get<std::uint64_t>();
  m.ticket = r.get<std::uint64_t>();
  m.life = r.get<std::uint64_t>();
  read_layout(r, m.shape, m.layout);
  m.base = r.get<std::uint64_t>();
  m.sender_tp = r.get<std::uint32_t>();
  m.sender_rank = r.get<std::uint32_t>();
  m.expires_ms = r.get<std::uint32_t>();
  m.first_page = r.get<std::uint32_t>();
  m.total_pages = r.get<std::uint32_t>();
  m.chunk_first = r.get<std::uint32_t>();
  m.address = r.text();
  m.pages.resize(r.count(sizeof(PageId), kMostPages));
  for (PageId& page : m.pages)
    page = r.get<std::uint32_t>();
  return m;
}

Any read_parts(Reader& r) {
  Parts m;
  m.request = r.get<std::uint64_t>();
  m.ticket = r.get<std::uint64_t>();
  m.sender_rank = r.get<std::uint32_t>();
  m.parts.resize(r.count(sizeof(Part), kMostParts));
  for (Part& part : m.parts) {
    part.first_layer = r.get<std::uint32_t>();
    part.num_layers = r.get<std::uint32_t>();
    part.first_page = r.get<std::uint32_t>();
    part.num_pages = r.get<std::uint32_t>();
  }
  return m;
}

Any read_ready(Reader& r) {
  Ready m;
  m.request = r.get<std::uint64_t>();
  m.ticket = r.get<std::uint64_t>();
  m.sender_rank = r.get<std::uint32_t>();
  return m;
}

Any read_go(Reader& r) {
  Go m;
  m.request = r.get<std::uint64_t>();
  m.ticket = r.get<std::uint64_t>();
  m.life = r.get<std::uint64_t>();
  m.later = r.get<std::uint64_t>();
  return m;
}

Any read_abort(Reader& r) {
  Abort m;
  m.request = r.get<std::uint64_t>();
  m.ticket = r.get<std::uint64_t>();
  m.reason = r.text();
  return m;
}

// A code this build does not know, or "ok", is kept as an internal error of the peer.
Code known_code(std::uint16_t value) {
  const bool known = value >= 1 && value <= static_cast<std::uint16_t>(Code::kDenied);
  return known ? static_cast<Code>(value) : Code::kInternal;
}

Any read_stopped(Reader& r) {
  Stopped m;
  m.request = r.get<std::uint64_t>();
  m.ticket = r.get<std::uint64_t>();
  m.sender_rank = r.get<std::uint32_t>();
  m.code = known_code(r.get<std::uint16_t>());
  m.reason = r.text();
  return m;
}

// What a ticket says about its own table must add up before anybody computes with it.
Result<> check_ticket(const Ticket& m) {
  const std::uint64_t end = std::uint64_t{m.chunk_first} + m.pages.size();
  if (end > m.total_pages || std::uint64_t{m.first_page} + m.total_pages > UINT32_MAX)
    return invalid_argument(fmt::format("KV ticket of request {}: pages [{}, {}) of a table of {}",
                                        m.request, m.chunk_first, end, m.total_pages));
  return {};
}

}  // namespace

std::string encode(const Any& message) {
  return std::visit([](const auto& m) { return encode_one(m); }, message);
}

Result<Any> decode(std::string_view bytes) {
  if (bytes.size() < 4 || bytes.substr(0, 2) != kMagic)
    return invalid_argument(
        fmt::format("not a KV message: {} bytes without its mark", bytes.size()));
  if (const auto version = static_cast<std::uint8_t>(bytes[2]); version != kVersion)
    return make_error(
        Code::kIncompatible,
        fmt::format("KV message of version {}; this side speaks version {}", version, kVersion));
  Reader r(bytes.substr(4));
  Any message;
  switch (static_cast<Type>(bytes[3])) {
    case Type::kTicket:
      message = read_ticket(r);
      break;
    case Type::kReady:
      message = read_ready(r);
      break;
    case Type::kGo:
      message = read_go(r);
      break;
    case Type::kAbort:
      message = read_abort(r);
      break;
    case Type::kParts:
      message = read_parts(r);
      break;
    case Type::kStopped:
      message = read_stopped(r);
      break;
    default:
      return invalid_argument(
          fmt::format("KV message of unknown type {}", static_cast<unsigned char>(bytes[3])));
  }
  if (!r.complete())
    return invalid_argument(fmt::format("malformed KV message of type {} and {} bytes",
                                        static_cast<unsigned char>(bytes[3]), bytes.size()));
  if (const auto* ticket = std::get_if<Ticket>(&message)) CROSSDOCK_CHECK_OK(check_ticket(*ticket));
  return message;
}

std::vector<Ticket> chunks_of(const Ticket& ticket) {
  std::vector<Ticket> chunks;
  std::size_t at = 0;
  do {
    Ticket chunk = ticket;
    const std::size_t end = std::min(at + kMostPages, ticket.pages.size());
    chunk.chunk_first = static_cast<std::uint32_t>(at);
    chunk.pages.assign(ticket.pages.begin() + static_cast<std::ptrdiff_t>(at),
                       ticket.pages.begin() + static_cast<std::ptrdiff_t>(end));
    chunks.push_back(std::move(chunk));
    at = end;
  } while (at < ticket.pages.size());
  return chunks;
}

}  // namespace crossdock::kv::message
