// Expert layers on GPUs, with the fake driver: pointers that a kernel must not follow are refused
// before anything is launched. Kernels do nothing here.
// SPDX-License-Identifier: Apache-2.0
#include <cstdlib>
#include <gmock/gmock.h>
#include <latch>
#include <thread>

#include "cuda/graph.hpp"
#include "cuda/memory.hpp"
#include "moe/layer_core.hpp"
#include "support/fake_cuda/fixture.hpp"
#include "unit/jit/jit_fixture.hpp"

namespace crossdock::moe {
namespace {

using namespace std::chrono_literals;
using ::testing::HasSubstr;

class MoeGpuCalls : public crossdock::testing::FakeCudaTest {
 protected:
  static constexpr u32 kTokens = 4;
  static LayerOptions options() {
    LayerOptions o{.experts = 2, .top_k = 2, .max_tokens = kTokens, .hidden = 256, .inter = 128};
    o.ranks.world = 1;
    o.shared_inter = 128;
    return o;
  }
  void SetUp() override {
    FakeCudaTest::SetUp();
    core_ = make(options());
    chosen_ = weights(Experts::kChosen);
    shared_ = weights(Experts::kShared);
  }
  [[nodiscard]] std::shared_ptr<LayerCore> make(const LayerOptions& options) const {
    const ep::Options ep = group_options(options);
    const u32 world = options.ranks.world;
    const ep::Window window = ep::make_window(ep, world).value();
    auto group = symm::Group::create({.world = world}, window.layout, driver_).value();
    auto jit = std::make_unique<jit::Jit>(
        jit::JitOptions{}, std::make_unique<jit::FakeCompiler>(folder_.path / "tally"));
    auto core = ep::Core::create(std::move(group), std::move(jit), ep, Deadline::in(60s)).value();
    return LayerCore::create(std::move(core), options, Deadline::in(60s)).value();
  }
  void TearDown() override {
    core_.reset();
    memory_.clear();
    FakeCudaTest::TearDown();
  }
  void* on_gpu(int gpu, std::size_t bytes = 1 << 18) {
    memory_.push_back(cuda::DeviceMemory::allocate(context(gpu), bytes).value());
    return memory_.back().as<void>();
  }
  RankWeights weights(Experts of) { return weights(*core_, 0, of); }
  RankWeights weights(const LayerCore& core, u32 rank, Experts of = Experts::kChosen) {
    const int gpu = static_cast<int>(rank);
    RankWeights out;
    out.rank = rank;
    out.view = {.layout = core.weight_layout(rank, of),
                .gate_up = on_gpu(gpu),
                .gate_up_scales = on_gpu(gpu),
                .down = on_gpu(gpu),
                .down_scales = on_gpu(gpu)};
    return out;
  }
  LayerCore::Call call() {
    LayerCore::Call c = call(0);
    c.input.shared_weights = static_cast<float*>(on_gpu(0));
    c.shared = &shared_;
    return c;
  }
  LayerCore::Call call(u32 rank) {
    const int gpu = static_cast<int>(rank);
    LayerCore::Call c;
    c.input = {.count = kTokens,
               .rows = on_gpu(gpu),
               .ids = on_gpu(gpu),
               .weights = static_cast<float*>(on_gpu(gpu))};
    c.output = {.rows = on_gpu(gpu)};
    return c;
  }
  u64* words(u32 rank) { return static_cast<u64*>(on_gpu(static_cast<int>(rank))); }
  [[nodiscard]] int launches() const { return fake_->calls("cuLaunchKernelEx"); }

