// Opening the driver, its refusals, its error texts; devices, contexts, peers.
// SPDX-License-Identifier: Apache-2.0
#include "cuda/driver.hpp"

#include <filesystem>
#include <fstream>
#include <gmock/gmock.h>
#include <thread>
#include <unistd.h>

#include "support/fake_cuda/fixture.hpp"

namespace crossdock::cuda {
namespace {

using crossdock::testing::FakeCuda;
using crossdock::testing::FakeCudaTest;
using crossdock::testing::open_fake_cuda;
using ::testing::HasSubstr;

// A copy of the fake under its own name is a driver of its own, not loaded before.
class FreshFake : public ::testing::Test {
 protected:
  void SetUp() override {
    static int count = 0;
    path_ = std::filesystem::temp_directory_path() /
            ("crossdock_fake_cuda_" + std::to_string(::getpid()) + "_" + std::to_string(count++));
    std::filesystem::copy_file(CROSSDOCK_FAKE_CUDA, path_);
    fake_ = open_fake_cuda(path_.c_str());
    ASSERT_NE(fake_, nullptr);
  }
  void TearDown() override { std::filesystem::remove(path_); }
  Result<const Driver*> load() const { return Driver::load({.library = path_.string()}); }
  std::filesystem::path path_;
  FakeCuda* fake_ = nullptr;
};

TEST_F(FreshFake, LoadsOnceAndIsShared) {
  const auto first = load();
  ASSERT_TRUE(first.ok()) << first.error().describe();
  EXPECT_EQ((*first)->version, 13000);
  EXPECT_EQ((*first)->library, path_.string());
  EXPECT_EQ(*load(), *first);
  EXPECT_EQ(fake_->calls("cuInit"), 1);
}

TEST_F(FreshFake, ManyThreadsGetTheSameDriver) {
  std::vector<const Driver*> seen(8, nullptr);
  std::vector<std::thread> threads;
  for (auto& slot : seen)
    threads.emplace_back([&] { slot = load().value(); });
  for (auto& thread : threads)
    thread.join();
  for (const auto* driver : seen)
    EXPECT_EQ(driver, seen[0]);
  EXPECT_EQ(fake_->calls("cuInit"), 1);
}

TEST_F(FreshFake, MissingRequiredFunctionIsNamedAndAFailureIsNotRemembered) {
  fake_->hide("cuLaunchKernelEx");
  const auto driver = load();
  ASSERT_FALSE(driver.ok());
  EXPECT_EQ(driver.code(), Code::kUnsupported);
  EXPECT_THAT(driver.error().message, HasSubstr("has no cuLaunchKernelEx of CUDA 11.6"));
  EXPECT_THAT(driver.error().message, HasSubstr("update the NVIDIA driver"));
  fake_->reset();
  EXPECT_TRUE(load().ok());
}

TEST_F(FreshFake, MissingOptionalFunctionIsNull) {
  fake_->hide("cuMemGetHandleForAddressRange");
  const auto driver = load();
  ASSERT_TRUE(driver.ok());
  EXPECT_EQ((*driver)->cuMemGetHandleForAddressRange, nullptr);
  EXPECT_FALSE(query_device(**driver, 0)->dma_buf);
}

TEST_F(FreshFake, OldDriverIsRefusedWithBothVersions) {
  fake_->set_version(11080);
  const auto driver = load();
  ASSERT_FALSE(driver.ok());
  EXPECT_EQ(driver.code(), Code::kUnsupported);
  EXPECT_THAT(driver.error().message, HasSubstr("speaks CUDA 11.8"));
  EXPECT_THAT(driver.error().message, HasSubstr("CUDA 12.0 or newer"));
}

TEST_F(FreshFake, NoGpuIsUnsupportedAndKeepsTheDriversCode) {
  fake_->set_device_count(0);
  const auto driver = load();
  ASSERT_FALSE(driver.ok());
  EXPECT_EQ(driver.code(), Code::kUnsupported);
  EXPECT_EQ(driver.error().native, (Native{Native::Domain::kCuda, 100}));
  EXPECT_THAT(driver.error().message, HasSubstr("CUDA_ERROR_NO_DEVICE: no CUDA-capable device"));
  EXPECT_THAT(driver.error().message, HasSubstr("CUDA_VISIBLE_DEVICES"));
}

TEST_F(FreshFake, FabricManagerMissingNamesTheRemedy) {
  fake_->fail({.function = "cuInit", .status = Status::kSystemNotReady});
  EXPECT_THAT(load().error().message, HasSubstr("nvidia-fabricmanager"));
}

TEST(DriverLoad, MissingLibraryNamesTheRemedies) {
  const auto driver = Driver::load({.library = "/nonexistent/libcuda.so.1"});
  ASSERT_FALSE(driver.ok());
  EXPECT_EQ(driver.code(), Code::kUnsupported);
  EXPECT_THAT(driver.error().message, HasSubstr("/nonexistent/libcuda.so.1"));
  EXPECT_THAT(driver.error().message, HasSubstr("CROSSDOCK_CUDA_DRIVER"));
}

TEST(DriverLoad, LibraryThatIsNoDriverIsRefused) {
  const auto driver = Driver::load({.library = "libm.so.6"});
  ASSERT_FALSE(driver.ok());
  EXPECT_EQ(driver.code(), Code::kUnsupported);
  EXPECT_THAT(driver.error().message, HasSubstr("cuGetProcAddress_v2"));
}

TEST(StatusClass, TellsDamageAndRetry) {
  EXPECT_EQ(classify(Status::kOutOfMemory).code, Code::kNoMemory);
  EXPECT_EQ(classify(Status::kOutOfMemory).retry, Retry::kLater);
  EXPECT_EQ(classify(Status::kIllegalAddress).scope, Scope::kDevice);
  EXPECT_EQ(classify(Status::kLaunchFailed).scope, Scope::kDevice);
  EXPECT_EQ(classify(Status::kInvalidValue).code, Code::kInvalidArgument);
  EXPECT_EQ(classify(Status::kStreamCaptureImplicit).code, Code::kInvalidArgument);
  EXPECT_EQ(classify(Status::kPeerAccessUnsupported).code, Code::kUnreachable);
  EXPECT_EQ(classify(static_cast<Status>(12345)).code, Code::kInternal);
}

using DriverErrors = FakeCudaTest;

TEST_F(DriverErrors, CarryNameTextAndUnknownNumbers) {
  EXPECT_EQ(driver_->describe(Status::kOutOfMemory), "CUDA_ERROR_OUT_OF_MEMORY: out of memory");
  EXPECT_EQ(driver_->describe(static_cast<Status>(12345)), "unknown CUDA error (12345)");
  const Error error = driver_->error(Status::kIllegalAddress, "wait for kernel fill");
  EXPECT_EQ(error.native, (Native{Native::Domain::kCuda, 700}));
  EXPECT_THAT(error.message, HasSubstr("wait for kernel fill: CUDA_ERROR_ILLEGAL_ADDRESS: an "));
  EXPECT_THAT(error.message, HasSubstr("restart the process"));
}

using Devices = FakeCudaTest;

TEST_F(Devices, AreDescribed) {
  const auto devices = query_devices(*driver_);
  ASSERT_TRUE(devices.ok()) << devices.error().describe();
  ASSERT_EQ(devices->size(), 4u);
  const Device& device = (*devices)[3];
  EXPECT_EQ(device.ordinal, 3);
  EXPECT_EQ(device.name, "Fake GPU");
  EXPECT_EQ(device.sm(), 90);
  EXPECT_EQ(device.num_sms, 132);
  EXPECT_EQ(device.pci_id, "0000:1d:00.0");
  EXPECT_EQ(device.uuid, "GPU-fa000000-0000-0000-0000-000000000003");
  EXPECT_EQ(device.numa_node, 1);
  EXPECT_EQ(device.memory_bytes, std::uint64_t{1} << 30);
  EXPECT_TRUE(device.vmm);
  EXPECT_FALSE(device.fabric_handles);
}

TEST_F(Devices, WrongOrdinalNamesTheCount) {
  for (const int ordinal : {-1, 4}) {
    const auto device = query_device(*driver_, ordinal);
    EXPECT_EQ(device.code(), Code::kInvalidArgument);
    EXPECT_THAT(device.error().message, HasSubstr("sees 4 GPU(s)"));
  }
}

using Contexts = FakeCudaTest;

TEST_F(Contexts, GuardRestoresWhatWasCurrent) {
  const Context a = context(0);
  const Context b = context(1);
  ContextHandle current = nullptr;
  {
    const auto outer = a.enter();
    {
      const auto inner = b.enter();
      driver_->cuCtxGetCurrent(&current);
      EXPECT_EQ(current, b.handle());
    }
    driver_->cuCtxGetCurrent(&current);
    EXPECT_EQ(current, a.handle());
    const auto again = a.enter();  // current already: nothing is pushed
    EXPECT_EQ(fake_->calls("cuCtxPushCurrent"), 2);
  }
  driver_->cuCtxGetCurrent(&current);
  EXPECT_EQ(current, nullptr);
}

TEST_F(Contexts, LastHandleReleases) {
  auto a = std::make_unique<Context>(context(2));
  const auto copy = std::make_unique<Context>(*a);
  a.reset();
  EXPECT_EQ(fake_->calls("cuDevicePrimaryCtxRelease"), 0);
  EXPECT_EQ(copy->memory_info()->total_bytes, std::size_t{1} << 30);
}

using Peers = FakeCudaTest;

TEST_F(Peers, EnablingTwiceIsNoError) {
  const Context a = context(0);
  const Context b = context(1);
  EXPECT_TRUE(enable_peer_access(a, b).ok());
  EXPECT_TRUE(enable_peer_access(a, b).ok());
  EXPECT_TRUE(enable_peer_access(a, a).ok());
  EXPECT_EQ(fake_->calls("cuCtxEnablePeerAccess"), 2);
}

TEST_F(Peers, ImpossibleAccessNamesBothGpus) {
  fake_->set_peer_access(0, 1, false);
  const auto result = enable_peer_access(context(0), context(1));
  EXPECT_EQ(result.code(), Code::kUnreachable);
  EXPECT_THAT(result.error().message, HasSubstr("GPU 0 (0000:1a:00.0)"));
  EXPECT_THAT(result.error().message, HasSubstr("GPU 1 (0000:1b:00.0)"));
  EXPECT_FALSE(query_peer_access(*driver_, 0, 1)->supported);
  EXPECT_TRUE(query_peer_access(*driver_, 1, 0)->native_atomics);
}

}  // namespace
}  // namespace crossdock::cuda
