// Meaning of the driver's status codes for a server: kind, damage, retry, remedy. No state.
// SPDX-License-Identifier: Apache-2.0
#include "cuda/driver.hpp"

namespace crossdock::cuda {
namespace {

constexpr std::string_view kForkHint =
    "if this process was forked after CUDA was used, start workers by spawn or exec instead";
constexpr std::string_view kStickyHint =
    "the CUDA context of this process is lost: restart the process; the cause is an earlier kernel";

// Failures of a kernel after which every call in the context fails.
bool destroys_context(Status status) noexcept {
  switch (status) {
    case Status::kEccUncorrectable:
    case Status::kNvlinkUncorrectable:
    case Status::kContained:
    case Status::kIllegalAddress:
    case Status::kLaunchTimeout:
    case Status::kAssert:
    case Status::kHardwareStackError:
    case Status::kIllegalInstruction:
    case Status::kMisalignedAddress:
    case Status::kInvalidAddressSpace:
    case Status::kInvalidPc:
    case Status::kLaunchFailed:
      return true;
    default:
      return false;
  }
}

// What the machine or its driver cannot do, with what to do about it.
std::string_view environment_hint(Status status) noexcept {
  switch (status) {
    case Status::kStubLibrary:
      return "the toolkit's stub was opened: take its folder out of LD_LIBRARY_PATH";
    case Status::kCallRequiresNewerDriver:
    case Status::kUnsupportedPtxVersion:
      return "update the NVIDIA driver";
    case Status::kNoDevice:
      return "check nvidia-smi, CUDA_VISIBLE_DEVICES and the container's GPUs";
    case Status::kSystemNotReady:
      return "start the fabric manager (nvidia-fabricmanager)";
    case Status::kSystemDriverMismatch:
      return "the kernel module and libcuda differ: reboot or reinstall the driver";
    case Status::kCompatNotSupportedOnDevice:
      return "remove the CUDA compat libraries from LD_LIBRARY_PATH or update the driver";
    case Status::kNoBinaryForGpu:
      return "the kernel was compiled for another GPU architecture";
    default:
      return {};
  }
}

bool is_capture_error(Status status) noexcept {
  return status >= Status::kStreamCaptureUnsupported && status <= Status::kStreamCaptureWrongThread;
}

StatusClass classify_argument(Status status) noexcept {
  switch (status) {
    case Status::kInvalidDevice:
    case Status::kNotFound:
      return {Code::kNotFound, Scope::kCall, Retry::kNo, {}};
    case Status::kInvalidValue:
    case Status::kInvalidHandle:
    case Status::kInvalidContext:
    case Status::kInvalidClusterSize:
    case Status::kInvalidImage:
    case Status::kInvalidPtx:
    case Status::kHostMemoryAlreadyRegistered:
    case Status::kHostMemoryNotRegistered:
    case Status::kCooperativeLaunchTooLarge:
    case Status::kLaunchOutOfResources:
      return {Code::kInvalidArgument, Scope::kCall, Retry::kNo, {}};
    default:
      return {Code::kInternal, Scope::kCall, Retry::kNo, {}};
  }
}

}  // namespace

StatusClass classify(Status status) noexcept {
  if (destroys_context(status)) return {Code::kInternal, Scope::kDevice, Retry::kNo, kStickyHint};
  if (is_capture_error(status))
    return {Code::kInvalidArgument, Scope::kCall, Retry::kNo,
            "do this before the graph capture begins"};
  if (const auto hint = environment_hint(status); !hint.empty())
    return {Code::kUnsupported, Scope::kDevice, Retry::kNo, hint};
  switch (status) {
    case Status::kSuccess:
      return {Code::kOk, Scope::kCall, Retry::kNo, {}};
    case Status::kOutOfMemory:
      return {Code::kNoMemory, Scope::kCall, Retry::kLater, {}};
    case Status::kNotInitialized:
      return {Code::kUnsupported, Scope::kDevice, Retry::kNo, kForkHint};
    case Status::kDeinitialized:
    case Status::kContextIsDestroyed:
      return {Code::kClosed, Scope::kDevice, Retry::kNo, {}};
    case Status::kDeviceUnavailable:
      return {Code::kBusy, Scope::kDevice, Retry::kLater, {}};
    case Status::kNotReady:
      return {Code::kBusy, Scope::kCall, Retry::kLater, {}};
    case Status::kPeerAccessUnsupported:
    case Status::kTooManyPeers:
    case Status::kPeerAccessNotEnabled:
      return {Code::kUnreachable, Scope::kCall, Retry::kNo, {}};
    case Status::kNotSupported:
      return {Code::kUnsupported, Scope::kCall, Retry::kNo, {}};
    case Status::kNotPermitted:
      return {Code::kDenied, Scope::kCall, Retry::kNo, {}};
    default:
      return classify_argument(status);
  }
}

std::string version_text(int version) {
  return std::to_string(version / 1000) + "." + std::to_string(version % 1000 / 10);
}

}  // namespace crossdock::cuda
