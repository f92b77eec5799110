// Who may work on something that has a name, one at a time: opening a peer, setting up an instance.
// Others wait for it until their deadline. Thread-safe.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <condition_variable>
#include <fmt/format.h>
#include <mutex>
#include <set>
#include <string>
#include <utility>

#include <crossdock/core/deadline.hpp>
#include <crossdock/core/result.hpp>

namespace crossdock::transfer::detail {

class Claims {
 public:
  // Gives the name back when destroyed.
  class Claim {
   public:
    Claim(Claims& claims, std::string name) : claims_(&claims), name_(std::move(name)) {}
    Claim(Claim&& other) noexcept
        : claims_(std::exchange(other.claims_, nullptr)), name_(std::move(other.name_)) {}
    Claim& operator=(Claim&&) = delete;
    ~Claim() {
      if (claims_ != nullptr) claims_->give_back(name_);
    }

   private:
    Claims* claims_;
    std::string name_;
  };

  // kDeadline when another has it until then; the sentence says what for, by `doing`.
  Result<Claim> take(const std::string& name, Deadline deadline, std::string_view doing) {
    std::unique_lock lock(mutex_);
    const bool mine =
        changed_.wait_until(lock, deadline.when(), [&] { return !taken_.contains(name); });
    if (!mine)
      return Error{.code = Code::kDeadline,
                   .retry = Retry::kLater,
                   .message = fmt::format("another thread was still {} '{}'", doing, name)};
    taken_.insert(name);
    return Claim(*this, name);
  }

 private:
  void give_back(const std::string& name) {
    const std::lock_guard lock(mutex_);
    taken_.erase(name);
    changed_.notify_all();
  }

  std::mutex mutex_;
  std::condition_variable changed_;
  std::set<std::string> taken_;
};

}  // namespace crossdock::transfer::detail
