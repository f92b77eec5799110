// The number formats of the tensor core and of bulk reductions, to and from float. Round to nearest
// even; the 8-bit formats saturate. Pure functions.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>

namespace crossdock::twin {

float bf16_to_float(std::uint16_t bits);
std::uint16_t float_to_bf16(float value);
float f16_to_float(std::uint16_t bits);
std::uint16_t float_to_f16(float value);
float e4m3_to_float(std::uint8_t bits);
float e5m2_to_float(std::uint8_t bits);

}  // namespace crossdock::twin
