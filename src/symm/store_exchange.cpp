// Each call is one gathering of the store, `name/0`, `name/1`, ... Who gets through call n has read
// all parts of the calls before, and so has everybody whose part it found: the member's own part of
// call n - 1 can go. What stays behind in the store is one entry a member.
// SPDX-License-Identifier: Apache-2.0
#include "symm/store_exchange.hpp"

#include <fmt/format.h>
#include <utility>

namespace crossdock::symm {
namespace {

constexpr std::size_t kMaxNameBytes = 256;

class StoreExchange final : public Exchange {
 public:
  StoreExchange(std::shared_ptr<rendezvous::Store> store, std::string name, Membership membership)
      : store_(std::move(store)), name_(std::move(name)), membership_(membership) {}

  Membership membership() const override { return membership_; }
  std::string describe() const override {
    return fmt::format("store {}, name {}", store_->describe(), name_);
  }
  Result<std::vector<std::string>> all_gather(std::string_view bytes, Deadline deadline) override {
    const rendezvous::Gathering gathering{.name = fmt::format("{}/{}", name_, calls_),
                                          .rank = membership_.member,
                                          .world = membership_.members,
                                          .noun = "processes"};
    CROSSDOCK_TRY(all, rendezvous::all_gather(*store_, gathering, bytes, deadline));
    if (calls_ > 0)
      (void)store_->remove(fmt::format("{}/{}/{}", name_, calls_ - 1, membership_.member),
                           earlier(deadline, Deadline::in(std::chrono::seconds(1))));
    ++calls_;
    return all;
  }

 private:
  std::shared_ptr<rendezvous::Store> store_;
  std::string name_;
  Membership membership_;
  std::uint64_t calls_ = 0;
};

}  // namespace

Result<std::shared_ptr<Exchange>> make_store_exchange(std::shared_ptr<rendezvous::Store> store,
                                                      std::string name, Membership membership) {
  if (name.empty() || name.size() > kMaxNameBytes)
    return invalid_argument(fmt::format("the name of a group must have 1 to {} bytes, not {}",
                                        kMaxNameBytes, name.size()));
  if (membership.member >= membership.members)
    return invalid_argument(fmt::format("member {} of {} processes: members are numbered from 0",
                                        membership.member, membership.members));
  return std::shared_ptr<Exchange>(
      std::make_shared<StoreExchange>(std::move(store), std::move(name), membership));
}

inline namespace v1 {

Result<std::shared_ptr<Exchange>> open_store_exchange(std::string_view url, std::string_view name,
                                                      Membership membership, Deadline deadline) {
  CROSSDOCK_TRY(store, rendezvous::open_store(url, deadline));
  return make_store_exchange(std::move(store), std::string(name), membership);
}

}  // namespace v1
}  // namespace crossdock::symm
