// Versions of the library and of its wire protocol.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <string_view>

namespace crossdock {
inline namespace v1 {

inline constexpr int kVersionMajor = 0;
inline constexpr int kVersionMinor = 1;
inline constexpr int kVersionPatch = 0;
inline constexpr std::string_view kVersion = "0.1.0";

// Peers of different wire versions refuse each other with kIncompatible.
inline constexpr std::uint16_t kWireVersion = 3;

}  // namespace v1
}  // namespace crossdock
