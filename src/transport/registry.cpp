// The list of transports and how each is made from the configuration: make_transports(). Adding a
// transport is one row of kKinds. Runs on the thread that creates the engine; no state.
// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <array>
#include <fmt/format.h>
#include <fmt/ranges.h>

#include "base/config.hpp"
#include "base/log.hpp"
#include "transport/faulty/transport.hpp"
#include "transport/loopback/transport.hpp"
#include "transport/shm/transport.hpp"
#include "transport/tcp/transport.hpp"

namespace crossdock::transport {
namespace {

using Made = Result<std::unique_ptr<Transport>>;

std::uint32_t count(const base::Config& config, std::string_view name) {
  return static_cast<std::uint32_t>(config.integer(name));
}

CopyRailOptions rail_options(const base::Config& config, std::string name) {
  return {.name = std::move(name),
          .inline_bytes = config.size("transport.shm.inline_bytes"),
          .spin = config.duration("transport.shm.spin")};
}

Made loopback_from_config(const TransportContext& context) {
  const base::Config& config = *context.config;
  return make_loopback(context, {.rails = count(config, "transport.loopback.threads"),
                                 .rail = rail_options(config, "xd-loop")});
}

Made shm_from_config(const TransportContext& context) {
  const base::Config& config = *context.config;
  const std::string& copy = config.string("transport.shm.copy");
  return make_shm(context, {.rails = count(config, "transport.shm.threads"),
                            .copy = copy == "map"  ? shm::CopyMode::kMap
                                    : copy == "vm" ? shm::CopyMode::kVm
                                                   : shm::CopyMode::kAuto,
                            .populate = config.duration("transport.shm.populate"),
                            .rail = rail_options(config, "xd-shm")});
}

struct Kind {
  std::string_view name;
  Made (*make)(const TransportContext& context);
};
// Best first: the order of "auto".
constexpr std::array kKinds = {
    Kind{"loopback", loopback_from_config},
    Kind{"shm", shm_from_config},
    Kind{"tcp", [](const TransportContext& context) -> Made { return make_tcp(context); }},
};

static_assert(kKinds.size() <= kMaxTransports,
              "\"auto\" makes one transport of each kind: raise kMaxTransports");

constexpr std::string_view kFaultyPrefix = "faulty+";

Made make_faulty_from_config(const TransportContext& context, const Kind& kind) {
  CROSSDOCK_TRY(inner, kind.make(context));
  const base::Config& config = *context.config;
  return make_faulty(std::move(inner),
                     {.seed = static_cast<std::uint64_t>(config.integer("transport.faulty.seed")),
                      .delay_max = config.duration("transport.faulty.delay_max"),
                      .drop_ppm = count(config, "transport.faulty.drop_ppm"),
                      .reorder = count(config, "transport.faulty.reorder"),
                      .duplicate_ppm = count(config, "transport.faulty.duplicate_ppm"),
                      .corrupt_ppm = count(config, "transport.faulty.corrupt_ppm"),
                      .fail_ppm = count(config, "transport.faulty.fail_ppm")});
}

Error unknown(std::string_view name) {
  std::vector<std::string_view> names;
  for (const Kind& kind : kKinds)
    names.push_back(kind.name);
  return invalid_argument(
      fmt::format("transport.enabled names '{}', which is no transport; there are {}, each also as "
                  "'faulty+...', and 'auto'",
                  name, fmt::join(names, ", ")));
}

Made make_named(const TransportContext& context, std::string_view name) {
  std::string_view bare = name;
  const bool faulty = bare.starts_with(kFaultyPrefix);
  if (faulty) bare.remove_prefix(kFaultyPrefix.size());
  const auto kind = std::ranges::find(kKinds, bare, &Kind::name);
  if (kind == kKinds.end()) return unknown(name);
  return faulty ? make_faulty_from_config(context, *kind) : kind->make(context);
}

// What "auto" stands for; a kind that this machine cannot give is left out.
std::vector<std::unique_ptr<Transport>> make_all(TransportContext context) {
  std::vector<std::unique_ptr<Transport>> all;
  for (const Kind& kind : kKinds) {
    context.slot = all.size();
    auto made = kind.make(context);
    if (made.ok())
      all.push_back(std::move(*made));
    else if (context.log != nullptr)
      CROSSDOCK_LOG(*context.log, kWarn, "transport {} is not available: {}", kind.name,
                    made.error().message);
  }
  return all;
}

}  // namespace

Result<std::vector<std::unique_ptr<Transport>>> make_transports(const TransportContext& context) {
  const auto names = context.config->list("transport.enabled");
  if (names.empty())
    return invalid_argument("transport.enabled is empty; name transports, or 'auto' for all");
  if (names == std::vector<std::string>{"auto"}) {
    auto all = make_all(context);
    if (all.empty()) return make_error(Code::kUnsupported, "no transport works on this machine");
    return all;
  }
  if (names.size() > kMaxTransports)
    return invalid_argument(
        fmt::format("transport.enabled names {} transports; at most {} are possible", names.size(),
                    kMaxTransports));
  std::vector<std::unique_ptr<Transport>> transports;
  TransportContext own = context;
  for (const std::string& name : names) {
    if (std::ranges::count(names, name) > 1)
      return invalid_argument(fmt::format("transport.enabled names '{}' twice", name));
    own.slot = transports.size();
    CROSSDOCK_TRY(made, make_named(own, name));
    transports.push_back(std::move(made));
  }
  return transports;
}

}  // namespace crossdock::transport
