// Calls on GPUs, with the fake driver: what a call asks of the driver, memory in stream order for
// copies, captures, pointers that a kernel must not follow, thousands of calls without growth.
// Kernels do nothing here.
// SPDX-License-Identifier: Apache-2.0
#include <future>
#include <gmock/gmock.h>

#include <crossdock/symm/exchange.hpp>

#include "cuda/graph.hpp"
#include "cuda/memory.hpp"
#include "ep/core.hpp"
#include "support/fake_cuda/fixture.hpp"
#include "unit/jit/jit_fixture.hpp"

namespace crossdock::ep {
namespace {

using namespace std::chrono_literals;
using ::testing::HasSubstr;
using ::testing::StartsWith;

class EpGpuCalls : public crossdock::testing::FakeCudaTest {
 protected:
  static constexpr u32 kTokens = 8;
  void SetUp() override {
    FakeCudaTest::SetUp();
    make({.experts = 8, .top_k = 2, .max_tokens = kTokens, .hidden = 256, .slots = 2});
  }
  void make(const Options& options) {
    core_.reset();
    memory_.clear();
    const Window window = make_window(options, 2).value();
    auto group = symm::Group::create({.world = 2}, window.layout, driver_).value();
    auto jit = std::make_unique<jit::Jit>(
        jit::JitOptions{}, std::make_unique<jit::FakeCompiler>(folder_.path / "tally"));
    core_ = Core::create(std::move(group), std::move(jit), options, Deadline::in(60s)).value();
  }
  void TearDown() override {
    core_.reset();
    memory_.clear();
    FakeCudaTest::TearDown();
  }
  void* on_gpu(int gpu, std::size_t bytes = 1 << 14) {
    memory_.push_back(cuda::DeviceMemory::allocate(context(gpu), bytes).value());
    return memory_.back().as<void>();
  }
  Tokens tokens(int gpu) {
    return {.count = kTokens, .rows = on_gpu(gpu), .row_bytes = 512, .ids = on_gpu(gpu)};
  }
  Result<Handle> dispatch(const Tokens& tokens, StreamPtr stream = nullptr) {
    return core_->dispatch(0, tokens, {}, stream);
  }
  // Handles for both slots of rank 0.
  std::vector<Handle> fill(const Tokens& tokens) {
    std::vector<Handle> held;
    for (u32 i = 0; i < core_->options().slots; ++i)
      held.push_back(dispatch(tokens).value());
    return held;
  }

