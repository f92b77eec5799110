// file:///directory: one file a key in a directory that processes share. A change is written to a
// side file and renamed while a lock on `.lock` is held, so that readers see whole values only; the
// lock file also counts revisions. Waiting uses inotify, and looks again now and then where that
// does not work (network file systems). Thread-safe: each call opens what it needs.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <memory>
#include <string_view>

#include "rendezvous/store.hpp"

namespace crossdock::rendezvous {

// `path` must be absolute; its last component is made when it is missing.
Result<std::shared_ptr<Store>> open_file_store(std::string_view path, Deadline deadline);

}  // namespace crossdock::rendezvous
