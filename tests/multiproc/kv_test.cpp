// KV hand-over between real processes: deaths and hangs of either side in the middle of a request,
// aborts with poisoned pages, and re-slicing between tensor-parallel sizes, over shared memory and
// TCP. The test process has no engine and no threads; see kv_worker.cpp for what the children do.
// SPDX-License-Identifier: Apache-2.0
#include <csignal>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <memory>

#include "multiproc/kv_worker.hpp"

namespace crossdock::multiproc {
namespace {

using testing::HasSubstr;
using testing::StartsWith;

class KvProcesses : public testing::TestWithParam<std::string> {
 protected:
  static constexpr int kPages = 512;

  std::unique_ptr<KvWorker> make(const char* role) {
    return std::make_unique<KvWorker>(KvWorkerOptions{.role = role, .transport = GetParam()});
  }
  void SetUp() override {
    prefill = make("prefill");
    decode = make("decode");
  }
  // Request 1 is asked for; its first 4 of 8 layers arrived, and the rest is not pushed.
  void half_way(int expires_ms) { half_way(expires_ms, prefill->name()); }
  void half_way(int expires_ms, const std::string& sender) {
    ASSERT_EQ(prefill->ask("admit 1 512"), "ok");
    ASSERT_EQ(decode->ask("expect 1 512 " + std::to_string(expires_ms) + " " + sender), "ok");
    ASSERT_EQ(prefill->ask("push 1 0 4"), "ok");
    // Each layer is a transfer of its own, so a later one may be there first.
    for (int layer = 0; layer < 4; ++layer)
      ASSERT_EQ(decode->ask("wait_layer 1 " + std::to_string(layer) + " 20000"), "ok");
  }
  std::unique_ptr<KvWorker> prefill, decode;
};

TEST_P(KvProcesses, EveryByteArrives) {
  half_way(30'000);
  ASSERT_EQ(prefill->ask("push 1 4 8"), "ok");
  ASSERT_EQ(prefill->ask("finish 1"), "ok");
  EXPECT_EQ(decode->ask("wait 1 20000"), "ok");
  EXPECT_EQ(decode->ask("verify 1"), "ok");
  EXPECT_EQ(prefill->ask("wait 1 20000"), "ok");
  EXPECT_EQ(prefill->ask("release 1"), "ok");
  EXPECT_EQ(prefill->ask("wait_free 0"), "ok");
}

TEST_P(KvProcesses, KilledPrefillIsNamedAndThePagesComeBack) {
  half_way(30'000);
  prefill->signal(SIGKILL);
  const std::string error = decode->ask("wait 1 25000");
  EXPECT_THAT(error, StartsWith("error peer lost"));
  EXPECT_THAT(error, HasSubstr(prefill->name()));
  EXPECT_THAT(error, HasSubstr("layer 4 of 8"));
  EXPECT_EQ(decode->ask("release 1"), "ok");
  EXPECT_EQ(decode->ask("wait_free 10000"), "ok");
}

TEST_P(KvProcesses, KilledDecodeIsNamedAndThePagesComeBack) {
  half_way(30'000);
  decode->signal(SIGKILL);
  const std::string error = prefill->ask("wait 1 25000");
  EXPECT_THAT(error, StartsWith("error"));
  EXPECT_THAT(error, HasSubstr(decode->name()));
  EXPECT_THAT(prefill->ask("push 1 4 8"), StartsWith("error"));
  EXPECT_EQ(prefill->ask("release 1"), "ok");
  EXPECT_EQ(prefill->ask("wait_free 10000"), "ok");
}

TEST_P(KvProcesses, DecodeKilledWhileTransfersRun) {
  ASSERT_EQ(prefill->ask("admit 1 512"), "ok");
  ASSERT_EQ(decode->ask("expect 1 512 30000 " + prefill->name()), "ok");
  ASSERT_EQ(prefill->ask("asked 1 20000"), "ok");
  ASSERT_EQ(prefill->ask("push 1 0 8"), "ok");  // 64 MiB are on their way or just arrived
  decode->signal(SIGKILL);
  // Where all had arrived the death is no failure, and the request goes on until it is finished.
  EXPECT_THAT(prefill->ask("finish 1"), ::testing::AnyOf("ok", StartsWith("error")));
  ASSERT_EQ(prefill->ask("release 1"), "ok");
  EXPECT_EQ(prefill->ask("wait_free 20000"), "ok");
}

TEST_P(KvProcesses, PrefillKilledWhileTransfersRun) {
  ASSERT_EQ(prefill->ask("admit 1 512"), "ok");
  ASSERT_EQ(decode->ask("expect 1 512 30000 " + prefill->name()), "ok");
  ASSERT_EQ(prefill->ask("push 1 0 7"), "ok");  // never complete
  prefill->signal(SIGKILL);
  // It may die before decode could ask it: then nobody answers at its address.
  EXPECT_THAT(decode->ask("wait 1 25000"),
              ::testing::AnyOf(StartsWith("error peer lost"), StartsWith("error unreachable")));
  ASSERT_EQ(decode->ask("release 1"), "ok");
  ASSERT_EQ(decode->ask("wait_free 20000"), "ok");
  ASSERT_EQ(decode->ask("poison 90"), "ok");
  EXPECT_EQ(decode->ask("check 90"), "ok");
}

TEST_P(KvProcesses, AStoppedPrefillIsABoundedError) {
  half_way(5'000);
  prefill->signal(SIGSTOP);
  const std::string error = decode->ask("wait 1 30000");
  EXPECT_THAT(error, StartsWith("error deadline"));
  EXPECT_THAT(error, HasSubstr("request 1 expired: layer 4 of 8"));
  EXPECT_THAT(error, HasSubstr(prefill->name()));
  ASSERT_EQ(decode->ask("release 1"), "ok");
  prefill->signal(SIGKILL);
  EXPECT_EQ(decode->ask("wait_free 20000"), "ok");
}

// The name that decode dials is not the one that prefill gives itself.
TEST_P(KvProcesses, AStoppedPrefillOfAnotherSpellingKeepsItsPagesWithoutProof) {
  const std::string name = prefill->name();
  half_way(5'000, "localhost" + name.substr(name.rfind(':')));
  prefill->signal(SIGSTOP);
  EXPECT_THAT(decode->ask("wait 1 30000"), StartsWith("error deadline"));
  ASSERT_EQ(decode->ask("release 1"), "ok");
  // One that copies by itself proves nothing while it is stopped; a connection can be cut.
  EXPECT_EQ(decode->ask("quarantined"), GetParam() == "shm" ? "512" : "0");
  prefill->signal(SIGCONT);
  EXPECT_EQ(decode->ask("wait_free 30000"), "ok");
  ASSERT_EQ(decode->ask("poison 90"), "ok");
  EXPECT_THAT(prefill->ask("push 1 4 8"), StartsWith("error"));
  EXPECT_EQ(decode->ask("check 90"), "ok");
}

TEST_P(KvProcesses, ASenderKilledBeforeItOpenedDecodeIsLost) {
  const auto mute = make("decode");  // takes tickets like any engine, and does nothing with them
  ASSERT_EQ(decode->ask("expect 1 512 55000 " + mute->name()), "ok");
  ASSERT_EQ(mute->ask("hear kv.sender 20000"), "ok");
  mute->signal(SIGKILL);
  const std::string error = decode->ask("wait 1 40000");
  EXPECT_THAT(error, StartsWith("error peer lost"));
  EXPECT_THAT(error, HasSubstr(mute->name()));
  // It may die before decode has heard that the ticket came.
  EXPECT_THAT(error, ::testing::AnyOf(HasSubstr("layer 0 of 8"), HasSubstr("asking sender")));
  ASSERT_EQ(decode->ask("release 1"), "ok");
  EXPECT_EQ(decode->ask("wait_free 0"), "ok");
}

TEST_P(KvProcesses, APrefillThatWakesUpDoesNotWriteIntoReusedPages) {
  half_way(5'000);
  prefill->signal(SIGSTOP);
  EXPECT_THAT(decode->ask("wait 1 30000"), StartsWith("error deadline"));
  ASSERT_EQ(decode->ask("release 1"), "ok");
  prefill->signal(SIGCONT);
  EXPECT_EQ(decode->ask("wait_free 30000"), "ok");
  ASSERT_EQ(decode->ask("poison 90"), "ok");
  EXPECT_THAT(prefill->ask("push 1 4 8"), StartsWith("error"));
  EXPECT_EQ(decode->ask("check 90"), "ok");
}

TEST_P(KvProcesses, AbortByDecodeLeavesPoisonedPagesAlone) {
  half_way(30'000);
  ASSERT_EQ(prefill->ask("push 1 4 7"), "ok");
  ASSERT_EQ(decode->ask("abort 1"), "ok");
  EXPECT_THAT(decode->ask("wait 1 20000"), StartsWith("error cancelled"));
  ASSERT_EQ(decode->ask("release 1"), "ok");
  ASSERT_EQ(decode->ask("wait_free 20000"), "ok");
  ASSERT_EQ(decode->ask("poison 90"), "ok");
  EXPECT_THAT(prefill->ask("wait 1 20000"), StartsWith("error"));
  ASSERT_EQ(prefill->ask("release 1"), "ok");
  ASSERT_EQ(prefill->ask("wait_free 20000"), "ok");
  ASSERT_EQ(prefill->ask("poison 165"), "ok");
  ASSERT_EQ(prefill->ask("close"), "ok");
  EXPECT_EQ(decode->ask("check 90"), "ok");
}

TEST_P(KvProcesses, AbortByPrefillLeavesPoisonedPagesAlone) {
  half_way(30'000);
  ASSERT_EQ(prefill->ask("push 1 4 7"), "ok");
  ASSERT_EQ(prefill->ask("abort 1"), "ok");
  EXPECT_THAT(decode->ask("wait 1 20000"), HasSubstr("told to"));
  ASSERT_EQ(decode->ask("release 1"), "ok");
  ASSERT_EQ(decode->ask("wait_free 20000"), "ok");
  ASSERT_EQ(decode->ask("poison 90"), "ok");
  ASSERT_EQ(prefill->ask("close"), "ok");
  EXPECT_EQ(decode->ask("check 90"), "ok");
}

TEST_P(KvProcesses, ARestartedPrefillServesTheNextRequest) {
  half_way(30'000);
  prefill->signal(SIGKILL);
  EXPECT_THAT(decode->ask("wait 1 25000"), StartsWith("error peer lost"));
  ASSERT_EQ(decode->ask("release 1"), "ok");
  prefill = make("prefill");
  half_way(30'000);
  ASSERT_EQ(prefill->ask("push 1 4 8"), "ok");
  EXPECT_EQ(decode->ask("wait 1 20000"), "ok");
  EXPECT_EQ(decode->ask("verify 1"), "ok");
}

INSTANTIATE_TEST_SUITE_P(Over, KvProcesses, testing::Values("shm", "tcp"),
                         [](const auto& test) { return test.param; });

struct Reslice {
  std::uint32_t prefill_tp, decode_tp;
  bool block_first;
};

class KvReslice : public testing::TestWithParam<Reslice> {};

TEST_P(KvReslice, EndToEnd) {
  const Reslice& r = GetParam();
  const auto make = [&](const char* role, std::uint32_t tp, std::uint32_t rank, bool block_first) {
    return std::make_unique<KvWorker>(KvWorkerOptions{.role = role,
                                                      .shape = "layers=3,heads=8,dim=32,dtype=2",
                                                      .num_pages = 32,
                                                      .tp_size = tp,
                                                      .tp_rank = rank,
                                                      .block_first = block_first});
  };
  std::vector<std::unique_ptr<KvWorker>> prefill, decode;
  std::string senders;
  for (std::uint32_t rank = 0; rank < r.prefill_tp; ++rank) {
    prefill.push_back(make("prefill", r.prefill_tp, rank, r.block_first));
    senders += " " + prefill.back()->name();
    ASSERT_EQ(prefill.back()->ask("admit 9 20"), "ok");
  }
  for (std::uint32_t rank = 0; rank < r.decode_tp; ++rank) {
    decode.push_back(make("decode", r.decode_tp, rank, !r.block_first));
    ASSERT_EQ(decode.back()->ask("expect 9 20 30000" + senders), "ok");
  }
  for (auto& worker : prefill)
    ASSERT_EQ(worker->ask("push 9 0 3"), "ok");
  for (auto& worker : prefill)
    ASSERT_EQ(worker->ask("finish 9"), "ok");
  for (auto& worker : decode) {
    EXPECT_EQ(worker->ask("wait 9 25000"), "ok");
    EXPECT_EQ(worker->ask("verify 9"), "ok");
  }
  for (auto& worker : prefill)
    EXPECT_EQ(worker->ask("wait 9 20000"), "ok");
}

INSTANTIATE_TEST_SUITE_P(
    Tp, KvReslice, testing::Values(Reslice{4, 2, false}, Reslice{2, 4, true}, Reslice{1, 8, false}),
    [](const auto& test) {
      return std::to_string(test.param.prefill_tp) + "to" + std::to_string(test.param.decode_tp);
    });

}  // namespace
}  // namespace crossdock::multiproc

int main(int argc, char** argv) {
  if (crossdock::multiproc::is_kv_worker(argc, argv))
    return crossdock::multiproc::kv_worker_main(argc, argv);
  signal(SIGPIPE, SIG_IGN);  // a killed child's stdin
  testing::InitGoogleMock(&argc, argv);
  return RUN_ALL_TESTS();
}