  jit::TemporaryFolder folder_;
  std::vector<cuda::DeviceMemory> memory_;
  std::shared_ptr<LayerCore> core_;
  RankWeights chosen_, shared_;
};

// Once a dispatch runs, peers wait for the rest of it.
TEST_F(MoeGpuCalls, PointersThatARankCannotFollowLaunchNothing) {
  alignas(16) static std::byte host[1 << 14];
  const auto right = core_->forward(chosen_, call());
  ASSERT_TRUE(right.ok()) << right.error().describe();
  const int before = launches();
  ASSERT_GT(before, 0);
  const auto refused = [&](const auto& got, const char* text) {
    ASSERT_EQ(got.code(), Code::kInvalidArgument) << text;
    EXPECT_THAT(got.error().message, HasSubstr(text));
    EXPECT_EQ(launches(), before) << text;
  };
  const auto refuse = [&](const auto& change, const char* text, bool of_input = true) {
    for (void* const wrong : {static_cast<void*>(host), on_gpu(1)}) {
      LayerCore::Call c = call();
      change(c, wrong);
      refused(core_->forward(chosen_, c), text);
      if (of_input) refused(core_->begin(chosen_, c), text);
    }
  };
  refuse([](auto& c, void* p) { c.input.rows = p; }, "rows at");
  refuse([](auto& c, void* p) { c.input.ids = p; }, "ids at");
  refuse([](auto& c, void* p) { c.input.weights = static_cast<float*>(p); }, "weights at");
  refuse([](auto& c, void* p) { c.input.shared_weights = static_cast<float*>(p); },
         "moe forward: shared_weights at");
  refuse([](auto& c, void* p) { c.output.rows = p; }, "output rows at", false);
  refuse([](auto& c, void* p) { c.output.residual = p; }, "residual rows at", false);
}

// Forwards around captures, of a layer with and without shared experts. CUDA refuses a wait across
// the border of a capture, which is lost then.
class MoeCaptures : public MoeGpuCalls, public ::testing::WithParamInterface<bool> {
 protected:
  void SetUp() override {
    MoeGpuCalls::SetUp();
    LayerOptions o = options();
    if (!GetParam()) o.shared_inter = 0;
    core_ = make(o);
    stream_.emplace(cuda::Stream::create(context(0)).value());
    other_.emplace(cuda::Stream::create(context(0)).value());
    on_ = call();
    if (!GetParam()) on_.input.shared_weights = nullptr;
    beside_ = on_;
    on_.stream = stream_->handle();
    beside_.stream = other_->handle();
  }
  void TearDown() override {
    core_.reset();
    stream_.reset();
    other_.reset();
    MoeGpuCalls::TearDown();
  }
  template <class Got>
  void refused(const Got& got, const char* text) {
    ASSERT_EQ(got.code(), Code::kInvalidArgument) << text;
    EXPECT_THAT(got.error().message, HasSubstr(text));
    EXPECT_EQ(launches(), launched_) << text;
  }
  template <class Got>
  void done(const Got& got) {
    EXPECT_TRUE(got.ok()) << got.error().describe();
    launched_ = launches();
  }
  std::unique_ptr<Begun> begin(const LayerCore::Call& call) {
    auto begun = core_->begin(chosen_, call);
    done(begun);
    return std::move(begun).value();
  }

