// See publisher.hpp.
// SPDX-License-Identifier: Apache-2.0
#include "transfer/publisher.hpp"

#include <fmt/format.h>

#include "base/address.hpp"
#include "wire/codec.hpp"

namespace crossdock::transfer::detail {
namespace {

constexpr std::uint16_t kRecordVersion = 1;
constexpr std::uint32_t kMaxAddressBytes = 512;

std::string key_of(const std::string& name) {
  return "crossdock/segment/" + name;
}

Result<std::string> encode(const SegmentRecord& record) {
  std::vector<std::byte> bytes;
  wire::Writer writer{wire::VectorSink(bytes)};
  writer.u16("record version", kRecordVersion);
  writer.u64("instance", record.instance);
  writer.string("address", record.address, kMaxAddressBytes);
  CROSSDOCK_CHECK_OK(writer.finish("segment record"));
  return std::string(wire::as_text(bytes));
}

Result<SegmentRecord> decode(std::string_view value) {
  wire::Reader reader(wire::as_bytes(value));
  std::uint16_t version = 0;
  SegmentRecord record;
  reader.u16("record version", version);
  if (!reader.failed() && version != kRecordVersion)
    return make_error(
        Code::kIncompatible,
        fmt::format("the store holds a segment record of version {}, this is version {}", version,
                    kRecordVersion));
  reader.u64("instance", record.instance);
  reader.string("address", record.address, kMaxAddressBytes);
  CROSSDOCK_CHECK_OK(reader.finish("segment record"));
  return record;
}

rendezvous::Lease lease_of(std::chrono::nanoseconds lease) {
  return std::chrono::duration_cast<std::chrono::milliseconds>(lease);
}

}  // namespace

Result<std::unique_ptr<Publisher>> Publisher::create(const std::string& store, Deadline deadline) {
  auto publisher = std::make_unique<Publisher>();
  if (store == "p2p") return publisher;
  auto opened = rendezvous::open_store(store, deadline);
  if (!opened.ok()) {
    Error error = std::move(opened).error();
    if (error.code == Code::kInvalidArgument) error.message += "; or \"p2p\" for no store";
    return error;
  }
  publisher->store_ = std::move(*opened);
  return publisher;
}

Result<> Publisher::publish(const std::string& name, const SegmentRecord& record,
                            std::chrono::nanoseconds lease, Deadline deadline) {
  if (peer_to_peer()) return {};
  CROSSDOCK_TRY(value, encode(record));
  const auto put = [&](rendezvous::Lease until) {
    return store_->put(key_of(name), value, until, deadline);
  };
  if (!published_) {
    auto first = put(lease_of(lease));
    const bool unleased = first.code() == Code::kUnsupported;
    if (unleased) first = put(std::nullopt);
    leased_ = !unleased;
    published_ = first.ok();
    return first;
  }
  if (!leased_) return put(std::nullopt);
  auto again = put(lease_of(lease));
  if (again.code() != Code::kUnsupported) return again;
  // A store over HTTP goes by its last answer, which may have been a proxy's: have it look again.
  (void)store_->get(key_of(name), deadline);
  return put(lease_of(lease));
}

Result<> Publisher::withdraw(const std::string& name, const SegmentRecord& record,
                             Deadline deadline) {
  if (peer_to_peer()) return {};
  CROSSDOCK_TRY(entry, store_->get(key_of(name), deadline));
  if (!entry) return {};
  // A successor may have taken the name, or take it while we look: its entry stays.
  const auto stored = decode(entry->value);
  if (stored.ok() && stored->instance != record.instance) return {};
  const auto removed = store_->compare_and_remove(key_of(name), entry->revision, deadline);
  // A plain HTTP service cannot compare. There a successor that takes the name in this instant
  // loses its entry until it renews it.
  if (removed.code() == Code::kUnsupported) return store_->remove(key_of(name), deadline);
  if (!removed.ok()) return removed.error();
  return {};
}

Result<SegmentRecord> Publisher::find(const std::string& name, Deadline deadline) {
  if (peer_to_peer()) {
    CROSSDOCK_TRY(address, base::parse_host_port(name));
    if (address.port == 0)
      return invalid_argument(
          fmt::format("'{}' has no port; without a store a peer's name is its "
                      "control address, \"host:port\" or \"[v6]:port\"",
                      name));
    return SegmentRecord{.address = base::to_string(address)};
  }
  CROSSDOCK_TRY(entry, store_->get(key_of(name), deadline));
  if (!entry)
    return make_error(Code::kNotFound,
                      fmt::format("no engine '{}' in store {}", name, store_->describe()));
  return decode(entry->value);
}

}  // namespace crossdock::transfer::detail
