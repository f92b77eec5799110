// ModelShape: what one token costs in the KV cache of a model. Values only; thread-compatible.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include <crossdock/core/export.hpp>
#include <crossdock/core/result.hpp>

namespace crossdock::kv {
inline namespace v1 {

// A row is what one token stores for one head in one plane: head_dim elements. Attention with
// separate keys and values has two planes (K and V); latent attention (MLA) stores one joined
// vector a token, which is one plane of one head.
struct ModelShape {
  std::string name = "custom";
  std::uint32_t num_layers = 0;
  std::uint32_t num_kv_heads = 0;  // of the whole model, before tensor parallelism; 1 for latent
  std::uint32_t head_dim = 0;      // elements; for latent the width of the joined vector
  std::uint32_t dtype_bytes = 2;   // bytes of an element: 1 (fp8), 2 (bf16), 4
  bool latent = false;

  [[nodiscard]] std::uint32_t num_planes() const noexcept { return latent ? 1 : 2; }
  [[nodiscard]] std::size_t row_bytes() const noexcept {
    return std::size_t{head_dim} * dtype_bytes;
  }
  // All heads and planes of one token in one layer, in bytes.
  [[nodiscard]] std::size_t token_layer_bytes() const noexcept {
    return std::size_t{num_planes()} * num_kv_heads * row_bytes();
  }
  [[nodiscard]] std::size_t token_bytes() const noexcept {
    return num_layers * token_layer_bytes();
  }
  // Same bytes, whatever the name.
  [[nodiscard]] CROSSDOCK_API bool same_bytes(const ModelShape& other) const noexcept;
  // "48 layers x 4 heads x 128 x 2 B, K and V"
  [[nodiscard]] CROSSDOCK_API std::string describe() const;
};

// kInvalidArgument names the field, its value and the rule.
CROSSDOCK_API Result<> validate(const ModelShape& shape);

// The models known by name: "qwen3-30b-a3b", "llama-3.1-8b", "deepseek-v3".
CROSSDOCK_API const std::vector<ModelShape>& known_models();

// A known name (any case), or "layers=48,heads=4,dim=128,dtype=2" with an optional ",latent".
// kNotFound lists the known names; kInvalidArgument names the part that is wrong.
CROSSDOCK_API Result<ModelShape> parse_model_shape(std::string_view text);

}  // namespace v1
}  // namespace crossdock::kv
