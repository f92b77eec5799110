// See processes.hpp. SPDX-License-Identifier: Apache-2.0
#include "bench/processes.hpp"

#include <algorithm>
#include <charconv>
#include <cstdlib>
#include <cstring>
#include <fmt/format.h>
#include <string_view>

#include "base/address.hpp"
#include "rendezvous/store_server.hpp"

namespace crossdock::tools::bench {
namespace {

constexpr std::string_view kScheme = "tcp://";

Result<std::optional<std::uint32_t>> number_of(const char* variable) {
  const char* text = std::getenv(variable);
  if (text == nullptr || *text == '\0') return std::optional<std::uint32_t>();
  std::uint32_t value = 0;
  const auto [end, error] = std::from_chars(text, text + std::strlen(text), value);
  if (error != std::errc() || *end != '\0')
    return invalid_argument(fmt::format("environment {}={}: must be a number", variable, text));
  return std::optional(value);
}

// torchrun's own store has MASTER_PORT; ours is on the next one then.
Result<std::string> store_of_launcher() {
  CROSSDOCK_TRY(port, number_of("MASTER_PORT"));
  const char* host = std::getenv("MASTER_ADDR");
  if (!port || host == nullptr) return std::string();
  const char* taken = std::getenv("TORCHELASTIC_USE_AGENT_STORE");
  const bool next = taken != nullptr && std::string_view(taken) == "True";
  const std::uint32_t ours = *port + (next ? 1 : 0);
  if (ours > 65535)
    return invalid_argument(
        fmt::format("environment MASTER_PORT={}: must leave port {} for the "
                    "store, at most 65535",
                    *port, ours));
  return fmt::format("{}{}", kScheme,
                     base::format_host_port(host, static_cast<std::uint16_t>(ours)));
}

}  // namespace

Result<ProcessOptions> with_launcher(ProcessOptions given) {
  CROSSDOCK_TRY(rank, number_of("RANK"));
  CROSSDOCK_TRY(world, number_of("WORLD_SIZE"));
  if (!rank || world.value_or(0) < 2) return given;
  // Ranks of this process alone, whatever has started it.
  if (!given.rank && given.world != 0) return given;
  CROSSDOCK_TRY(local, number_of("LOCAL_RANK"));
  if (!given.rank) given.rank = rank;
  if (given.world == 0) given.world = *world;
  given.local_rank = local;
  if (!given.store.empty()) return given;
  CROSSDOCK_TRY(store, store_of_launcher());
  given.store = std::move(store);
  return given;
}

std::uint32_t device_of(const ProcessOptions& options, std::uint32_t gpus) {
  if (options.device) return *options.device;
  return options.local_rank.value_or(options.rank.value_or(0)) % std::max(gpus, 1u);
}

Result<std::unique_ptr<rendezvous::StoreServer>> serve_store(const ProcessOptions& given,
                                                             const ProcessOptions& filled,
                                                             std::chrono::nanoseconds timeout) {
  if (!given.store.empty() || filled.store.empty() || filled.rank != 0u)
    return std::unique_ptr<rendezvous::StoreServer>();
  CROSSDOCK_TRY(address, base::parse_host_port(filled.store.substr(kScheme.size())));
  return rendezvous::StoreServer::create({.address = address}, Deadline::in(timeout));
}

}  // namespace crossdock::tools::bench
