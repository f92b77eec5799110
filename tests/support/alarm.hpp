// Alarm: ends the process when its scope takes longer, where a wait that must not be could not be
// cut short in another way. One at a time in a process.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <chrono>
#include <unistd.h>

namespace crossdock::support {

class Alarm {
 public:
  explicit Alarm(std::chrono::seconds most) { ::alarm(static_cast<unsigned>(most.count())); }
  ~Alarm() { ::alarm(0); }
  Alarm(const Alarm&) = delete;
  Alarm& operator=(const Alarm&) = delete;
};

}  // namespace crossdock::support
