// LayerCore: a forward in two halves, so that the dispatch of one micro-batch runs beside the
// products of the one before it:
//
//   caller's stream   ... end(0): wait, lists, products, sums, combine | end(1): wait, ...
//                     ^ begin(1): ready                                  |
//   side stream         wait, dispatch(1), arrived ----------------------+
//
// A begin's dispatch comes after all that was on the caller's stream when it was called, and after
// forwards that ended on other streams, so after the combine that has read its slot. On the CPU
// there is one queue, in the order of the calls. No stream waits across the border of a capture:
// CUDA would refuse, and the capture be lost. See layer_core.hpp, and ep/side.hpp for what the
// layers over one group share. SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <fmt/format.h>

#include "moe/layer_core.hpp"

namespace crossdock::moe {
namespace {

constexpr int kSideStream = 1;  // of the rank's streams, as the launcher counts them

cuda::Stream borrowed(const symm::Rank& rank, StreamPtr stream) {
  const cuda::Context& context = *rank.device().context();
  return cuda::Stream::borrow(context, stream != nullptr ? static_cast<cuda::StreamHandle>(stream)
                                                         : rank.device().stream()->handle());
}

// `capture`: a number, or 0; `now`: that of the call which tells about it.
const char* place_of(std::uint64_t capture, std::uint64_t now) {
  if (capture == 0) return "outside captures";
  return now == 0 ? "in a capture" : "in another capture";
}

// Before a launch: whether the stream of a call in capture `now` may wait for what a begin in
// `capture` has put on the side stream.
Result<> check_border(u32 r, std::uint64_t capture, std::uint64_t now) {
  if (capture == now) return {};
  return invalid_argument(fmt::format(
      "moe layer: a forward_begin() of rank {} {} has not ended, and this call is {}: end or drop "
      "it where it began, before this call",
      r, place_of(capture, now), now == 0 ? "outside captures" : "in a capture"));
}

}  // namespace

Begun::~Begun() {
  core->forget(*this);
}

ep::Side& LayerCore::side(u32 rank) {
  return *group_->side(rank);
}

Result<> LayerCore::make_side(u32 r) {
  if (group_->side(r) != nullptr) return {};  // by another layer over the group
  ep::Side made;
  made.rank = r;
  if (group_->group().backend() == symm::Backend::kGpu) {
    const cuda::Context& context = *rank(r).device().context();
    CROSSDOCK_TRY(stream, group_->launcher().stream(rank(r), kSideStream));
    made.stream = stream;
    CROSSDOCK_TRY(ready, cuda::Event::create(context));
    made.ready.emplace(std::move(ready));
    CROSSDOCK_TRY(dropped, cuda::Event::create(context));
    made.dropped.emplace(std::move(dropped));
    for (auto& ended : made.ended) {
      CROSSDOCK_TRY(event, cuda::Event::create(context));
      ended.event.emplace(std::move(event));
    }
    for (u32 i = 0; i < group_->options().slots; ++i) {
      CROSSDOCK_TRY(arrived, cuda::Event::create(context));
      made.arrived.push_back({.event = std::move(arrived)});
    }
  }
  group_->add_side(std::move(made));
  return {};
}

u32 LayerCore::blocks_beside(u32 r) const {
  const u32 world = group_->group().world();
  const u32 dispatch =
      options_.dispatch_sms != 0 ? options_.dispatch_sms : ep::default_dispatch_sms(world);
  const u32 all = options_.gemm_sms != 0 ? options_.gemm_sms : group_->launcher().num_sms(rank(r));
  return all > dispatch ? all - dispatch : 1;
}

Result<std::unique_ptr<Begun>> LayerCore::begin(const RankWeights& weights, const Call& call) {
  CROSSDOCK_CHECK_OK(check_input(weights, call));
  const LayerInput& input = call.input;
  StreamPtr on = call.stream;
  const u32 r = weights.rank;
  ep::Side& beside = side(r);
  const u32 slots = group_->options().slots;
  if (beside.begun >= slots)
    return make_error(
        Code::kBusy,
        fmt::format("moe layer: {} forwards of rank {} have begun, as many as there are slots: end "
                    "one first",
                    beside.begun, r));
  CROSSDOCK_TRY(capture, check_begun(r, call.stream));
  if (beside.stream != nullptr) {
    CROSSDOCK_TRY(there, beside.stream->capture());
    if (there != 0 && there != capture)
      return invalid_argument(fmt::format(
          "moe layer: a capture with calls of rank {} has not ended, and this call is {}: end that "
          "capture first",
          r, capture == 0 ? "outside captures" : "in another"));
  }
  CROSSDOCK_CHECK_OK(follow_dropped(r, call.stream, capture));
  auto begun = std::make_unique<Begun>(shared_from_this(), r, input);
  begun->stream = call.stream;
  begun->capture = capture;
  if (beside.stream != nullptr) {
    CROSSDOCK_CHECK_OK(beside.ready->record(borrowed(rank(r), call.stream)));
    CROSSDOCK_CHECK_OK(beside.stream->wait(*beside.ready));
    CROSSDOCK_CHECK_OK(follow_ended(r, beside.stream, nullptr, capture));
    on = beside.stream->handle();
  }
  CROSSDOCK_TRY(handle, group_->dispatch(r, tokens(r, input), {}, on));
  begun->handle.emplace(std::move(handle));
  ++beside.begun;
  for (auto& arrived : beside.arrived) {
    if (arrived.used) continue;
    CROSSDOCK_CHECK_OK(arrived.event.record(*beside.stream));
    begun->arrived = &arrived.event;
    arrived.used = true;
    arrived.capture = capture;
    break;
  }
  return begun;
}

Result<> LayerCore::end(const RankWeights& weights, Begun& begun, const Call& given) {
  Call call = given;
  call.input = begun.input;
  CROSSDOCK_CHECK_OK(check_input(weights, call));
  CROSSDOCK_CHECK_OK(check_output(begun.rank, call.input, call.output));
  CROSSDOCK_TRY(capture, capture_of(begun.rank, call.stream));
  CROSSDOCK_CHECK_OK(check_border(begun.rank, begun.capture, capture));
  CROSSDOCK_CHECK_OK(follow_ended(begun.rank, nullptr, call.stream, capture));
  // While the rows travel.
  if (shared_ != nullptr)
    CROSSDOCK_CHECK_OK(shared_->run(begun.rank, call.shared->view, call.input, call.stream,
                                    blocks_beside(begun.rank)));
  if (begun.arrived != nullptr)
    CROSSDOCK_CHECK_OK(borrowed(rank(begun.rank), call.stream).wait(*begun.arrived));
  begun.joined = true;
  CROSSDOCK_CHECK_OK(free_input(begun, call.stream));
  if (call.stage_done) CROSSDOCK_CHECK_OK(call.stage_done(LayerStage::kDispatch));
  CROSSDOCK_CHECK_OK(finish(weights, call, *begun.handle, false));
  return note_ended(begun, call.stream);
}

// A slot is given back when the call that ends its forward returns, and what it launched may still
// read the slot, and the buffers of the layer. The stream that the forward began on comes after the
// rows only.
Result<> LayerCore::note_ended(const Begun& begun, StreamPtr stream) {
  if (begun.arrived == nullptr || stream == begun.stream) return {};
  auto& ended = side(begun.rank).ended[begun.capture != 0];
  CROSSDOCK_CHECK_OK(ended.event->record(borrowed(rank(begun.rank), stream)));
  ended.any = true;
  ended.capture = begun.capture;
  return {};
}
// A stream of capture `now` comes after that; the rank's own side stream, or the one that is given.
Result<> LayerCore::follow_ended(u32 r, const cuda::Stream* beside, StreamPtr stream,
                                 std::uint64_t now) {
  const auto& ended = side(r).ended[now != 0];
  if (!ended.any || ended.capture != now) return {};
  return beside != nullptr ? beside->wait(*ended.event)
                           : borrowed(rank(r), stream).wait(*ended.event);
}

// `stream`, on which the forward ends, comes after all that reads its input. Whoever drops the
// input now may have its memory used again in the order of the stream that it began on, if that is
// another; not where that one has begun or ended a capture since.
Result<> LayerCore::free_input(const Begun& begun, StreamPtr stream) {
  if (begun.arrived == nullptr || stream == begun.stream) return {};
  const Result<std::uint64_t> now = capture_of(begun.rank, begun.stream);
  if (!now.ok() || *now != begun.capture) return {};
  const cuda::Event& read = *side(begun.rank).ready;
  CROSSDOCK_CHECK_OK(read.record(borrowed(rank(begun.rank), stream)));
  return borrowed(rank(begun.rank), begun.stream).wait(read);
}

Result<std::uint64_t> LayerCore::capture_of(u32 r, StreamPtr stream) const {
  if (group_->group().backend() != symm::Backend::kGpu) return std::uint64_t{0};
  return borrowed(rank(r), stream).capture();
}

// Before a dispatch, which comes after those that have begun: all of them are in the capture of
// the stream, which is returned, or outside captures as it is.
Result<std::uint64_t> LayerCore::check_begun(u32 r, StreamPtr stream) {
  const ep::Side& beside = side(r);
  CROSSDOCK_TRY(now, capture_of(r, stream));
  for (const auto& arrived : beside.arrived)
    if (arrived.used) CROSSDOCK_CHECK_OK(check_border(r, arrived.capture, now));
  if (beside.any_dropped && beside.dropped_capture == 0 && now != 0)
    return invalid_argument(fmt::format(
        "moe layer: a forward_begin() of rank {} outside captures was dropped, and this call is in "
        "a capture, where nothing can wait for it: make a forward() outside captures first",
        r));
  return now;
}

// A dispatch on the caller's stream comes after those on the side stream: two at once would count
// the same epoch.
Result<> LayerCore::follow_begun(u32 r, StreamPtr stream) {
  ep::Side& beside = side(r);
  CROSSDOCK_TRY(now, check_begun(r, stream));
  for (const auto& arrived : beside.arrived)
    if (arrived.used) CROSSDOCK_CHECK_OK(borrowed(rank(r), stream).wait(arrived.event));
  CROSSDOCK_CHECK_OK(follow_ended(r, nullptr, stream, now));
  return follow_dropped(r, stream, now);
}

// What was dropped in a capture is over with it. From here on the caller's stream comes after what
// was dropped in `now`, so nothing has to wait for that any more.
Result<> LayerCore::follow_dropped(u32 r, StreamPtr stream, std::uint64_t now) {
  ep::Side& beside = side(r);
  if (beside.any_dropped && beside.dropped_capture == now)
    CROSSDOCK_CHECK_OK(borrowed(rank(r), stream).wait(*beside.dropped));
  beside.any_dropped = false;
  return {};
}

// One that was never ended still reads its ids and rows: what comes on begin()'s stream waits, so
// that their memory may be used again in that order; not where that stream has begun or ended a
// capture since. A wait that cannot be queued means that the context is over, and with it all that
// is read.
void LayerCore::forget(const Begun& begun) noexcept {
  if (!begun.handle) return;  // never launched
  ep::Side& beside = side(begun.rank);
  if (begun.arrived != nullptr && !begun.joined) {
    const cuda::Stream stream = borrowed(rank(begun.rank), begun.stream);
    const auto still = [&](const cuda::Stream& s) {
      const auto now = s.capture();
      return now.ok() && *now == begun.capture;
    };
    if (still(stream)) static_cast<void>(stream.wait(*begun.arrived));
    if (still(*beside.stream)) {
      beside.any_dropped = beside.dropped->record(*beside.stream).ok();
      beside.dropped_capture = begun.capture;
    }
  }
  --beside.begun;
  for (auto& arrived : beside.arrived)
    if (&arrived.event == begun.arrived) arrived.used = false;
}

}  // namespace crossdock::moe
