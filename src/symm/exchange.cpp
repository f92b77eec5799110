// Exchanges over functions of the caller. See <crossdock/symm/exchange.hpp>.
// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <cstring>
#include <fmt/format.h>
#include <utility>

#include <crossdock/symm/exchange.hpp>

namespace crossdock::symm {
inline namespace v1 {
namespace {

constexpr std::uint32_t kMaxMembers = 1024;
constexpr std::uint64_t kMaxBytes = std::uint64_t{1} << 20;  // of one member in one call

Result<> check_membership(Membership m) {
  if (m.members != 0 && m.members <= kMaxMembers && m.member < m.members) return {};
  return invalid_argument(
      fmt::format("member {} of {} processes: there must be 1 to {} and the member below that",
                  m.member, m.members, kMaxMembers));
}

// Checks what the caller's function gives: as many parts as members, and this member's own intact.
Result<> check_parts(const std::vector<std::string>& parts, Membership m, std::string_view own) {
  if (parts.size() != m.members)
    return invalid_argument(
        fmt::format("the all-gather returned {} parts for {} members", parts.size(), m.members));
  if (parts[m.member] != own)
    return invalid_argument(fmt::format(
        "the all-gather did not return this member's own bytes as part {}: parts must be ordered "
        "by member and unchanged",
        m.member));
  return {};
}

class FunctionExchange final : public Exchange {
 public:
  FunctionExchange(Membership membership, AllGather all_gather)
      : membership_(membership), all_gather_(std::move(all_gather)) {}
  Membership membership() const override { return membership_; }
  std::string describe() const override { return "an all-gather of the caller"; }
  Result<std::vector<std::string>> all_gather(std::string_view bytes, Deadline deadline) override {
    CROSSDOCK_TRY(parts, all_gather_(bytes, deadline));
    CROSSDOCK_CHECK_OK(check_parts(parts, membership_, bytes));
    return parts;
  }

 private:
  Membership membership_;
  AllGather all_gather_;
};

// Sizes first, then everybody's bytes padded to the longest.
Result<std::vector<std::string>> gather_padded(const FixedAllGather& all_gather, Membership m,
                                               std::string_view bytes, Deadline deadline) {
  const std::uint64_t own = bytes.size();
  std::vector<std::uint64_t> sizes(m.members);
  CROSSDOCK_CHECK_OK(all_gather(&own, sizes.data(), sizeof own, deadline));
  const std::uint64_t longest = *std::max_element(sizes.begin(), sizes.end());
  if (longest > kMaxBytes)
    return make_error(Code::kCorrupt, fmt::format("a member says it sends {} bytes, more than {}",
                                                  longest, kMaxBytes));
  std::string padded(bytes);
  padded.resize(std::max<std::uint64_t>(longest, own));
  std::string all(padded.size() * m.members, '\0');
  CROSSDOCK_CHECK_OK(all_gather(padded.data(), all.data(), padded.size(), deadline));
  std::vector<std::string> parts;
  for (std::uint32_t i = 0; i < m.members; ++i)
    parts.push_back(all.substr(padded.size() * i, sizes[i]));
  return parts;
}

}  // namespace

Result<std::shared_ptr<Exchange>> make_exchange(Membership membership, AllGather all_gather) {
  CROSSDOCK_CHECK_OK(check_membership(membership));
  if (!all_gather) return invalid_argument("make_exchange() needs a function");
  return std::shared_ptr<Exchange>(
      std::make_shared<FunctionExchange>(membership, std::move(all_gather)));
}

Result<std::shared_ptr<Exchange>> make_fixed_exchange(Membership membership,
                                                      FixedAllGather all_gather) {
  if (!all_gather) return invalid_argument("make_fixed_exchange() needs a function");
  return make_exchange(membership, [membership, all_gather = std::move(all_gather)](
                                       std::string_view bytes, Deadline deadline) {
    return gather_padded(all_gather, membership, bytes, deadline);
  });
}

}  // namespace v1
}  // namespace crossdock::symm
