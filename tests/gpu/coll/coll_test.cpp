// Collectives on GPUs of one process: every byte of every call, graphs that are replayed with new
// data, peers that never come while many other streams exist, and nothing that an SM does for a
// gather or a tensor.
// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <chrono>
#include <gmock/gmock.h>

#include "cuda/graph.hpp"
#include "gpu/gpu_fixture.hpp"
#include "support/coll_cases.hpp"

namespace crossdock::testing {
namespace {

using namespace std::chrono_literals;
using ::testing::HasSubstr;

class CollGpu : public GpuTest {
 protected:
  static coll::GroupOptions options(u32 world, std::chrono::nanoseconds wait = 20s) {
    coll::Options o = coll_options();
    o.session_bytes = 32 << 20;
    o.tensor_bytes = 8 << 20;
    o.shard_rows = 5000;
    o.row_bytes = 7168;
    o.fetch_sms = 16;
    o.wait = wait;
    return {.ranks = {.world = world}, .coll = o};
  }
  [[nodiscard]] std::vector<u32> worlds() const {
    std::vector<u32> all{1};
    if (num_ranks() >= 2) all.push_back(2);
    if (num_ranks() > 2) all.push_back(static_cast<u32>(num_ranks()));
    return all;
  }
};

TEST_F(CollGpu, EveryCallDeliversEveryByte) {
  for (const u32 world : worlds()) {
    SCOPED_TRACE(world);
    CollRig rig(options(world));
    for (const u64 bytes : {u64{16}, u64{4096}, u64{3} << 20})
      ASSERT_NO_FATAL_FAILURE(check_gathers(rig, 3, bytes));
    ASSERT_NO_FATAL_FAILURE(check_scatters<float>(rig, 3, 100'000));
    ASSERT_NO_FATAL_FAILURE(check_scatters<std::uint16_t>(rig, 3, 1'000'000));
    for (u32 step = 1; step < world; ++step)
      ASSERT_NO_FATAL_FAILURE(check_pipeline(rig, step, 20));
    ASSERT_NO_FATAL_FAILURE(check_rows<std::int32_t>(rig, 3000));
  }
}

TEST_F(CollGpu, SmallAndWideRowsAreFetchedToo) {
  for (const u32 row_bytes : {16u, 512u, 12288u}) {
    SCOPED_TRACE(row_bytes);
    coll::GroupOptions o = options(static_cast<u32>(std::min(num_ranks(), 2)));
    o.coll.row_bytes = row_bytes;
    o.coll.shard_rows = 333;
    o.coll.wide_indices = true;
    CollRig rig(o);
    ASSERT_NO_FATAL_FAILURE(check_rows<std::int64_t>(rig, 1000));
  }
}

// What a rank does in its graph: a gather, a tensor to the next rank, a barrier.
struct Replayed {
  CollRig& rig;
  u64 bytes;
  std::vector<u8*> inputs;
  std::vector<u8*> outputs;
  std::vector<u8*> tensors;

  Replayed(CollRig& of, u64 size) : rig(of), bytes(size) {
    for (u32 r = 0; r < rig.world(); ++r) {
      inputs.push_back(rig.memory<u8>(r, bytes));
      outputs.push_back(rig.memory<u8>(r, rig.world() * bytes));
      tensors.push_back(rig.memory<u8>(r, bytes));
    }
  }
  Result<> call(u32 r) {
    const u32 world = rig.world();
    CROSSDOCK_TRY(session, rig.group().begin(r));
    CROSSDOCK_CHECK_OK(session.all_gather(inputs[r], outputs[r], bytes));
    CROSSDOCK_CHECK_OK(session.end());
    CROSSDOCK_CHECK_OK(rig.group().send(r, (r + 1) % world, inputs[r], bytes));
    CROSSDOCK_CHECK_OK(rig.group().receive(r, (r + world - 1) % world, tensors[r], bytes));
    return rig.group().barrier(r);
  }
  void check(u32 round) {
    ASSERT_NO_FATAL_FAILURE(rig.finish());
    for (u32 r = 0; r < rig.world(); ++r) {
      const u32 before = (r + rig.world() - 1) % rig.world();
      ASSERT_EQ(rig.read(r, tensors[r], bytes), bytes_of(before, round, bytes));
      for (u32 from = 0; from < rig.world(); ++from)
        ASSERT_EQ(rig.read(r, outputs[r] + from * bytes, bytes), bytes_of(from, round, bytes))
            << "round " << round << " at rank " << r << " from " << from;
    }
  }
};

TEST_F(CollGpu, GraphsAreReplayedWithNewData) {
  if (num_ranks() < 2) GTEST_SKIP() << "needs 2 GPUs, there is " << num_ranks();
  CollRig rig(options(static_cast<u32>(num_ranks())));
  Replayed replayed(rig, 64 << 10);
  std::vector<cuda::Graph> graphs;
  for (u32 r = 0; r < rig.world(); ++r) {
    auto capture = cuda::Capture::begin(*rig.rank(r).device().stream()).value();
    const auto recorded = replayed.call(r);
    ASSERT_TRUE(recorded.ok()) << recorded.error().describe();
    auto graph = capture.finish();
    ASSERT_TRUE(graph.ok()) << graph.error().describe();
    graphs.push_back(std::move(graph).value());
  }
  for (u32 round = 0; round < 9; ++round) {
    for (u32 r = 0; r < rig.world(); ++r)
      rig.write(r, replayed.inputs[r], bytes_of(r, round, replayed.bytes));
    // A captured tensor goes through one slot in every replay, so plain calls between replays come
    // in pairs: as many as there are slots.
    for (u32 r = 0; r < rig.world(); ++r) {
      const auto launched = graphs[r].launch(*rig.rank(r).device().stream());
      ASSERT_TRUE(launched.ok()) << launched.error().describe();
    }
    ASSERT_NO_FATAL_FAILURE(replayed.check(round));
  }
}

// A kernel that follows such a pointer would end the context, and all that is in it; a copy would
// keep the caller waiting.
TEST_F(CollGpu, MemoryOfTheHostIsRefused) {
  CollRig rig(options(1));
  std::vector<std::int32_t> numbers(4);
  alignas(16) static u8 rows[4 * 7168];
  u8* const output = rig.memory<u8>(0, sizeof rows);
  const auto refused = [](const auto& result) {
    ASSERT_EQ(result.code(), Code::kInvalidArgument);
    EXPECT_THAT(result.error().message, HasSubstr("on GPU 0"));
  };
  refused(rig.group().fetch_rows(0, numbers.data(), 4, output));
  refused(rig.group().fetch_rows(0, rig.memory(0, numbers), 4, rows));
  auto session = rig.group().begin(0).value();
  refused(session.reduce_scatter(output, rows, 64, coll::DataType::kF32));
  refused(session.reduce_scatter(rows, output, 64, coll::DataType::kF32));
  refused(session.all_gather(output, rows, 64));
  refused(session.all_gather(rows, output, 64));
  refused(rig.group().write_rows(0, 0, rows, 1));
  EXPECT_OK(session.end());
  ASSERT_NO_FATAL_FAILURE(check_rows<std::int32_t>(rig, 30));
}

// A stream waits for a rank that never comes, and freeing memory would wait for the stream.
TEST_F(CollGpu, AGroupMayGoWhileAStreamWaits) {
  if (num_ranks() < 2) GTEST_SKIP() << "needs 2 GPUs, there is " << num_ranks();
  const cuda::Stream stream = cuda::Stream::create(context(0)).value();
  symm::LocalMemory tensor;  // freed after the group: freeing it waits for the GPU too
  const auto start = std::chrono::steady_clock::now();
  {
    CollRig rig(options(2, 1h));
    tensor = rig.rank(0).allocate(64).value();
    EXPECT_OK(rig.group().receive(0, 1, tensor.as<u8>(), 64, stream.handle()));
    EXPECT_OK(rig.group().barrier(0, stream.handle()));
  }
  EXPECT_OK(stream.synchronize(Deadline::in(10s)));
  EXPECT_LT(std::chrono::steady_clock::now() - start, 60s);
}

// Streams that stand in each other's way in the queues of a GPU must not keep the watch from ending
// a wait.
TEST_F(CollGpu, APeerThatNeverComesIsNamedWhateverElseWaits) {
  if (num_ranks() < 2) GTEST_SKIP() << "needs 2 GPUs, there is " << num_ranks();
  CollRig rig(options(2, 300ms));
  std::vector<cuda::Stream> streams;
  for (int i = 0; i < 40; ++i)
    streams.push_back(cuda::Stream::create(context(0)).value());
  u8* const output = rig.memory<u8>(0, 2 * 4096);
  u8* const input = rig.memory<u8>(0, 4096);
  const auto start = std::chrono::steady_clock::now();
  auto session = rig.group().begin(0, streams[0].handle()).value();
  EXPECT_OK(session.all_gather(input, output, 4096));
  EXPECT_OK(session.end());
  EXPECT_OK(rig.group().receive(0, 1, input, 64, streams[1].handle()));
  for (const cuda::Stream& stream : streams)
    EXPECT_OK(stream.synchronize(Deadline::in(10s)));
  const auto took = std::chrono::steady_clock::now() - start;
  const auto failed = rig.group().check();
  ASSERT_EQ(failed.code(), Code::kPeerLost);
  std::printf("%s\nafter %.1f ms\n", failed.error().describe().c_str(),
              std::chrono::duration<double, std::milli>(took).count());
  EXPECT_THAT(failed.error().message, HasSubstr("for rank 1"));
  EXPECT_GE(took, 300ms);
  EXPECT_LT(took, 3s);
  EXPECT_OK(rig.group().reset(soon()));
  ASSERT_NO_FATAL_FAILURE(check_gathers(rig, 3, 4096));
  ASSERT_NO_FATAL_FAILURE(check_pipeline(rig, 1, 5));
}

TEST_F(CollGpu, AGraphThatWaitsInVainEndsToo) {
  if (num_ranks() < 2) GTEST_SKIP() << "needs 2 GPUs, there is " << num_ranks();
  CollRig rig(options(2, 300ms));
  const cuda::Stream& stream = *rig.rank(0).device().stream();
  auto capture = cuda::Capture::begin(stream).value();
  EXPECT_OK(rig.group().barrier(0));
  const auto graph = capture.finish();
  ASSERT_TRUE(graph.ok()) << graph.error().describe();
  EXPECT_OK(graph->launch(stream));
  EXPECT_OK(stream.synchronize(Deadline::in(10s)));
  EXPECT_EQ(rig.group().check().code(), Code::kPeerLost);
}

TEST_F(CollGpu, ARowThatTheTableDoesNotHaveIsNamed) {
  CollRig rig(options(1));
  const std::vector<std::int32_t> numbers{3, 5000, -2};
  EXPECT_OK(rig.group().fetch_rows(0, rig.memory(0, numbers), 2, rig.memory<u8>(0, 3 * 7168)));
  const auto failed = rig.group().synchronize(soon());
  ASSERT_EQ(failed.code(), Code::kInvalidArgument);
  EXPECT_THAT(failed.error().message, HasSubstr("place 1 of the list names row 5000"));
  EXPECT_OK(rig.group().reset(soon()));
  ASSERT_NO_FATAL_FAILURE(check_rows<std::int32_t>(rig, 50));
}

}  // namespace
}  // namespace crossdock::testing
