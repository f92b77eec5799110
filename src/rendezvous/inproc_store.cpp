// Named in-process stores. The registry holds weak references only.
// SPDX-License-Identifier: Apache-2.0
#include "rendezvous/inproc_store.hpp"

#include <condition_variable>
#include <fmt/format.h>
#include <mutex>

#include "rendezvous/key_table.hpp"
#include "wire/codec.hpp"

namespace crossdock::rendezvous {
namespace {

KeyTable::Time now() {
  return Deadline::Clock::now();
}

class InprocStore final : public Store {
 public:
  explicit InprocStore(std::string_view name) : name_(name) {}
  std::string describe() const override { return "inproc://" + name_; }

 private:
  Result<> do_put(std::string_view key, std::string_view value, Lease lease, Deadline) override {
    const std::lock_guard lock(mutex_);
    CROSSDOCK_CHECK_OK(table_.put(key, value, lease, now()));
    changed_.notify_all();
    return {};
  }
  Result<std::optional<Entry>> do_get(std::string_view key, Deadline) override {
    const std::lock_guard lock(mutex_);
    const Entry* entry = table_.get(key, now());
    return entry == nullptr ? std::optional<Entry>{} : std::optional<Entry>(*entry);
  }
  Result<> do_remove(std::string_view key, Deadline) override {
    const std::lock_guard lock(mutex_);
    table_.remove(key);
    return {};
  }
  Result<std::vector<std::string>> do_list(std::string_view prefix, Deadline) override {
    const std::lock_guard lock(mutex_);
    return table_.list(prefix, now());
  }
  Result<Entry> do_wait(std::string_view key, Deadline deadline) override {
    std::unique_lock lock(mutex_);
    for (;;) {
      if (const Entry* entry = table_.get(key, now())) return *entry;
      if (deadline.passed())
        return make_error(Code::kDeadline,
                          fmt::format("nobody put key {} into {} in time",
                                      wire::quote_bytes(wire::as_bytes(key), 80), describe()));
      changed_.wait_until(lock, deadline.when());
    }
  }
  Result<bool> do_compare_and_put(std::string_view key, std::uint64_t expected_revision,
                                  std::string_view value, Deadline) override {
    const std::lock_guard lock(mutex_);
    CROSSDOCK_TRY(revision, table_.compare_and_put(key, expected_revision, value, now()));
    if (revision) changed_.notify_all();
    return revision.has_value();
  }
  Result<bool> do_compare_and_remove(std::string_view key, std::uint64_t expected_revision,
                                     Deadline) override {
    const std::lock_guard lock(mutex_);
    return table_.compare_and_remove(key, expected_revision, now());
  }

  std::string name_;
  std::mutex mutex_;  // guards table_
  std::condition_variable changed_;
  KeyTable table_;
};

struct Registry {
  std::mutex mutex;
  std::map<std::string, std::weak_ptr<InprocStore>, std::less<>> stores;
};

// Never destroyed: a handle may outlive static destruction.
Registry& registry() {
  static auto* const instance = new Registry;
  return *instance;
}

}  // namespace

std::shared_ptr<Store> open_inproc_store(std::string_view name) {
  Registry& reg = registry();
  const std::lock_guard lock(reg.mutex);
  auto& slot = reg.stores[std::string(name)];
  if (auto existing = slot.lock()) return existing;
  const auto forget = [key = std::string(name)](InprocStore* store) {
    delete store;
    Registry& r = registry();
    const std::lock_guard guard(r.mutex);
    // Another store may have taken the name since the last handle went.
    const auto it = r.stores.find(key);
    if (it != r.stores.end() && it->second.expired()) r.stores.erase(it);
  };
  std::shared_ptr<InprocStore> store(new InprocStore(name), forget);
  slot = store;
  return store;
}

std::size_t num_inproc_stores() {
  Registry& reg = registry();
  const std::lock_guard lock(reg.mutex);
  return reg.stores.size();
}

}  // namespace crossdock::rendezvous
