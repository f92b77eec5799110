// Opening the driver: find the library, ask it for each function by signature version, initialise.
// Runs on whichever thread loads first; a lock keeps two from opening the same library twice.
// SPDX-License-Identifier: Apache-2.0
#include "cuda/driver.hpp"

#include <array>
#include <dlfcn.h>
#include <fmt/format.h>
#include <map>
#include <memory>
#include <mutex>

namespace crossdock::cuda {
namespace {

using GetProcAddress = Status (*)(const char* symbol, void** function, int version,
                                  unsigned long long flags, ProcAddressResult* result);

constexpr std::array<const char*, 4> kUsualPlaces = {
    "libcuda.so.1",
    "/usr/local/nvidia/lib64/libcuda.so.1",
    "/run/opengl-driver/lib/libcuda.so.1",
    "/usr/lib/wsl/lib/libcuda.so.1",
};

enum class Need { kRequired, kOptional };

struct Opened {
  void* handle;
  std::string path;
};

Result<Opened> open_library(const DriverOptions& options) {
  std::string first_reason;
  const auto attempt = [&](const char* path) {
    void* handle = ::dlopen(path, RTLD_NOW | RTLD_LOCAL);
    if (!handle && first_reason.empty()) first_reason = ::dlerror();
    return handle;
  };
  if (!options.library.empty()) {
    if (void* handle = attempt(options.library.c_str())) return Opened{handle, options.library};
    return make_error(
        Code::kUnsupported,
        fmt::format(
            "cannot open the CUDA driver {}: {}; correct cuda.driver (CROSSDOCK_CUDA_DRIVER) "
            "or leave it empty to search the usual places",
            options.library, first_reason));
  }
  for (const char* path : kUsualPlaces)
    if (void* handle = attempt(path)) return Opened{handle, path};
  return make_error(
      Code::kUnsupported,
      fmt::format("no CUDA driver on this machine ({}); install the NVIDIA driver, or start the "
                  "container with its GPUs (--gpus all), or name the library in cuda.driver "
                  "(CROSSDOCK_CUDA_DRIVER)",
                  first_reason));
}

Error too_old(const std::string& library, std::string_view detail) {
  return make_error(
      Code::kUnsupported,
      fmt::format(
          "the CUDA driver {} is too old: {}; Crossdock needs one for CUDA {} or newer "
          "(R525): update the NVIDIA driver, or use a newer container image with its compat "
          "libraries",
          library, detail, version_text(kOldestDriverVersion)));
}

// One entry of the table. The result stays null for an optional function the driver lacks.
Result<void*> resolve(GetProcAddress get, const std::string& library, const char* name, int version,
                      Need need) {
  void* function = nullptr;
  ProcAddressResult result{};
  const Status status = get(name, &function, version, kProcAddressLegacyStream, &result);
  if (status == Status::kSuccess && result == ProcAddressResult::kSuccess && function)
    return function;
  if (need == Need::kOptional) return static_cast<void*>(nullptr);
  return too_old(library, fmt::format("it has no {} of CUDA {}", name, version_text(version)));
}

Result<void> fill_table(Driver& driver, GetProcAddress get) {
#define CROSSDOCK_CUDA_FUNCTION(name, since, need, parameters)                       \
  {                                                                                  \
    CROSSDOCK_TRY(function, resolve(get, driver.library, #name, since, Need::need)); \
    driver.name = reinterpret_cast<Status(*) parameters>(function);                  \
  }
#include "cuda/driver_table.def"
#undef CROSSDOCK_CUDA_FUNCTION
  return {};
}

Result<std::unique_ptr<Driver>> open_driver(const DriverOptions& options) {
  CROSSDOCK_TRY(opened, open_library(options));
  auto driver = std::make_unique<Driver>();
  driver->library = opened.path;
  const auto get = reinterpret_cast<GetProcAddress>(::dlsym(opened.handle, "cuGetProcAddress_v2"));
  if (!get) return too_old(opened.path, "it has no cuGetProcAddress_v2");
  CROSSDOCK_CHECK_OK(fill_table(*driver, get));
  CROSSDOCK_CHECK_OK(driver->check(driver->cuInit(0), fmt::format("cuInit of {}", opened.path)));
  CROSSDOCK_CHECK_OK(
      driver->check(driver->cuDriverGetVersion(&driver->version), "ask the driver's version"));
  if (driver->version < kOldestDriverVersion)
    return too_old(opened.path, fmt::format("it speaks CUDA {}", version_text(driver->version)));
  return driver;
}

// The loaded drivers by library. Leaked on purpose: threads of the host process may still call the
// driver while statics are destroyed.
struct Loaded {
  std::mutex mutex;
  std::map<std::string, std::unique_ptr<const Driver>> drivers;
};
Loaded& loaded() {
  static auto* const instance = new Loaded;
  return *instance;
}

}  // namespace

Result<const Driver*> Driver::load(const DriverOptions& options) {
  auto& all = loaded();
  const std::lock_guard lock(all.mutex);
  if (const auto found = all.drivers.find(options.library); found != all.drivers.end())
    return found->second.get();
  CROSSDOCK_TRY(driver, open_driver(options));
  const Driver* const result = driver.get();
  all.drivers.emplace(options.library, std::move(driver));
  return result;
}

std::string Driver::describe(Status status) const {
  const char* name = nullptr;
  const char* text = nullptr;
  if (cuGetErrorName(status, &name) != Status::kSuccess || !name) name = "unknown CUDA error";
  if (cuGetErrorString(status, &text) != Status::kSuccess || !text)
    return fmt::format("{} ({})", name, static_cast<int>(status));
  return fmt::format("{}: {}", name, text);
}

Error Driver::error(Status status, std::string_view what, std::source_location where) const {
  const StatusClass kind = classify(status);
  std::string message = fmt::format("{}: {}", what, describe(status));
  if (!kind.hint.empty()) message += fmt::format("; {}", kind.hint);
  return Error{.code = kind.code,
               .scope = kind.scope,
               .retry = kind.retry,
               .native = {Native::Domain::kCuda, static_cast<int>(status)},
               .message = std::move(message),
               .where = where};
}

Result<void> Driver::check(Status status, std::string_view what, std::source_location where) const {
  if (status == Status::kSuccess) return {};
  return error(status, what, where);
}

}  // namespace crossdock::cuda
