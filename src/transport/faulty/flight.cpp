// See flight.hpp.
// SPDX-License-Identifier: Apache-2.0
#include "transport/faulty/flight.hpp"

namespace crossdock::transport::faulty {

Faults Dice::draw() {
  Faults faults;
  if (options_.delay_max.count() > 0)
    faults.delay =
        std::chrono::nanoseconds(below(static_cast<std::uint64_t>(options_.delay_max.count()) + 1));
  faults.drop = happens(options_.drop_ppm);
  faults.duplicate = happens(options_.duplicate_ppm);
  faults.corrupt = happens(options_.corrupt_ppm);
  faults.fail = happens(options_.fail_ppm);
  faults.choice = random_();
  return faults;
}

Flight::Flight(Shard& engine_shard, const Faults& drawn, ShardSink& sink)
    : outer(&engine_shard), faults(drawn) {
  inner.op = outer->op;
  inner.slices = outer->slices;
  inner.bytes = outer->bytes;
  inner.transfer_id = outer->transfer_id;
  inner.deadline = outer->deadline;
  inner.stop = outer->stop;
  inner.sink = &sink;
  inner.owner = this;
  if (faults.fail) {
    inner.slices = inner.slices.first(inner.slices.size() / 2);
    inner.bytes = 0;
    for (const Slice& slice : inner.slices)
      inner.bytes += slice.length;
  }
  if (faults.corrupt && inner.op == Op::kWrite && !inner.slices.empty()) flip_source();
}

void Flight::flip_source() {
  slices_.assign(inner.slices.begin(), inner.slices.end());
  Slice& slice = slices_[faults.choice % slices_.size()];
  scratch_.assign(slice.local, slice.local + slice.length);
  scratch_[(faults.choice >> 16) % slice.length] ^=
      static_cast<std::byte>(1u << (faults.choice >> 8 & 7));
  slice.local = scratch_.data();
  inner.slices = slices_;
}

void Flight::corrupt_read() noexcept {
  if (inner.slices.empty()) return;
  const Slice& slice = inner.slices[faults.choice % inner.slices.size()];
  slice.local[(faults.choice >> 16) % slice.length] ^=
      static_cast<std::byte>(1u << (faults.choice >> 8 & 7));
}

}  // namespace crossdock::transport::faulty
