// The table of known models and the parser of custom shapes. Pure functions.
// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <cctype>
#include <charconv>
#include <fmt/format.h>

#include <crossdock/kv/model_shape.hpp>

namespace crossdock::kv {
inline namespace v1 {
namespace {

// Far above any model; keeps every product of the layout arithmetic inside 64 bits.
constexpr std::uint32_t kMostLayers = 4096;
constexpr std::uint32_t kMostHeads = 4096;
constexpr std::uint32_t kWidestHead = 65536;

std::string lower(std::string_view text) {
  std::string out(text);
  std::transform(out.begin(), out.end(), out.begin(),
                 [](unsigned char c) { return static_cast<char>(std::tolower(c)); });
  return out;
}

Result<> check_range(std::string_view field, std::uint32_t value, std::uint32_t most) {
  if (value >= 1 && value <= most) return {};
  return invalid_argument(
      fmt::format("model shape: {} = {} must be between 1 and {}", field, value, most));
}

Result<> apply_part(ModelShape& shape, std::string_view part) {
  if (part == "latent") {
    shape.latent = true;
    return {};
  }
  const auto equals = part.find('=');
  const auto key = part.substr(0, equals);
  std::uint32_t* field = key == "layers"  ? &shape.num_layers
                         : key == "heads" ? &shape.num_kv_heads
                         : key == "dim"   ? &shape.head_dim
                         : key == "dtype" ? &shape.dtype_bytes
                                          : nullptr;
  if (field == nullptr || equals == std::string_view::npos)
    return invalid_argument(fmt::format(
        "model shape: '{}' is not one of layers=N, heads=N, dim=N, dtype=BYTES, latent", part));
  const auto digits = part.substr(equals + 1);
  const auto [end, problem] = std::from_chars(digits.data(), digits.data() + digits.size(), *field);
  if (problem != std::errc{} || end != digits.data() + digits.size())
    return invalid_argument(
        fmt::format("model shape: {} = '{}' must be a whole number", key, digits));
  return {};
}

// Precondition: every part of `text` is a known one.
Result<> check_given(std::string_view text, std::string_view field) {
  const std::string part = std::string(field) + "=";
  if (text.starts_with(part) || text.find("," + part) != std::string_view::npos) return {};
  return invalid_argument(fmt::format(
      "model shape: {} is missing in '{}'; it takes layers=N,heads=N,dim=N[,dtype=BYTES][,latent]",
      field, text));
}

Result<ModelShape> parse_custom(std::string_view text) {
  ModelShape shape;
  shape.num_kv_heads = text.find("latent") != std::string_view::npos ? 1 : 0;
  const std::string_view whole = text;
  while (!text.empty()) {
    const auto comma = text.find(',');
    CROSSDOCK_CHECK_OK(apply_part(shape, text.substr(0, comma)));
    text = comma == std::string_view::npos ? std::string_view{} : text.substr(comma + 1);
  }
  for (const std::string_view field : {"layers", "heads", "dim"})
    if (!(shape.latent && field == "heads")) CROSSDOCK_CHECK_OK(check_given(whole, field));
  CROSSDOCK_CHECK_OK(validate(shape));
  return shape;
}

}  // namespace

bool ModelShape::same_bytes(const ModelShape& other) const noexcept {
  return num_layers == other.num_layers && num_kv_heads == other.num_kv_heads &&
         head_dim == other.head_dim && dtype_bytes == other.dtype_bytes && latent == other.latent;
}

std::string ModelShape::describe() const {
  return fmt::format("{} layers x {} heads x {} x {} B, {}", num_layers, num_kv_heads, head_dim,
                     dtype_bytes, latent ? "joined latent" : "K and V");
}

Result<> validate(const ModelShape& shape) {
  CROSSDOCK_CHECK_OK(check_range("layers", shape.num_layers, kMostLayers));
  CROSSDOCK_CHECK_OK(check_range("heads", shape.num_kv_heads, kMostHeads));
  CROSSDOCK_CHECK_OK(check_range("dim", shape.head_dim, kWidestHead));
  CROSSDOCK_CHECK_OK(check_range("dtype", shape.dtype_bytes, 8));
  if (shape.latent && shape.num_kv_heads != 1)
    return invalid_argument(fmt::format(
        "model shape: heads = {} must be 1 for a latent cache, which has one joined vector a token",
        shape.num_kv_heads));
  return {};
}

const std::vector<ModelShape>& known_models() {
  // Dimensions as in the published configuration files of the models, bf16 caches.
  static const std::vector<ModelShape> models = {
      {"qwen3-30b-a3b", 48, 4, 128, 2, false},
      {"llama-3.1-8b", 32, 8, 128, 2, false},
      {"deepseek-v3", 61, 1, 576, 2, true},
  };
  return models;
}

Result<ModelShape> parse_model_shape(std::string_view text) {
  const std::string wanted = lower(text);
  for (const auto& model : known_models())
    if (model.name == wanted) return model;
  if (wanted.find('=') != std::string::npos) return parse_custom(wanted);
  std::string names;
  for (const auto& model : known_models())
    names += (names.empty() ? "" : ", ") + model.name;
  return make_error(Code::kNotFound,
                    fmt::format("no model '{}'; known are {}; or give a shape like "
                                "layers=48,heads=4,dim=128,dtype=2",
                                text, names));
}

}  // namespace v1
}  // namespace crossdock::kv
