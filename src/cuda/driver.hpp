// Driver: the CUDA driver API, opened at run time from driver_table.def. Owns nothing but the
// table; once loaded it is immutable, shared by the whole process and never unloaded (the driver
// keeps threads and state of its own). Thread-safe. Must not be linked to libcuda, nor read the
// environment: which library is opened is an argument.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <source_location>
#include <string>
#include <string_view>

#include <crossdock/core/result.hpp>

#include "cuda/driver_types.hpp"

namespace crossdock::cuda {

// The oldest driver interface in which the whole table exists (R525, December 2022).
inline constexpr int kOldestDriverVersion = 12000;

struct DriverOptions {
  // Path or soname of the driver library; empty: libcuda.so.1 where the loader and the usual
  // container and WSL folders have it.
  std::string library;
};

struct Driver {
#define CROSSDOCK_CUDA_FUNCTION(name, version, need, parameters) Status(*name) parameters = nullptr;
#include "cuda/driver_table.def"
#undef CROSSDOCK_CUDA_FUNCTION

  int version = 0;      // 13000: the newest CUDA the driver speaks
  std::string library;  // what was opened

  // Opens, resolves and initialises the driver; the same library is opened once and shared. Fails
  // with kUnsupported (no driver, too old, no GPU) and a sentence that names the remedies. A
  // failure is not remembered: a later call tries again.
  static Result<const Driver*> load(const DriverOptions& options = {});

  // "CUDA_ERROR_OUT_OF_MEMORY: out of memory"
  [[nodiscard]] std::string describe(Status status) const;

  // The Error of a failed call; `what` says what was being done, with its values.
  [[nodiscard]] Error error(Status status, std::string_view what,
                            std::source_location where = std::source_location::current()) const;
  // Success, or error().
  [[nodiscard]] Result<void> check(
      Status status, std::string_view what,
      std::source_location where = std::source_location::current()) const;
};

// "13.0" from 13000.
[[nodiscard]] std::string version_text(int version);

// What kind of failure a driver status is, what it damages, and whether a retry can help.
// Independent of a loaded driver.
struct StatusClass {
  Code code;
  Scope scope;
  Retry retry;
  std::string_view hint;  // a remedy for a person, may be empty
};
[[nodiscard]] StatusClass classify(Status status) noexcept;

}  // namespace crossdock::cuda

// `CROSSDOCK_CUDA(driver, cuMemFree(address), "free device memory");`: calls through the table and
// returns the error from the enclosing function. `what` is evaluated only on failure.
#define CROSSDOCK_CUDA(driver, call, what)                       \
  do {                                                           \
    if (const auto crossdock_status = (driver).call;             \
        crossdock_status != ::crossdock::cuda::Status::kSuccess) \
      return (driver).error(crossdock_status, what);             \
  } while (0)