  std::optional<cuda::Stream> stream_, other_;
  LayerCore::Call on_, beside_;
  int launched_ = 0;
};
INSTANTIATE_TEST_SUITE_P(SharedExperts, MoeCaptures, ::testing::Bool());

TEST_P(MoeCaptures, OneThatBeganOutsideIsNotWaitedForInside) {
  auto begun = begin(on_);
  auto capture = cuda::Capture::begin(*stream_).value();
  const char* const open = "a forward_begin() of rank 0 outside captures has not ended";
  refused(core_->forward(chosen_, on_), open);
  refused(core_->begin(chosen_, on_), open);
  refused(core_->end(chosen_, *begun, on_), open);
  begun.reset();
  const char* const dropped = "outside captures was dropped, and this call is in a capture";
  refused(core_->forward(chosen_, on_), dropped);
  refused(core_->begin(chosen_, on_), dropped);
  done(capture.finish());
  // What the sentence advises, or a forward in halves.
  for (const bool in_halves : {false, true}) {
    begin(on_).reset();
    if (in_halves) {
      auto next = begin(beside_);
      done(core_->end(chosen_, *next, beside_));
    } else {
      done(core_->forward(chosen_, beside_));
    }
    auto again = cuda::Capture::begin(*stream_).value();
    done(core_->forward(chosen_, on_));
    done(again.finish());
  }
}

TEST_P(MoeCaptures, OneThatBeganInsideIsNotWaitedForOutside) {
  auto capture = cuda::Capture::begin(*stream_).value();
  auto begun = begin(on_);
  const char* const within = "a forward_begin() of rank 0 in a capture has not ended";
  refused(core_->forward(chosen_, beside_), within);
  refused(core_->begin(chosen_, beside_), within);
  refused(core_->end(chosen_, *begun, beside_), within);
  done(core_->end(chosen_, *begun, on_));
  begun.reset();
  // The stream of the library is still part of it.
  refused(core_->begin(chosen_, beside_), "a capture with calls of rank 0 has not ended");
  begin(on_).reset();  // dropped in it
  done(core_->forward(chosen_, on_));
  done(capture.finish());
  done(core_->forward(chosen_, beside_));
}

// Whoever allocates in the order of the first half's stream may have the memory of the input next.
TEST_P(MoeCaptures, TheStreamOfTheFirstHalfWaitsForWhatReadsTheInput) {
  auto gate = cuda::DeviceMemory::allocate(context(0), 8).value();
  auto* const open = gate.as<std::uint64_t>();
  *open = 0;
  auto begun = begin(on_);
  ASSERT_TRUE(cuda::wait_value_async(*other_, gate.address(), 1).ok());
  done(core_->end(chosen_, *begun, beside_));
  begun.reset();
  EXPECT_EQ(stream_->synchronize(Deadline::in(0ms)).code(), Code::kDeadline);
  *open = 1;
  EXPECT_TRUE(stream_->synchronize(Deadline::in(60s)).ok());
  // Not across the border of a capture, which the first stream may have begun since.
  begun = begin(on_);
  auto capture = cuda::Capture::begin(*stream_).value();
  done(core_->end(chosen_, *begun, beside_));
  begun.reset();
  done(capture.finish());
}

// An end gives its slot back when it returns, and what it has launched still reads the slot and the
// buffers of the layer.
TEST_P(MoeCaptures, WhatComesAfterAnEndWaitsForIt) {
  auto gate = cuda::DeviceMemory::allocate(context(0), 8).value();
  auto* const open = gate.as<std::uint64_t>();
  const auto late = [](const cuda::Stream& stream) {
    return stream.synchronize(Deadline::in(0ms)).code() == Code::kDeadline;
  };
  const auto in_time = [](const cuda::Stream& stream) {
    return stream.synchronize(Deadline::in(60s)).ok();
  };
  const cuda::Stream& side = *core_->group().launcher().stream(core_->rank(0), 1).value();
  // Behind all that the first stream waits for.
  beside_.stage_done = [&](LayerStage stage) {
    return stage == LayerStage::kGroup ? cuda::wait_value_async(*other_, gate.address(), 1)
                                       : Result<>();
  };
  for (const bool in_halves : {true, false}) {
    *open = 0;
    auto first = begin(on_), second = begin(on_);
    done(core_->end(chosen_, *first, beside_));
    first.reset();
    EXPECT_TRUE(in_time(*stream_));
    if (in_halves) {
      first = begin(on_);
      EXPECT_TRUE(late(side));
      EXPECT_TRUE(in_time(*stream_));
      done(core_->end(chosen_, *second, on_));
    } else {
      second.reset();
      done(core_->forward(chosen_, on_));
    }
    EXPECT_TRUE(late(*stream_));
    *open = 1;
    EXPECT_TRUE(in_time(*stream_) && in_time(*other_) && in_time(side));
  }
}
// Not across the border of a capture, which would be lost.
TEST_P(MoeCaptures, EndsOfACaptureAreWaitedForInIt) {
  auto begun = begin(on_);
  done(core_->end(chosen_, *begun, beside_));
  begun.reset();
  auto capture = cuda::Capture::begin(*stream_).value();
  begun = begin(on_);
  const auto joined = cuda::Event::create(context(0)).value();
  ASSERT_TRUE(joined.record(*stream_).ok() && other_->wait(joined).ok());
  done(core_->end(chosen_, *begun, beside_));
  begun = begin(on_);
  done(core_->end(chosen_, *begun, on_));
  begun.reset();
  done(core_->forward(chosen_, on_));
  ASSERT_TRUE(joined.record(*other_).ok() && stream_->wait(joined).ok());
  done(capture.finish());
  done(core_->forward(chosen_, on_));
}

// Their dispatches count the same epochs, and have the same slots.
TEST_P(MoeCaptures, LayersOverOneGroupWaitForEachOther) {
  LayerOptions o = options();
  o.inter = 256;
  o.shared_inter = 0;
  const auto another =
      LayerCore::create(core_->group().shared_from_this(), o, Deadline::in(60s)).value();
  const RankWeights theirs = weights(*another, 0);
  beside_.input.shared_weights = nullptr;
  auto gate = cuda::DeviceMemory::allocate(context(0), 8).value();
  auto* const open = gate.as<std::uint64_t>();
  *open = 0;
  ASSERT_TRUE(cuda::wait_value_async(*stream_, gate.address(), 1).ok());
  auto begun = begin(on_);
  done(another->forward(theirs, beside_));
  EXPECT_EQ(other_->synchronize(Deadline::in(0ms)).code(), Code::kDeadline);
  *open = 1;
  EXPECT_TRUE(other_->synchronize(Deadline::in(60s)).ok());
  auto second = another->begin(theirs, beside_);
  done(second);
  EXPECT_EQ(core_->begin(chosen_, on_).code(), Code::kBusy);
  EXPECT_EQ(another->begin(theirs, beside_).code(), Code::kBusy);
  done(core_->end(chosen_, *begun, on_));
}

// Its capture cannot end well: nothing has joined what it began on a stream of its own.
TEST_P(MoeCaptures, OneThatIsDroppedAfterItsCaptureIsForgotten) {
  auto first = cuda::Capture::begin(*stream_).value();
  auto begun = begin(on_);
  EXPECT_FALSE(first.finish().ok());
  begun.reset();
  auto second = cuda::Capture::begin(*stream_).value();
  done(core_->forward(chosen_, on_));
  done(second.finish());
  done(core_->forward(chosen_, on_));
}

// Of one rank, while another waits for what this one does next.
TEST_F(MoeGpuCalls, WeightsArePreparedBesideARankThatWaits) {
  LayerOptions o = options();
  o.ranks.world = 2;
  const auto core = make(o);
  const cuda::Stream& theirs = *core->group().launcher().stream(core->rank(1), 1).value();
  auto gate = cuda::DeviceMemory::allocate(context(1), 8).value();
  *gate.as<std::uint64_t>() = 0;
  ASSERT_TRUE(cuda::wait_value_async(theirs, gate.address(), 1).ok());
  const auto got = core->gemm().prepare_weights(core->rank(0), {}, words(0), Deadline::in(1s));
  EXPECT_TRUE(got.ok()) << got.error().describe();
  *gate.as<std::uint64_t>() = 1;
  EXPECT_TRUE(theirs.synchronize(Deadline::in(60s)).ok());
}

// A rank's thread may be inside a forward while that of another prepares kernels, as those of
// weights and of biases are at their first use. Nothing can be seen of a race here but by a
// sanitizer, or by luck.
TEST_F(MoeGpuCalls, RanksPrepareAndForwardSideBySide) {
  LayerOptions o = options();
  o.ranks.world = 2;
  o.shared_inter = 0;
  const auto core = make(o);
  const std::vector<float> bias(u64{2} * o.inter, 1.0f);
  std::latch both(2);
  const auto run = [&](u32 rank, RankWeights mine, u64* words, LayerCore::Call call) {
    both.arrive_and_wait();
    for (u32 i = 0; i < 4; ++i) {
      const auto made =
          core->gemm().prepare_weights(core->rank(rank), {}, words, Deadline::in(60s));
      EXPECT_TRUE(made.ok()) << made.error().describe();
      const auto biased = core->copy_bias(mine, {.gate_up = bias.data()}, Deadline::in(60s));
      EXPECT_TRUE(biased.ok()) << biased.error().describe();
      const auto called = core->forward(mine, call);
      EXPECT_TRUE(called.ok()) << called.error().describe();
    }
  };
  std::vector<std::thread> threads;
  for (const u32 rank : {0u, 1u})
    threads.emplace_back(run, rank, weights(*core, rank), words(rank), call(rank));
  for (std::thread& thread : threads)
    thread.join();
}

TEST_F(MoeGpuCalls, PlainWeightsThatARankCannotFollowArePreparedNowhere) {
  alignas(16) static std::byte host[1 << 18];
  ASSERT_EQ(::setenv("CROSSDOCK_CUDA_DRIVER", CROSSDOCK_FAKE_CUDA, 1), 0);
  Gemm gemm = Gemm::create({.ranks = {.world = 1}}).value();
  ::unsetenv("CROSSDOCK_CUDA_DRIVER");
  PlainWeights plain{.number = Number::kE4m3,
                     .experts = 2,
                     .hidden = 256,
                     .inter = 128,
                     .gate_up = on_gpu(0),
                     .down = on_gpu(0),
                     .gate_up_scales = on_gpu(0),
                     .down_scales = on_gpu(0)};
  const void* const other = on_gpu(1);
  const int blocks = fake_->live().blocks;
  const auto refuse = [&](auto PlainWeights::* member, const char* text) {
    PlainWeights wrong = plain;
    for (const void* const p : {static_cast<const void*>(host), static_cast<const void*>(other)}) {
      wrong.*member = p;
      const auto got = Weights::prepare(gemm, 0, wrong, {}, Deadline::in(60s));
      ASSERT_EQ(got.code(), Code::kInvalidArgument) << text;
      EXPECT_THAT(got.error().message, HasSubstr(text));
      EXPECT_EQ(launches(), 0) << text;
      EXPECT_EQ(fake_->live().blocks, blocks) << "memory was taken for nothing";
    }
  };
  refuse(&PlainWeights::gate_up, "moe prepare_weights: gate_up at");
  refuse(&PlainWeights::down, "moe prepare_weights: down at");
  refuse(&PlainWeights::gate_up_scales, "moe prepare_weights: scales of gate_up at");
  refuse(&PlainWeights::down_scales, "moe prepare_weights: scales of down at");
}

}  // namespace
}  // namespace crossdock::moe
