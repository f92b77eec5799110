// See ep_options.hpp. SPDX-License-Identifier: Apache-2.0
#include "ep_options.hpp"

#include <fmt/format.h>
#include <nanobind/stl/string.h>
#include <string>
#include <vector>

#include "bind.hpp"
#include "errors.hpp"
#include "fields.hpp"

namespace crossdock::python {
namespace {

std::vector<std::uint32_t> numbers_of(nb::handle values, const char* name) {
  std::vector<std::uint32_t> out;
  for (const nb::handle value : nb::iter(values))
    out.push_back(number_of(value, name));
  return out;
}

// One number for all ranks, or a sequence of one for each.
void read_sms(nb::handle options, const char* name, std::uint32_t& all,
              std::vector<std::uint32_t>& each) {
  const nb::object value = options.attr(name);
  if (nb::isinstance<nb::sequence>(value))
    each = numbers_of(value, name);
  else
    all = number_of(value, name);
}

nb::dict sizes_of(nb::handle options, std::uint32_t world) {
  return dict_of(value_or_raise(ep::sizes(options_of(options), world)));
}

}  // namespace

namespace {

ep::CombineBy combine_by(nb::handle value) {
  const std::string name = text_of(value);
  if (name == "pull") return ep::CombineBy::kPull;
  if (name == "push") return ep::CombineBy::kPush;
  if (name == "by_size") return ep::CombineBy::kBySize;
  raise(invalid_argument(
      fmt::format("combine = {} must be \"pull\", \"push\" or \"by_size\"", name)));
}

}  // namespace

ep::Path path_of(nb::handle value) {
  const std::string name = text_of(value);
  if (name == "auto") return ep::Path::kAuto;
  if (name == "small") return ep::Path::kSmall;
  if (name == "large") return ep::Path::kLarge;
  raise(invalid_argument(fmt::format("path = {} must be \"auto\", \"small\" or \"large\"", name)));
}

Cast cast_of(nb::handle value) {
  if (nb::isinstance<nb::str>(value) && text_of(value) == "ue8m0") return Cast::kUe8m0;
  if (nb::isinstance<nb::bool_>(value)) return nb::cast<bool>(value) ? Cast::kF32 : Cast::kNone;
  raise(invalid_argument(fmt::format("ep dispatch: cast = {} must be True, False or \"ue8m0\"",
                                     text_of(nb::object(nb::repr(value))))));
}

ep::Payload payload_of(nb::handle value) {
  const std::string name = text_of(value);
  if (name == "bf16") return ep::Payload::kBf16;
  if (name == "fp8") return ep::Payload::kFp8;
  if (name == "logfmt10") return ep::Payload::kLogFmt10;
  raise(invalid_argument(
      fmt::format("payload = {} must be \"bf16\", \"fp8\" or \"logfmt10\"", name)));
}

namespace {

std::uint64_t bytes_of(nb::handle value, const char* name) {
  return whole_number<std::uint64_t>(value, name);
}

}  // namespace

std::uint32_t number_of(nb::handle value, const char* name) {
  return whole_number<std::uint32_t>(value, name);
}

std::uint32_t expand_sms_of(nb::handle value) {
  if (!nb::isinstance<nb::str>(value)) return number_of(value, "expand_sms");
  const std::string text = text_of(value);
  if (text == "auto") return ep::kAutoSms;
  raise(invalid_argument(fmt::format("expand_sms = {} must be a whole number or \"auto\"", text)));
}

nb::dict dict_of(const ep::Sizes& sizes) {
  nb::dict out;
  out["capacity"] = sizes.capacity;
  out["rows_bytes"] = sizes.rows_bytes;
  out["input_bytes"] = sizes.input_bytes;
  out["control_bytes"] = sizes.control_bytes;
  out["staging_bytes"] = sizes.staging_bytes;
  out["transit_bytes"] = sizes.transit_bytes;
  out["user_bytes"] = sizes.user_bytes;
  out["small_bytes"] = sizes.small_bytes;
  out["window_bytes"] = sizes.window_bytes;
  out["local_bytes"] = sizes.local_bytes;
  out["copy_bytes"] = sizes.copy_bytes;
  return out;
}

ep::Options options_of(nb::handle options) {
  ep::Options out;
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
  read("row_bytes", out.row_bytes);
  read("scale_bytes", out.scale_bytes);
  read("slots", out.slots);
  read("expert_alignment", out.expert_alignment);
  out.expand_sms = expand_sms_of(options.attr("expand_sms"));
  read("small_tokens", out.small_tokens);
  read("small_slots", out.small_slots);
  read("small_sms", out.small_sms);
  read("small_expand_sms", out.small_expand_sms);
  read("combine_send_sms", out.combine_send_sms);
  out.combine = combine_by(options.attr("combine"));
  read_sms(options, "dispatch_sms", out.dispatch_sms, out.dispatch_sms_of);
  read_sms(options, "combine_sms", out.combine_sms, out.combine_sms_of);
  flag("small_packets", out.small_packets);
  flag("compressed", out.compressed);
  flag("masks", out.masks);
  flag("mask_late", out.mask_late);
  flag("wide_ids", out.wide_ids);
  flag("fall_back", out.fall_back);
  out.user_bytes = bytes_of(options.attr("user_bytes"), "user_bytes");
  flag("cast", out.cast);
  flag("overlap_launches", out.overlap_launches);
  flag("host_counts", out.host_counts);
  flag("statistics", out.statistics);
  out.wait = time_of(options.attr("wait"), "wait");
  return out;
}

void add_ep_options(nb::module_& m) {
  m.def("ep_sizes", &sizes_of, nb::arg("options"), nb::arg("world"));
  m.def("ep_default_dispatch_sms", &ep::default_dispatch_sms, nb::arg("world"));
  m.def("ep_default_combine_sms", &ep::default_combine_sms, nb::arg("world"));
  m.def("ep_default_expand_sms", &ep::default_expand_sms, nb::arg("world"), nb::arg("top_k"));
}

}  // namespace crossdock::python
