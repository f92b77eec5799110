// Settings files: any text either loads or is refused with a sentence. Whatever the first line is
// also goes through the environment.
// SPDX-License-Identifier: Apache-2.0
#include "base/config.hpp"

#include <sys/mman.h>
#include <unistd.h>

#include "fuzz.hpp"

namespace crossdock::fuzz {
namespace {

void run(wire::Bytes input) {
  static const int file = ::memfd_create("settings", MFD_CLOEXEC);
  static const std::string path = "/proc/self/fd/" + std::to_string(file);
  CROSSDOCK_FUZZ_REQUIRE(file >= 0 && ::ftruncate(file, 0) == 0);
  CROSSDOCK_FUZZ_REQUIRE(::pwrite(file, input.data(), input.size(), 0) ==
                         static_cast<ssize_t>(input.size()));
  const std::string line(wire::as_text(input).substr(0, wire::as_text(input).find('\n')));
  const std::string variable = "CROSSDOCK_TRANSFER_SLICE_BYTES=" + std::string(line.c_str());
  const char* const empty[] = {nullptr};
  const char* const environment[] = {variable.c_str(), nullptr};
  const auto from_file = base::Config::load({}, {.environment = empty, .file = path});
  if (!from_file.ok()) CROSSDOCK_FUZZ_REQUIRE(!from_file.error().message.empty());
  const auto from_environment = base::Config::load({}, {.environment = environment});
  if (!from_environment.ok()) CROSSDOCK_FUZZ_REQUIRE(!from_environment.error().message.empty());
}

Seeds seeds() {
  return {"[transfer]\nslice_bytes = \"128KiB\"\ntimeout = \"30s\"\n",
          "128KiB",
          "64KiB\n",
          "[transport]\nenabled = [\"shm\", \"tcp\"]\n",
          "transfer.checksum = true\n",
          "[transfer]\nslice_byte = 1\n",
          "tan\xef\xbb\x9f___\xef\xbb\xbf_.e\n",
          "x = 1979-05-27T07:32:00Z\n[a.b]\nc = { d = [1, 2.5] }\n"};
}

CROSSDOCK_FUZZ_TARGET("config", run, seeds);

}  // namespace
}  // namespace crossdock::fuzz
