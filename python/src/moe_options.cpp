// See moe_options.hpp. SPDX-License-Identifier: Apache-2.0
#include "moe_options.hpp"

#include <array>
#include <fmt/format.h>
#include <string>
#include <utility>

#include "bind.hpp"
#include "ep_options.hpp"
#include "errors.hpp"
#include "fields.hpp"

namespace crossdock::python {
namespace {

using moe::Format;
using moe::GemmTile;

constexpr std::array<std::pair<const char*, Format>, 3> kFormats = {
    {{"bf16", Format::kBf16}, {"e4m3", Format::kE4m3}, {"e2m1", Format::kE2m1}}};
constexpr std::array<std::pair<const char*, moe::ScaleType>, 2> kScaleTypes = {
    {{"f32", moe::ScaleType::kF32}, {"ue8m0", moe::ScaleType::kUe8m0}}};
constexpr std::array<std::pair<const char*, GemmTile>, 6> kTiles = {{{"auto", GemmTile::kAuto},
                                                                     {"128", GemmTile::k128},
                                                                     {"64", GemmTile::k64},
                                                                     {"32", GemmTile::kFew32},
                                                                     {"16", GemmTile::kFew16},
                                                                     {"8", GemmTile::kFew8}}};

constexpr std::array<std::pair<const char*, moe::RowOrder>, 3> kRowOrders = {
    {{"auto", moe::RowOrder::kAuto},
     {"gather", moe::RowOrder::kGather},
     {"copy", moe::RowOrder::kCopy}}};

// The value of that name; `what` is for the message.
template <class T, std::size_t kCount>
T named(const char* what, nb::handle given,
        const std::array<std::pair<const char*, T>, kCount>& all) {
  const std::string name = text_of(given);
  std::string known;
  for (const auto& [text, value] : all) {
    if (name == text) return value;
    known += fmt::format("{}\"{}\"", known.empty() ? "" : ", ", text);
  }
  raise(invalid_argument(fmt::format("{} = {} must be one of {}", what, name, known)));
}

nb::dict sizes_of(nb::handle options, std::uint32_t world) {
  moe::LayerOptions out = layer_options_of(options);
  out.ranks.world = world;
  return dict_of(value_or_raise(moe::layer_sizes(out)));
}

}  // namespace

moe::Format format_of(nb::handle name) {
  return named("format", name, kFormats);
}
moe::GemmTile tile_of(nb::handle name) {
  return named("tile", name, kTiles);
}
const char* format_name(moe::Format format) {
  for (const auto& [name, value] : kFormats)
    if (value == format) return name;
  return "unknown";
}
moe::ScaleType scale_type_of(nb::handle name) {
  return named("scales", name, kScaleTypes);
}
const char* scale_type_name(moe::ScaleType type) {
  return type == moe::ScaleType::kUe8m0 ? "ue8m0" : "f32";
}

moe::LayerOptions layer_options_of(nb::handle options) {
  moe::LayerOptions out;
  const auto read = [&](const char* name, std::uint32_t& field) {
    field = number_of(options.attr(name), name);
  };
  const auto flag = [&](const char* name, bool& field) {
    field = flag_of(options.attr(name), name);
  };
  read("experts", out.experts);
  read("top_k", out.top_k);
  read("max_tokens", out.max_tokens);
  read("hidden", out.hidden);
  read("inter", out.inter);
  read("shared_inter", out.shared_inter);
  read("max_places", out.max_places);
  read("dispatch_sms", out.dispatch_sms);
  read("combine_sms", out.combine_sms);
  read("gemm_sms", out.gemm_sms);
  out.expand_sms = expand_sms_of(options.attr("expand_sms"));
  out.format = format_of(options.attr("format"));
  out.scales = scale_type_of(options.attr("scales"));
  out.tile = tile_of(options.attr("tile"));
  out.row_order = named("row_order", options.attr("row_order"), kRowOrders);
  flag("wide_ids", out.wide_ids);
  flag("fast", out.fast);
  flag("statistics", out.statistics);
  out.clamp = real_of(options.attr("clamp"), "clamp");
  out.wait = time_of(options.attr("wait"), "wait");
  out.compile_timeout = std::chrono::ceil<std::chrono::milliseconds>(
      time_of(options.attr("compile_timeout"), "compile_timeout"));
  return out;
}

namespace {

nb::dict dict_of(const moe::WeightSizes& sizes) {
  nb::dict out;
  out["gate_up_bytes"] = sizes.gate_up_bytes;
  out["gate_up_scales"] = sizes.gate_up_scales;
  out["down_bytes"] = sizes.down_bytes;
  out["down_scales"] = sizes.down_scales;
  out["scale_bytes"] = sizes.scale_bytes;
  return out;
}

}  // namespace

nb::dict dict_of(const moe::LayerSizes& sizes) {
  nb::dict out;
  out["group"] = dict_of(sizes.group);
  out["places"] = sizes.places;
  out["activation_bytes"] = sizes.activation_bytes;
  out["output_bytes"] = sizes.output_bytes;
  out["ones_bytes"] = sizes.ones_bytes;
  out["weights"] = dict_of(sizes.weights);
  out["shared_bytes"] = sizes.shared_bytes;
  out["shared_weights"] = dict_of(sizes.shared_weights);
  return out;
}

void add_moe_options(nb::module_& m) {
  m.def("moe_sizes", &sizes_of, nb::arg("options"), nb::arg("world"));
  m.attr("moe_weight_layout_version") = moe::kWeightLayoutVersion;
}

}  // namespace crossdock::python
