// KvCluster: prefill and decode ranks of one model in this process, each with its own engine, pool
// and sender or receiver, so that hand-overs between any tensor-parallel sizes can be tested
// without other processes. Made and used by one thread. SPDX-License-Identifier: Apache-2.0
#pragma once

#include <algorithm>
#include <chrono>
#include <cstring>
#include <memory>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include <crossdock/kv/receiver.hpp>
#include <crossdock/kv/sender.hpp>
#include <crossdock/transfer/engine.hpp>

#include "kv/pattern.hpp"

namespace crossdock::support {

// Until `done` is true, or a minute has passed, which a test never takes.
template <class Done>
bool comes_true(Done done) {
  for (const auto limit = Deadline::in(std::chrono::minutes(1)); !limit.passed();
       std::this_thread::yield())
    if (done()) return true;
  return false;
}

// Every byte of a pool.
inline void poison(const kv::PagePool& pool, int value) {
  std::memset(pool.base(), value, pool.layout().pool_bytes());
}
inline bool all_are(const kv::PagePool& pool, int value) {
  const auto* bytes = reinterpret_cast<const unsigned char*>(pool.base());
  return std::all_of(bytes, bytes + pool.layout().pool_bytes(),
                     [value](unsigned char byte) { return byte == value; });
}

struct KvClusterOptions {
  kv::ModelShape shape{"test", 3, 8, 16, 2, false};
  std::uint32_t prefill_tp = 1;
  std::uint32_t decode_tp = 1;
  kv::LayoutOptions prefill_layout{.num_pages = 64, .page_tokens = 4};
  kv::LayoutOptions decode_layout{.num_pages = 64, .page_tokens = 4};
  kv::SenderOptions sender = {};
  kv::ReceiverOptions receiver = {};
  std::string transport = "auto";
  std::string decode_name = {};  // of the engines of decode; empty is their address
};

// The engine is first, so that it outlives what uses it.
struct KvPrefillRank {
  KvPrefillRank(transfer::Engine made, const kv::PageLayout& layout, kv::SenderOptions options)
      : engine(std::move(made)),
        pool(kv::PagePool::create(engine, layout).value()),
        sender(kv::KvSender::create(engine, pool, std::move(options)).value()) {}
  transfer::Engine engine;
  kv::PagePool pool;
  kv::KvSender sender;
};
struct KvDecodeRank {
  KvDecodeRank(transfer::Engine made, const kv::PageLayout& layout, kv::ReceiverOptions options)
      : engine(std::move(made)),
        pool(kv::PagePool::create(engine, layout).value()),
        receiver(kv::KvReceiver::create(engine, pool, std::move(options)).value()) {}
  transfer::Engine engine;
  kv::PagePool pool;
  kv::KvReceiver receiver;
};

class KvCluster {
 public:
  explicit KvCluster(const KvClusterOptions& options) : options_(options) {
    for (std::uint32_t rank = 0; rank < options.prefill_tp; ++rank)
      prefill.push_back(std::make_unique<KvPrefillRank>(
          make_engine(""), layout_of(options.prefill_layout, options.prefill_tp, rank),
          options.sender));
    for (std::uint32_t rank = 0; rank < options.decode_tp; ++rank)
      decode.push_back(std::make_unique<KvDecodeRank>(
          make_engine(options.decode_name),
          layout_of(options.decode_layout, options.decode_tp, rank), options.receiver));
  }
  KvCluster(KvCluster&&) noexcept = default;
  KvCluster& operator=(KvCluster&&) = delete;
  // Decode is closed in order while prefill still lives: an engine that is merely dropped leaves
  // pages that a sender may still write to in memory for ever, as it must.
  ~KvCluster() {
    for (const auto& rank : decode)
      if (rank) (void)rank->engine.close(Deadline::in(std::chrono::seconds(20)));
  }

  std::vector<std::unique_ptr<KvPrefillRank>> prefill;
  std::vector<std::unique_ptr<KvDecodeRank>> decode;

  [[nodiscard]] std::vector<std::string> sender_names() const {
    std::vector<std::string> names;
    for (const auto& rank : prefill)
      names.push_back(rank->engine.name());
    return names;
  }

  // Gives `request` its pages everywhere and makes every decode rank expect it.
  void admit_and_expect(kv::RequestId request, std::uint32_t num_pages, Deadline deadline) {
    for (auto& rank : prefill)
      rank->pool.admit({.request = request, .num_pages = num_pages}).value();
    for (auto& rank : decode) {
      rank->pool.admit({.request = request, .num_pages = num_pages}).value();
      expect(*rank, request, deadline).value();
    }
  }

  Result<> expect(KvDecodeRank& rank, kv::RequestId request, Deadline deadline) {
    kv::Expectation expectation;
    expectation.request = request;
    expectation.senders = sender_names();
    expectation.deadline = deadline;
    return rank.receiver.expect(expectation);
  }

  void fill(kv::RequestId request, std::uint32_t layer) {
    for (auto& rank : prefill) {
      const auto table = rank->pool.table(request).value();
      for (std::uint32_t i = 0; i < table.pages.size(); ++i)
        kv::pattern::fill_page(rank->pool.layout(), rank->pool.base(), layer, table.pages[i],
                               {request, i * rank->pool.layout().options().page_tokens});
    }
  }

  // Fills and pushes all layers of the request on every prefill rank.
  void send(kv::RequestId request) {
    for (std::uint32_t layer = 0; layer < options_.shape.num_layers; ++layer) {
      fill(request, layer);
      for (auto& rank : prefill)
        rank->sender.push(request, layer).value();
    }
    for (auto& rank : prefill)
      rank->sender.finish(request).value();
  }

  // The first wrong byte of the request on `rank`, or nothing.
  static std::optional<kv::pattern::Mismatch> mismatch(const KvDecodeRank& rank,
                                                       kv::RequestId request) {
    const kv::PageLayout& layout = rank.pool.layout();
    const auto table = rank.pool.table(request).value();
    for (std::uint32_t layer = 0; layer < layout.shape().num_layers; ++layer)
      for (std::uint32_t i = 0; i < table.pages.size(); ++i)
        if (auto bad = kv::pattern::check_page(layout, rank.pool.base(), layer, table.pages[i],
                                               {request, i * layout.options().page_tokens}))
          return bad;
    return std::nullopt;
  }

 private:
  transfer::Engine make_engine(const std::string& name) const {
    transfer::EngineOptions engine;
    engine.name = name;
    engine.config["transport.enabled"] = options_.transport;
    return transfer::Engine::create(engine).value();
  }
  [[nodiscard]] kv::PageLayout layout_of(kv::LayoutOptions layout, std::uint32_t tp,
                                         std::uint32_t rank) const {
    layout.tp_size = tp;
    layout.tp_rank = rank;
    return kv::PageLayout::create(options_.shape, layout).value();
  }
  const KvClusterOptions options_;
};

}  // namespace crossdock::support