  jit::TemporaryFolder folder_;
  std::vector<cuda::DeviceMemory> memory_;
  std::shared_ptr<Core> core_;
};

// Blocks that find no place would be waited for until the deadline.
TEST_F(EpGpuCalls, MoreBlocksThanRunAtOnceAreRefused) {
  const auto refuse = [&](Options options, const char* text) {
    options.experts = 8;
    options.top_k = 2;
    options.max_tokens = kTokens;
    options.hidden = 256;
    auto group = symm::Group::create({.world = 2}, make_window(options, 2).value().layout, driver_);
    auto jit = std::make_unique<jit::Jit>(
        jit::JitOptions{}, std::make_unique<jit::FakeCompiler>(folder_.path / "tally"));
    const auto core =
        Core::create(std::move(group).value(), std::move(jit), options, Deadline::in(60s));
    ASSERT_EQ(core.code(), Code::kInvalidArgument);
    EXPECT_THAT(core.error().message, HasSubstr(text));
  };
  Options many;
  many.dispatch_sms_of = {12, 140};
  refuse(many, "dispatch_sms makes 140 blocks of rank 1");
  many = {};
  many.combine_sms = 133;
  refuse(many, "combine_sms makes 133 blocks of rank 0");
  many = {};
  many.expert_alignment = 4;
  many.dispatch_sms = 100;
  many.expand_sms = 40;
  refuse(many, "dispatch_sms + expand_sms makes 140 blocks");
  many.dispatch_sms = 133;
  many.expand_sms = kAutoSms;
  refuse(many, "dispatch_sms makes 133 blocks");
  many = {};
  many.small_tokens = kTokens;
  many.expert_alignment = 4;
  many.small_expand_sms = 130;
  refuse(many, "small_sms + small_expand_sms makes 140 blocks");
}

// Process 0 has rank 0, process 1 has ranks 1 and 2. Each prepares its own; all are told.
class EpGpuProcesses : public EpGpuCalls {
 protected:
  using Made = Result<std::shared_ptr<Core>>;
  using Compiler = Result<std::unique_ptr<jit::Jit>>;
  Compiler compiler() {
    return std::make_unique<jit::Jit>(jit::JitOptions{},
                                      std::make_unique<jit::FakeCompiler>(folder_.path / "tally"));
  }
  Made create(u32 process, Compiler jit) {
    const Deadline soon = Deadline::in(60s);
    const char* name = ::testing::UnitTest::GetInstance()->current_test_info()->name();
    symm::GroupOptions ranks{.world = 3};
    ranks.ranks = {{.rank = 0, .device = 0}};
    if (process == 1) ranks.ranks = {{.rank = 1, .device = 1}, {.rank = 2, .device = 2}};
    CROSSDOCK_TRY(exchange,
                  symm::open_store_exchange("inproc://ep-processes", name, {process, 2}, soon));
    ranks.exchange = std::move(exchange);
    CROSSDOCK_TRY(window, make_window(options_, 3));
    CROSSDOCK_TRY(group, symm::Group::create(ranks, window.layout, driver_));
    return Core::create(std::move(group), std::move(jit), options_, soon);
  }
  // Process 1 fails with this, and process 0 with what it is told of it.
  void expect_failure(Compiler jit, Code code, const char* text, const char* told) {
    auto other = std::async(std::launch::async, [&] { return create(1, std::move(jit)); });
    const auto mine = create(0, compiler());
    const auto theirs = other.get();
    ASSERT_EQ(theirs.code(), code);
    EXPECT_THAT(theirs.error().message, StartsWith(text));
    ASSERT_EQ(mine.code(), code);
    EXPECT_THAT(mine.error().message, StartsWith(told));
  }
  Options options_{.experts = 9, .top_k = 2, .max_tokens = kTokens, .hidden = 256};
};

TEST_F(EpGpuProcesses, OneThatHasNoRoomIsNamedToTheOthers) {
  options_.dispatch_sms_of = {12, 12, 140};
  expect_failure(compiler(), Code::kInvalidArgument, "ep: dispatch_sms makes 140 blocks of rank 2",
                 "rank 2 failed: ep: dispatch_sms makes 140 blocks of rank 2");
}
TEST_F(EpGpuProcesses, OneWithoutACompilerIsNamedToTheOthers) {
  expect_failure(make_error(Code::kUnsupported, "there is no compiler"), Code::kUnsupported,
                 "there is no compiler", "rank 1 failed: there is no compiler");
}
TEST_F(EpGpuProcesses, OneThatDoesNotComeIsWaitedForUntilTheDeadline) {
  const auto alone = [&](u32 process) -> Result<> {
    const Deadline soon = Deadline::in(60s);
    CROSSDOCK_TRY(exchange,
                  symm::open_store_exchange("inproc://ep-processes", "alone", {process, 2}, soon));
    symm::GroupOptions ranks{.world = 2, .ranks = {{.rank = process, .device = int(process)}}};
    ranks.exchange = std::move(exchange);
    CROSSDOCK_TRY(window, make_window(options_, 2));
    CROSSDOCK_TRY(group, symm::Group::create(ranks, window.layout, driver_));
    if (process == 1) return {};
    const auto made = Core::create(std::move(group), compiler(), options_, Deadline::in(100ms));
    return made.ok() ? Result<>() : made.error();
  };
  auto other = std::async(std::launch::async, [&] { return alone(1); });
  const auto waited = alone(0);
  EXPECT_TRUE(other.get().ok());
  ASSERT_EQ(waited.code(), Code::kDeadline);
  EXPECT_THAT(waited.error().message, HasSubstr("could not tell each other that they can prepare "
                                                "their kernels"));
}

// Nobody has asked for so many as the rule says: what there is room for, or copies afterwards.
TEST_F(EpGpuCalls, CopiesByRuleTakeTheRoomThatIsLeft) {
  const u32 rule = default_expand_sms(2, 2);
  for (const u32 room : {rule + 4, rule - 2, rule / 2, rule / 2 - 1, 0u}) {
    Options options{.experts = 8, .top_k = 2, .max_tokens = kTokens, .hidden = 256};
    options.dispatch_sms = 132 - room;
    options.expert_alignment = 4;
    options.expand_sms = kAutoSms;
    make(options);
    const bool beside = 2 * room >= rule;
    EXPECT_EQ(core_->copies_beside(0), beside) << room;
    const Expanded to{.places = 1 << 10, .rows = on_gpu(0, 1 << 20)};
    ASSERT_TRUE(core_->dispatch(0, tokens(0), {.expanded = &to}, nullptr).ok());
    const auto last = fake_->last_launch();
    EXPECT_THAT(last.kernel, HasSubstr(beside ? "ep_dispatch_expanded" : "ep_expand_rows"));
    if (!beside) continue;
    EXPECT_EQ(last.config.grid_x, 132 - room + std::min(room, rule)) << room;
  }
}

// A member of two whose other seat nobody has taken.
TEST_F(EpGpuCalls, RanksThatNoProcessHasStayMasked) {
  Options options{.experts = 8, .top_k = 2, .max_tokens = kTokens, .hidden = 256};
  options.masks = true;
  auto group =
      symm::Group::create({.world = 2,
                           .ranks = {{.rank = 0, .device = 0}},
                           .place = symm::MeetingPlace{.store = "inproc://ep-vacant",
                                                       .name = "vacant",
                                                       .fewest = 1,
                                                       .settle = std::chrono::milliseconds(100)}},
                          make_window(options, 2).value().layout, driver_)
          .value();
  auto jit = std::make_unique<jit::Jit>(
      jit::JitOptions{}, std::make_unique<jit::FakeCompiler>(folder_.path / "tally"));
  const Deadline soon = Deadline::in(60s);
  core_ = Core::create(std::move(group), std::move(jit), options, soon).value();
  EXPECT_EQ(core_->masked(0, soon).value(), 2u);
  ASSERT_TRUE(core_->reset(soon).ok());
  EXPECT_EQ(core_->masked(0, soon).value(), 2u) << "a reset lets nobody in who is not there";
  const auto in = core_->mask(0, 1, false, nullptr);
  ASSERT_EQ(in.code(), Code::kInvalidArgument);
  EXPECT_THAT(in.error().message, HasSubstr("no process has rank 1"));
}

// While work is held back, whoever waits for a stream waits until a deadline.
TEST_F(EpGpuCalls, ACopyIsMadeInTheOrderOfTheCallersStreamAndWithoutWaiting) {
  const Tokens t = tokens(0);
  const cuda::Stream stream = cuda::Stream::create(context(0)).value();
  auto held = fill(t);
  fake_->hold_work(true);
  const int waits = fake_->calls("cuStreamQuery") + fake_->calls("cuStreamSynchronize");
  const int plain = fake_->calls("cuMemAlloc");
  auto copied = dispatch(t, stream.handle());
  ASSERT_TRUE(copied.ok()) << copied.error().describe();
  EXPECT_TRUE(copied->copied());
  EXPECT_EQ(fake_->calls("cuMemAllocAsync"), 1);
  EXPECT_EQ(fake_->calls("cuMemAlloc"), plain);
  EXPECT_EQ(fake_->calls("cuStreamQuery") + fake_->calls("cuStreamSynchronize"), waits);
  EXPECT_THAT(fake_->last_launch().kernel, HasSubstr("ep_copy_rows"));
  // The memory is used again by the next.
  void* const rows = copied->received().rows;
  copied = dispatch(t);
  EXPECT_NE(copied->received().rows, rows) << "the first was held while the second was made";
  copied = dispatch(t);
  EXPECT_EQ(copied->received().rows, rows);
  EXPECT_EQ(fake_->calls("cuMemAllocAsync"), 2);
  fake_->hold_work(false);
}
TEST_F(EpGpuCalls, DriversWithoutMemoryInStreamOrderGivePlainMemory) {
  const Tokens t = tokens(0);
  auto held = fill(t);
  fake_->fail({.function = "cuMemAllocAsync", .status = cuda::Status::kNotSupported});
  const auto copied = dispatch(t);
  ASSERT_TRUE(copied.ok()) << copied.error().describe();
  EXPECT_TRUE(copied->copied());
}
TEST_F(EpGpuCalls, NoMemoryForACopyIsSaidWithTheBytes) {
  const Tokens t = tokens(0);
  auto held = fill(t);
  fake_->fail({.function = "cuMemAllocAsync", .status = cuda::Status::kOutOfMemory});
  const auto refused = dispatch(t);
  ASSERT_EQ(refused.code(), Code::kNoMemory);
  EXPECT_THAT(refused.error().message, HasSubstr("in the order of a stream"));
  EXPECT_TRUE(dispatch(t).ok());
}
TEST_F(EpGpuCalls, CapturesTakeReservedCopiesOnly) {
  const Tokens t = tokens(0);
  const cuda::Stream stream = cuda::Stream::create(context(0)).value();
  auto held = fill(t);
  {
    auto capture = cuda::Capture::begin(stream).value();
    const auto refused = dispatch(t, stream.handle());
    ASSERT_EQ(refused.code(), Code::kBusy);
    EXPECT_THAT(refused.error().message, HasSubstr("reserve_copies() before the capture"));
    held.pop_back();
    EXPECT_TRUE(dispatch(t, stream.handle()).ok()) << "a slot is free";
    ASSERT_TRUE(capture.finish().ok());
  }
  held.push_back(dispatch(t).value());
  ASSERT_TRUE(core_->reserve_copies(0, 1).ok());
  auto capture = cuda::Capture::begin(stream).value();
  const auto copied = dispatch(t, stream.handle());
  ASSERT_TRUE(copied.ok()) << copied.error().describe();
  EXPECT_TRUE(copied->copied());
  EXPECT_EQ(dispatch(t, stream.handle()).code(), Code::kBusy);
  ASSERT_TRUE(capture.finish().ok());
}
// A replay writes there when the handles of the capture are long gone.
TEST_F(EpGpuCalls, WhatACaptureTookGoesToCapturesAlone) {
  const Tokens t = tokens(0);
  const cuda::Stream stream = cuda::Stream::create(context(0)).value();
  const auto held = fill(t);
  ASSERT_TRUE(core_->reserve_copies(0, 1).ok());
  const auto captured = [&] {
    auto capture = cuda::Capture::begin(stream).value();
    const auto copied = dispatch(t, stream.handle());
    EXPECT_TRUE(copied.ok() && capture.finish().ok());
    return copied.ok() ? copied->received().rows : nullptr;
  };
  void* const rows = captured();
  const auto apart = dispatch(t);
  ASSERT_TRUE(apart.ok() && apart->copied());
  EXPECT_NE(apart->received().rows, rows);
  EXPECT_EQ(captured(), rows) << "replays come one after the other";
}
TEST_F(EpGpuCalls, CapturesNeedTheRoutingsOfAsManyHandles) {
  constexpr u64 kBytes = u64{1} << 20;
  make({.experts = 8,
        .top_k = 2,
        .max_tokens = kTokens,
        .hidden = 256,
        .slots = 0,
        .fall_back = false,
        .user_bytes = kBytes});
  const Tokens t = tokens(0);
  const cuda::Stream stream = cuda::Stream::create(context(0)).value();
  std::byte* const memory = core_->user_memory(0).value().data();
  const auto once = [&] {
    return core_->dispatch(0, t, {.output = memory, .output_room = kBytes}, stream.handle());
  };
  ASSERT_TRUE(once().ok());
  {
    auto capture = cuda::Capture::begin(stream).value();
    const auto one = once();
    ASSERT_TRUE(one.ok()) << one.error().describe();
    const auto refused = once();
    ASSERT_EQ(refused.code(), Code::kBusy);
    EXPECT_THAT(refused.error().message,
                HasSubstr("needs memory for its routing, which cannot be made while the stream is "
                          "being captured: hold as many handles at a time once before"));
    ASSERT_TRUE(capture.finish().ok());
  }
  {
    const auto one = once(), two = once();
    ASSERT_TRUE(one.ok() && two.ok());
  }
  auto capture = cuda::Capture::begin(stream).value();
  const auto one = once(), two = once();
  EXPECT_TRUE(one.ok() && two.ok());
  ASSERT_TRUE(capture.finish().ok());
}
// A wait for readers costs a launch, which only what may be read already is worth.
class EpGpuReads : public EpGpuCalls {
 protected:
  static constexpr u32 kMore = 32;
  void SetUp() override {
    EpGpuCalls::SetUp();
    make({.experts = 8,
          .top_k = 2,
          .max_tokens = kMore,
          .hidden = 512,
          .slots = 2,
          .small_tokens = kMore,
          .compressed = true,
          .expert_alignment = 4});
    stream_.emplace(cuda::Stream::create(context(0)).value());
    rows_ = on_gpu(0, 1 << 20);
  }
  void TearDown() override {
    stream_.reset();
    EpGpuCalls::TearDown();
  }
  // A dispatch whose rows are listed.
  Handle few(u32 count) {
    const Tokens t{.count = count, .rows = rows_, .row_bytes = 1024, .ids = rows_};
    Handle handle = core_->dispatch(0, t, {.most_tokens = count}, stream_->handle()).value();
    EXPECT_TRUE(core_->group_rows(handle, stream_->handle()).ok());
    return handle;
  }
  // How many launches a call makes.
  template <class Call>
  int launches(const Call& call) {
    const int before = fake_->calls("cuLaunchKernelEx");
    const Result<> done = call();
    EXPECT_TRUE(done.ok()) << done.error().describe();
    return fake_->calls("cuLaunchKernelEx") - before;
  }
  int reduce(const Handle& handle) {
    return launches([&] { return core_->reduce_rows(handle, {.rows = rows_}, stream_->handle()); });
  }
  int combine(const Handle& handle, Payload payload) {
    return launches([&] {
      return core_->combine(handle, {.rows = rows_}, {.payload = payload}, stream_->handle());
    });
  }
  std::optional<cuda::Stream> stream_;
  void* rows_ = nullptr;
};

TEST_F(EpGpuReads, AreWaitedForWhereThereMayBeSome) {
  for (const bool packets : {false, true}) {
    const Handle handle = few(packets ? 8 : kMore);
    const int readers = packets ? 0 : 1;
    EXPECT_EQ(reduce(handle), 1);
    EXPECT_EQ(reduce(handle), 1);
    EXPECT_EQ(combine(handle, Payload::kBf16), 1);
    EXPECT_EQ(reduce(handle), 1 + readers);
    EXPECT_EQ(combine(handle, Payload::kBf16), 1);
    EXPECT_EQ(combine(handle, Payload::kFp8), packets ? 1 : 3);
  }
}
// A replay begins anew with its dispatch, if it has one.
TEST_F(EpGpuReads, AreWaitedForInACaptureThatDoesNotHaveTheDispatch) {
  const Handle outside = few(kMore);
  auto capture = cuda::Capture::begin(*stream_).value();
  EXPECT_EQ(reduce(outside), 2);
  {
    const Handle inside = few(kMore);
    EXPECT_EQ(reduce(inside), 1);
    EXPECT_EQ(combine(inside, Payload::kBf16), 1);
    EXPECT_EQ(reduce(inside), 2);
  }
  ASSERT_TRUE(capture.finish().ok());
}
TEST_F(EpGpuReads, AreWaitedForWhereTheDispatchIsInAnotherCapture) {
  auto dispatching = cuda::Capture::begin(*stream_).value();
  const Handle apart = few(kMore);
  ASSERT_TRUE(dispatching.finish().ok());
  EXPECT_EQ(reduce(apart), 1) << "outside of captures nothing is made again";
  auto reducing = cuda::Capture::begin(*stream_).value();
  EXPECT_EQ(reduce(apart), 2) << "this one may be replayed more often";
  ASSERT_TRUE(reducing.finish().ok());
}
TEST_F(EpGpuCalls, ThousandsOfCallsTakeNoMoreMemory) {
  const Tokens t = tokens(0);
  void* const combined = on_gpu(0);
  std::vector<Handle> held;
  for (u32 i = 0; i < 6; ++i)
    held.push_back(dispatch(t).value());
  const auto before = fake_->live();
  for (u32 i = 0; i < 10'000; ++i) {
    held.erase(held.begin());
    held.push_back(dispatch(t).value());
    ASSERT_TRUE(core_->combine(held.back(), {.rows = combined}, {}, nullptr).ok());
  }
  EXPECT_TRUE(fake_->live() == before);
}

// ---- pointers ----------------------------------------------------------------------------------

TEST_F(EpGpuCalls, PointersThatARankCannotFollowAreRefused) {
  std::vector<std::byte> host(1 << 14);
  const auto aligned = [&] {
    auto at = reinterpret_cast<std::uintptr_t>(host.data());
    return reinterpret_cast<void*>((at + 15) / 16 * 16);
  }();
  const auto refuse = [&](const auto& change, const char* text) {
    Tokens t = tokens(0);
    change(t);
    const auto got = dispatch(t);
    ASSERT_EQ(got.code(), Code::kInvalidArgument) << text;
    EXPECT_THAT(got.error().message, HasSubstr(text));
  };
  refuse([&](Tokens& t) { t.rows = aligned; }, "are not memory that the driver knows");
  refuse([&](Tokens& t) { t.rows = on_gpu(1); }, "are memory of GPU 1: rank 0 needs them on GPU 0");
  refuse([&](Tokens& t) { t.ids = on_gpu(1); }, "dispatch: ids at");
  refuse([&](Tokens& t) { t.weights = static_cast<float*>(aligned); }, "dispatch: weights at");
  refuse(
      [&](Tokens& t) {
        t.scales = on_gpu(1);
        t.scale_bytes = 8;
      },
      "dispatch: scales at");
  const auto handle = dispatch(tokens(0)).value();
  const auto text = [&](const Combined& c) {
    return core_->combine(handle, c, {}, nullptr).error().message;
  };
  EXPECT_THAT(text({.rows = on_gpu(1)}), HasSubstr("combine: rows at"));
  EXPECT_THAT(text({.rows = on_gpu(0), .bias = {nullptr, aligned}}),
              HasSubstr("combine: biases at"));
  EXPECT_THAT(text({.rows = on_gpu(0), .weights = static_cast<float*>(on_gpu(1))}),
              HasSubstr("combine: weights at"));
}
TEST_F(EpGpuCalls, NoTokensNeedNoMemory) {
  EXPECT_TRUE(dispatch({.count = 0, .row_bytes = 512}).ok());
}

// ---- setup -------------------------------------------------------------------------------------

TEST_F(EpGpuCalls, NoGroupIsMadeInACapture) {
  const cuda::Stream stream = cuda::Stream::create(context(1)).value();
  const Window window = make_window(core_->options(), 2).value();
  auto capture = cuda::Capture::begin(stream).value();
  const auto refused = symm::Group::create({.world = 2}, window.layout, driver_);
  ASSERT_EQ(refused.code(), Code::kInvalidArgument);
  EXPECT_THAT(refused.error().message, HasSubstr("making a group of ranks is not possible"));
  ASSERT_TRUE(capture.finish().ok());
}
TEST_F(EpGpuCalls, CopiesAreNotReservedInACapture) {
  const auto* stream = core_->group().rank(0).device().stream();
  auto capture = cuda::Capture::begin(*stream).value();
  const auto refused = core_->reserve_copies(0, 1);
  ASSERT_EQ(refused.code(), Code::kBusy);
  EXPECT_THAT(refused.error().message, HasSubstr("being captured"));
  ASSERT_TRUE(capture.finish().ok());
}

}  // namespace
}  // namespace crossdock::ep
