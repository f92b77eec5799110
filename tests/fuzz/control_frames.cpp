// The control connection as a peer sees it: any bytes in any chunks, then every message decoded and
// segments assembled.
// SPDX-License-Identifier: Apache-2.0
#include "fuzz.hpp"
#include "support/wire_samples.hpp"
#include "wire/frame.hpp"
#include "wire/segment.hpp"

namespace crossdock::fuzz {
namespace {

using namespace wire;

void run(Bytes input) {
  if (input.empty()) return;
  // The first byte chooses the chunking.
  const std::size_t chunk = std::to_integer<std::size_t>(input[0]) + 1;
  input = input.subspan(1);
  FrameReader reader;
  SegmentAssembler assembler;
  while (!input.empty()) {
    const Bytes part = input.first(std::min(chunk, input.size()));
    reader.feed(part);
    input = input.subspan(part.size());
    for (auto frame = reader.next(); frame.ok() && frame->has_value(); frame = reader.next()) {
      const auto page = expect<SegmentPage>(**frame);
      if (page.ok()) (void)assembler.add(*page);
    }
  }
}

Seeds seeds() {
  Seeds out;
  std::string all(1, '\x07');
  test::for_each_sample([&](const auto& message) {
    const std::string frame = text_of(encode_frame(message).value());
    out.push_back('\xff' + frame);
    all += frame;
  });
  out.push_back(all);
  std::vector<RegionEntry> regions{test::sample_region(1), test::sample_region(2)};
  std::string segment(1, '\x20');
  for (const auto& frame : encode_segment(1, regions).value_or({}))
    segment += text_of(frame);
  out.push_back(segment);
  return out;
}

CROSSDOCK_FUZZ_TARGET("control_frames", run, seeds);

}  // namespace
}  // namespace crossdock::fuzz
