// See given_streams.hpp. SPDX-License-Identifier: Apache-2.0
#include "coll/given_streams.hpp"

#include <algorithm>

namespace crossdock::coll {
namespace {

// Streams of a rank; from then on events of those that have gone are used again.
constexpr std::size_t kMany = 64;

}  // namespace

Result<> GivenStreams::note(const cuda::Stream& stream) {
  CROSSDOCK_TRY(capturing, stream.capturing());
  if (capturing) return {};
  auto found = std::find_if(given_.begin(), given_.end(),
                            [&](const Given& g) { return g.stream == stream.handle(); });
  // Asking an event would end a capture that another thread makes in the global mode.
  if (found == given_.end() && given_.size() >= kMany)
    found = std::find_if(given_.begin(), given_.end(), is_reached);
  if (found == given_.end()) {
    CROSSDOCK_TRY(event, cuda::Event::create(stream.context()));
    found = given_.insert(found, {stream.handle(), std::move(event)});
  }
  found->stream = stream.handle();
  return found->behind.record(stream);
}

bool GivenStreams::are_over(Deadline deadline) const {
  return std::all_of(given_.begin(), given_.end(), [&](const Given& g) {
    return g.behind.synchronize(deadline).code() != Code::kDeadline;
  });
}

u32 GivenStreams::in_use() const {
  return static_cast<u32>(given_.size()) -
         static_cast<u32>(std::count_if(given_.begin(), given_.end(), is_reached));
}

bool GivenStreams::is_reached(const Given& given) {
  const auto reached = given.behind.reached();
  return !reached.ok() || *reached;
}

}  // namespace crossdock::coll
