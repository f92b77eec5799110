// Streams, events, deadlines of waits, capture queries, graphs, modules and launches, on the fake.
// SPDX-License-Identifier: Apache-2.0
#include "cuda/stream.hpp"

#include <array>
#include <chrono>
#include <gmock/gmock.h>
#include <optional>

#include "cuda/graph.hpp"
#include "cuda/memory.hpp"
#include "cuda/module.hpp"
#include "support/fake_cuda/fixture.hpp"

namespace crossdock::cuda {
namespace {

using namespace std::chrono_literals;
using ::testing::HasSubstr;

using Streams = crossdock::testing::FakeCudaTest;

TEST_F(Streams, OwnedIsDestroyedBorrowedIsNot) {
  const Context ctx = context();
  {
    auto owned = Stream::create(ctx, {.high_priority = true});
    ASSERT_TRUE(owned.ok());
    {
      const Stream borrowed = Stream::borrow(ctx, owned->handle());
    }
    EXPECT_EQ(fake_->calls("cuStreamDestroy"), 0);
    Stream moved = std::move(*owned);
    EXPECT_TRUE(moved.synchronize(Deadline::in(1s)).ok());
  }
  EXPECT_EQ(fake_->calls("cuStreamDestroy"), 1);
}

TEST_F(Streams, OutliveTheirContextHandle) {
  std::optional<Stream> stream;
  {
    const Context ctx = context(1);
    stream.emplace(Stream::create(ctx).value());
  }
  EXPECT_TRUE(*stream->idle());
}

TEST_F(Streams, WaitEndsAtItsDeadline) {
  const Context ctx = context();
  const Stream stream = Stream::create(ctx).value();
  const Event event = Event::create(ctx).value();
  ASSERT_TRUE(event.record(stream).ok());
  fake_->hold_work(true);
  const auto start = std::chrono::steady_clock::now();
  const auto waited = stream.synchronize(Deadline::in(20ms));
  const auto took = std::chrono::steady_clock::now() - start;
  EXPECT_EQ(waited.code(), Code::kDeadline);
  EXPECT_GE(took, 20ms);
  EXPECT_LT(took, 2s);
  EXPECT_EQ(event.synchronize(Deadline::now()).code(), Code::kDeadline);
  fake_->hold_work(false);
  // What is ready is reported even when the deadline has passed.
  EXPECT_TRUE(stream.synchronize(Deadline::now()).ok());
  EXPECT_TRUE(event.synchronize(Deadline::now()).ok());
}

TEST_F(Streams, ReportWhatEarlierWorkDidWrong) {
  const Stream stream = Stream::create(context()).value();
  fake_->fail({.function = "cuStreamQuery", .status = Status::kIllegalAddress});
  const auto result = stream.synchronize(Deadline::in(1s));
  EXPECT_EQ(result.code(), Code::kInternal);
  EXPECT_EQ(result.error().scope, Scope::kDevice);
  EXPECT_THAT(result.error().message, HasSubstr("CUDA_ERROR_ILLEGAL_ADDRESS"));
}

TEST_F(Streams, ElapsedNeedsTiming) {
  const Context ctx = context();
  const Stream stream = Stream::create(ctx).value();
  const Event plain = Event::create(ctx).value();
  const Event start = Event::create(ctx, Timing::kOn).value();
  const Event end = Event::create(ctx, Timing::kOn).value();
  EXPECT_EQ(elapsed_ms(plain, end).code(), Code::kInvalidArgument);
  ASSERT_TRUE(start.record(stream).ok());
  ASSERT_TRUE(stream.wait(start).ok());
  ASSERT_TRUE(end.record(stream).ok());
  EXPECT_GT(*elapsed_ms(start, end), 0);
}

using Graphs = crossdock::testing::FakeCudaTest;

TEST_F(Graphs, CapturedWorkRunsOnReplayOnly) {
  const Context ctx = context();
  const Stream stream = Stream::create(ctx).value();
  const auto memory = DeviceMemory::allocate(ctx, 64).value();
  ASSERT_TRUE(fill_bytes_async(memory.address(), 1, 64, stream).ok());
  Capture capture = Capture::begin(stream).value();
  EXPECT_TRUE(*stream.capturing());
  ASSERT_TRUE(fill_bytes_async(memory.address(), 7, 64, stream).ok());
  EXPECT_EQ(memory.as<char>()[63], 1);
  const Graph graph = capture.finish().value();
  EXPECT_FALSE(*stream.capturing());
  EXPECT_EQ(capture.finish().code(), Code::kClosed);
  ASSERT_TRUE(graph.launch(stream).ok());
  EXPECT_EQ(memory.as<char>()[63], 7);
}

TEST_F(Graphs, EveryCaptureHasANumber) {
  const Context ctx = context();
  const Stream stream = Stream::create(ctx).value();
  const Stream other = Stream::create(ctx).value();
  EXPECT_EQ(*stream.capture(), 0u);
  Capture capture = Capture::begin(stream).value();
  const std::uint64_t first = *stream.capture();
  EXPECT_NE(first, 0u);
  EXPECT_EQ(*stream.capture(), first);
  EXPECT_EQ(*other.capture(), 0u);
  EXPECT_EQ(*Stream::borrow(ctx, nullptr).capture(), 0u);
  ASSERT_TRUE(capture.finish().ok());
  EXPECT_EQ(*stream.capture(), 0u);
  const Capture again = Capture::begin(stream).value();
  EXPECT_NE(*stream.capture(), 0u);
  EXPECT_NE(*stream.capture(), first);
}

TEST_F(Graphs, WaitingWhileCapturingIsRefusedWithASentence) {
  const Stream stream = Stream::create(context()).value();
  const Capture capture = Capture::begin(stream).value();
  const auto result = stream.synchronize(Deadline::in(1s));
  EXPECT_EQ(result.code(), Code::kInvalidArgument);
  EXPECT_THAT(result.error().message, HasSubstr("before the capture begins"));
}

TEST_F(Graphs, DefaultStreamBesideACaptureCountsAsCapturing) {
  const Context ctx = context();
  const Stream stream = Stream::create(ctx).value();
  const Stream legacy = Stream::borrow(ctx, nullptr);
  EXPECT_FALSE(*legacy.capturing());
  const Capture capture = Capture::begin(stream).value();
  EXPECT_TRUE(*legacy.capturing());
}

TEST_F(Graphs, DroppedCaptureLeavesTheStreamUsable) {
  const Stream stream = Stream::create(context()).value();
  {
    const Capture dropped = Capture::begin(stream).value();
  }
  EXPECT_FALSE(*stream.capturing());
  EXPECT_TRUE(stream.synchronize(Deadline::in(1s)).ok());
}

// A second stream that takes part in the first one's capture, with work of its own.
struct Fork {
  explicit Fork(const Context& ctx)
      : first(Stream::create(ctx).value()),
        second(Stream::create(ctx).value()),
        begun(Event::create(ctx).value()),
        done(Event::create(ctx).value()),
        memory(DeviceMemory::allocate(ctx, 64).value()),
        capture(Capture::begin(first).value()) {
    EXPECT_TRUE(begun.record(first).ok());
    EXPECT_TRUE(second.wait(begun).ok());
    EXPECT_TRUE(*second.capturing());
  }
  void work() const { EXPECT_TRUE(fill_bytes_async(memory.address(), 7, 64, second).ok()); }
  const Stream first, second;
  const Event begun, done;
  const DeviceMemory memory;
  Capture capture;
};

TEST_F(Graphs, ACaptureNeedsTheStreamsItForkedTo) {
  Fork fork(context());
  fork.work();
  const auto graph = fork.capture.finish();
  ASSERT_FALSE(graph.ok());
  EXPECT_THAT(graph.error().message, HasSubstr("CUDA_ERROR_STREAM_CAPTURE_UNJOINED"));
  EXPECT_FALSE(*fork.first.capturing());
  EXPECT_FALSE(*fork.second.capturing());
}

TEST_F(Graphs, AJoinTakesAllWorkBeforeItsEvent) {
  Fork fork(context());
  fork.work();
  ASSERT_TRUE(fork.done.record(fork.second).ok());
  ASSERT_TRUE(fork.first.wait(fork.done).ok());
  const auto graph = fork.capture.finish();
  ASSERT_TRUE(graph.ok()) << graph.error().describe();
  ASSERT_TRUE(graph->launch(fork.first).ok());
  EXPECT_EQ(fork.memory.as<char>()[63], 7);
}

TEST_F(Graphs, AJoinDoesNotTakeWorkAfterItsEvent) {
  Fork fork(context());
  fork.work();
  ASSERT_TRUE(fork.done.record(fork.second).ok());
  ASSERT_TRUE(fork.first.wait(fork.done).ok());
  fork.work();
  EXPECT_FALSE(fork.capture.finish().ok());
}

// What it waited for belongs to the first stream anyway.
TEST_F(Graphs, AForkWithoutWorkNeedsNoJoin) {
  Fork fork(context());
  EXPECT_TRUE(fork.capture.finish().ok());
}

using Modules = crossdock::testing::FakeCudaTest;

constexpr std::array<std::byte, 8> kElf = {std::byte{0x7f}, std::byte{'E'}, std::byte{'L'},
                                           std::byte{'F'}};

TEST_F(Modules, LaunchPassesShapeAttributesAndParameters) {
  struct Params {
    int value;
  };
  int seen = 0;
  fake_->set_kernel("fill", [&](const LaunchConfig&, void** parameters) {
    seen = static_cast<Params*>(parameters[0])->value;
  });
  const Context ctx = context();
  const Stream stream = Stream::create(ctx).value();
  const Module module = Module::load(ctx, kElf, "fill").value();
  const Function fill = module.function("fill").value();
  ASSERT_TRUE(fill.set_max_dynamic_shared(100000).ok());
  const LaunchOptions options{.grid = {132},
                              .block = {256},
                              .cluster = {2},
                              .dynamic_shared_bytes = 100000,
                              .cooperative = true,
                              .programmatic_serialization = true};
  ASSERT_TRUE(fill.launch(stream, options, Params{42}).ok());
  EXPECT_EQ(seen, 42);
  const auto launch = fake_->last_launch();
  EXPECT_EQ(launch.config.grid_x, 132u);
  EXPECT_EQ(launch.config.block_x, 256u);
  EXPECT_EQ(launch.config.shared_bytes, 100000u);
  EXPECT_EQ(launch.config.num_attributes, 3u);
  EXPECT_EQ(launch.config.stream, stream.handle());
  EXPECT_TRUE(launch.cooperative);
  EXPECT_TRUE(launch.programmatic);
  EXPECT_EQ(launch.cluster_x, 2u);
  EXPECT_EQ(fill.info()->num_registers, 32);
}

TEST_F(Modules, BadLaunchSaysTheShape) {
  const Context ctx = context();
  const Module module = Module::load(ctx, kElf, "fill").value();
  const Stream stream = Stream::create(ctx).value();
  const Function fill = module.function("fill").value();
  const auto result = fill.launch(stream, {.grid = {4}, .block = {2048}}, 0);
  EXPECT_EQ(result.code(), Code::kInvalidArgument);
  EXPECT_THAT(result.error().message, HasSubstr("launch fill with grid 4x1x1, block 2048x1x1"));
  EXPECT_THAT(result.error().message, HasSubstr("CUDA_ERROR_INVALID_VALUE"));
}

TEST_F(Modules, RefusesWhatTheGpuCannotHold) {
  const Context ctx = context();
  const Module module = Module::load(ctx, kElf, "big").value();
  const auto result = module.function("big")->set_max_dynamic_shared(300000);
  EXPECT_EQ(result.code(), Code::kInvalidArgument);
  EXPECT_THAT(result.error().message,
              HasSubstr("300000 bytes of shared memory per block; GPU 0 has"));
}

TEST_F(Modules, BadImageAndMissingKernelAreErrors) {
  const Context ctx = context();
  constexpr std::array<std::byte, 8> kJunk = {};
  EXPECT_EQ(Module::load(ctx, kJunk, "junk").code(), Code::kInvalidArgument);
  EXPECT_EQ(Module::load(ctx, {}, "empty").code(), Code::kInvalidArgument);
  const Module module = Module::load(ctx, kElf, "fill").value();
  const auto missing = module.function("missing_kernel");
  EXPECT_EQ(missing.code(), Code::kNotFound);
  EXPECT_THAT(missing.error().message, HasSubstr("missing_kernel in module fill"));
}

}  // namespace
}  // namespace crossdock::cuda
