// See site_order.hpp. SPDX-License-Identifier: Apache-2.0
#include "coll/site_order.hpp"

namespace crossdock::coll {

Result<SiteOrder> SiteOrder::create(const cuda::Context& context) {
  CROSSDOCK_TRY(outside, cuda::Event::create(context));
  CROSSDOCK_TRY(captured, cuda::Event::create(context));
  return SiteOrder(std::move(outside), std::move(captured));
}

Result<> SiteOrder::follow(const cuda::Stream& stream) const {
  CROSSDOCK_TRY(capture, stream.capture());
  if (capture != 0 && capture != capture_) return {};
  const Last& last = capture == 0 ? outside_ : captured_;
  if (!last.any || last.stream == stream.handle()) return {};
  return stream.wait(last.event);
}

Result<> SiteOrder::note(const cuda::Stream& stream) {
  CROSSDOCK_TRY(capture, stream.capture());
  if (capture != 0) capture_ = capture;
  Last& last = capture == 0 ? outside_ : captured_;
  last.stream = stream.handle();
  last.any = true;
  return last.event.record(stream);
}

}  // namespace crossdock::coll
