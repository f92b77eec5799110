// The timeline picture: one row a request with its prefill, the transfer of each layer (from the
// moment it was computed to the moment it was at decode), and the first token. One HTML file
// without any reference to another. Command process only. SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <fmt/format.h>
#include <fstream>

#include "demo/pd_run.hpp"

namespace crossdock::tools::pd {
namespace {

constexpr double kLeft = 130;
constexpr double kWidth = 1040;
constexpr double kRow = 30;
constexpr double kTop = 28;

struct Scale {
  std::uint64_t begin = UINT64_MAX;
  std::uint64_t end = 0;

  explicit Scale(const RunRecord& run) {
    for (const RequestRecord& r : run.requests) {
      if (r.compute_begin != 0) begin = std::min(begin, r.compute_begin);
      end = std::max({end, r.complete, r.prefill_done});
    }
    if (end <= begin) begin = 0, end = 1;
  }
  [[nodiscard]] double x(std::uint64_t time) const {
    const std::uint64_t inside = std::clamp(time, begin, end) - begin;
    return kLeft + kWidth * static_cast<double>(inside) / static_cast<double>(end - begin);
  }
  [[nodiscard]] double ms(std::uint64_t time) const {
    return time < begin ? 0 : static_cast<double>(time - begin) / 1e6;
  }
};

std::string bar(const Scale& scale, double y, double height, std::uint64_t from, std::uint64_t to) {
  const double x = scale.x(from);
  return fmt::format("x='{:.2f}' y='{:.1f}' width='{:.2f}' height='{:.1f}'", x, y,
                     std::max(scale.x(to) - x, 0.6), height);
}

void draw_layers(std::string& out, const Scale& scale, const RequestRecord& r, double y) {
  const std::size_t layers = r.layer_arrived.size();
  for (std::size_t layer = 0; layer < layers; ++layer) {
    if (r.layer_arrived[layer] == 0) continue;
    const std::uint64_t from =
        r.layer_computed[layer] != 0 ? r.layer_computed[layer] : r.compute_begin;
    // Early layers blue, late ones violet.
    const std::size_t hue = 200 + layer * 90 / std::max<std::size_t>(layers, 1);
    out += fmt::format(
        "<rect {} fill='hsl({},70%,50%)' fill-opacity='.55'><title>request {}, "
        "layer {}: computed {:.2f} ms, at decode {:.2f} ms</title></rect>\n",
        bar(scale, y + 13, 10, from, r.layer_arrived[layer]), hue, r.id, layer, scale.ms(from),
        scale.ms(r.layer_arrived[layer]));
  }
}

void draw_request(std::string& out, const Scale& scale, const RequestRecord& r, double y) {
  out += fmt::format("<text x='{}' y='{:.1f}' class='name'>{}: {} tokens</text>\n", kLeft - 6,
                     y + 16, r.id, r.num_tokens);
  if (r.compute_begin != 0 && r.prefill_done != 0)
    out += fmt::format(
        "<rect {} class='compute'><title>request {}: prefill {:.2f} to {:.2f} ms"
        "</title></rect>\n",
        bar(scale, y + 4, 8, r.compute_begin, r.prefill_done), r.id, scale.ms(r.compute_begin),
        scale.ms(r.prefill_done));
  draw_layers(out, scale, r, y);
  if (r.complete != 0)
    out += fmt::format(
        "<path d='M{0:.2f} {1:.1f}l5 10h-10z' class='first'><title>request {2}: all "
        "KV at decode at {3:.2f} ms, {4:.2f} ms after prefill</title></path>\n",
        scale.x(r.complete), y + 13, r.id, scale.ms(r.complete),
        scale.ms(r.complete) - scale.ms(r.prefill_done));
  if (!r.error.empty())
    out += fmt::format("<text x='{}' y='{:.1f}' class='error'>failed</text>\n", kLeft + 4, y + 22);
}

void draw_axis(std::string& out, const Scale& scale, double height) {
  // Ten ticks that differ, however short the run.
  const int places = scale.ms(scale.end) < 1 ? 2 : scale.ms(scale.end) < 20 ? 1 : 0;
  for (int i = 0; i <= 10; ++i) {
    const std::uint64_t time = scale.begin + (scale.end - scale.begin) / 10 * i;
    out += fmt::format(
        "<path d='M{0:.1f} {1}V{2:.1f}' class='grid'/><text x='{0:.1f}' y='{3}' "
        "class='tick'>{4:.{5}f} ms</text>\n",
        scale.x(time), kTop - 8, height, kTop - 12, scale.ms(time), places);
  }
}

std::string draw_run(const RunRecord& run) {
  const Scale scale(run);
  const double height = kTop + kRow * static_cast<double>(run.requests.size()) + 6;
  std::string out = fmt::format(
      "<h2>{}</h2><p>p50 from prefill done to all KV at decode: {:.2f} ms; p99 {:.2f} ms; {:.2f} "
      "GB/s</p>\n<svg viewBox='0 0 {} {:.0f}' role='img'>\n",
      run.mode, run.handoff_ms(0.5), run.handoff_ms(0.99), run.gb_per_s(), kLeft + kWidth + 20,
      height);
  draw_axis(out, scale, height);
  double y = kTop;
  for (const RequestRecord& request : run.requests) {
    draw_request(out, scale, request, y);
    y += kRow;
  }
  return out + "</svg>\n";
}

constexpr const char* kHead =
    "<!doctype html><html lang='en'><meta charset='utf-8'><title>KV caches from prefill to decode"
    "</title><style>body{font:14px system-ui,sans-serif;margin:24px;color:#222;background:#fff}"
    "svg{width:100%;height:auto}.name{text-anchor:end;font-size:11px}.tick{text-anchor:middle;"
    "font-size:10px;fill:#666}.grid{stroke:#ddd}.compute{fill:#9a9a9a}.first{fill:#d22}"
    ".error{fill:#d22;font-size:11px}.key{display:inline-block;width:14px;height:10px;margin:0 4px "
    "0 14px}</style>\n";

}  // namespace

Result<> write_timeline(const std::string& path, const Plan& plan,
                        const std::vector<RunRecord>& runs) {
  std::ofstream file(path);
  file << kHead
       << fmt::format(
              "<h1>KV caches from prefill to decode</h1><p>{} ({}), {} B a token.</p>"
              "<p><span class='key' style='background:#9a9a9a'></span>prefill computes"
              "<span class='key' style='background:hsl(200,70%,50%)'></span>a layer, from "
              "computed to at decode (early layers blue, late ones violet)"
              "<span class='key' style='background:#d22'></span>all KV at decode: the "
              "first token can be decoded</p>\n",
              plan.shape.name, plan.shape.describe(), plan.shape.token_bytes());
  for (const RunRecord& run : runs)
    file << draw_run(run);
  file << "</html>\n";
  file.close();
  if (!file) return make_error(Code::kNotFound, fmt::format("cannot write the timeline {}", path));
  return {};
}

}  // namespace crossdock::tools::pd
