// One well-filled sample of each control message, for codec tests and as fuzz seeds.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <tuple>

#include "wire/control.hpp"

namespace crossdock::test {

inline wire::HostIdentity sample_host() {
  return {.boot_id = "1f3c2d6e-0000-4000-8000-9a8b7c6d5e4f",
          .pid_namespace = 4026531836,
          .pid = 4711,
          .start_time = 123456789};
}

inline wire::RegionEntry sample_region(std::uint32_t id) {
  return {.region_id = id,
          .addr = 0x7f00'0000'0000 + id * std::uint64_t{1 << 20},
          .length = 1 << 20,
          .access = 3,
          .label = "kv",
          .keys = {{.transport = 0, .blob = "memfd:7"}, {.transport = 1, .blob = ""}}};
}

inline auto sample_messages() {
  using namespace wire;
  Nonce nonce;
  for (std::size_t i = 0; i < nonce.size(); ++i)
    nonce[i] = static_cast<std::byte>(i * 17);
  Mac mac;
  for (std::size_t i = 0; i < mac.size(); ++i)
    mac[i] = static_cast<std::byte>(255 - i);
  return std::tuple{
      Hello{.engine_name = "decode-0",
            .instance_id = 0x0102030405060708,
            .features = 5,
            .nonce = nonce,
            .purpose = Purpose::kData,
            .rail = 3,
            .token = 99,
            .host = sample_host()},
      Challenge{.nonce = nonce, .instance_id = 77},
      AuthProof{.mac = mac},
      Welcome{.engine_name = "prefill-0",
              .instance_id = 12,
              .features = 1,
              .data_token = 34,
              .host = sample_host(),
              .transports = {{.name = "shm", .address = ""},
                             {.name = "tcp", .address = std::string("\0\1\2", 3)}}},
      Refused{.code = Code::kDenied, .message = "no such rail"},
      SegmentPage{
          .version = 4, .first = 1, .total = 9, .regions = {sample_region(1), sample_region(2)}},
      RegionAdded{.version = 5, .regions = {sample_region(3)}},
      RegionsRemoved{.version = 6, .region_ids = {1, 2, 3}},
      Revoke{.token = 8, .region_ids = {3}},
      RevokeAck{.token = 8},
      Notify{.sequence = 1, .transfer_id = 2, .mailbox = "kv", .payload = std::string("a\0b", 3)},
      NotifyAck{.sequence = 1, .code = Code::kNotFound},
      Ping{.value = 42},
      Pong{.value = 43},
      Bye{.reason = "closed"},
  };
}

// Calls `fn(message)` for each.
template <class Fn>
void for_each_sample(Fn&& fn) {
  std::apply([&fn](const auto&... message) { (fn(message), ...); }, sample_messages());
}

}  // namespace crossdock::test
