// Exchange: how the processes of a symmetric group tell each other things while it is made or
// reset. One member is one process; all a group needs is "all-gather of bytes". Three ways to have
// one: over a metadata store, over a caller's all-gather of strings, or over an all-gather of
// equally large buffers, which is what MPI_Allgather and torch's all_gather_into_tensor are.
// A single process needs none. Calls are collective: every member makes them in the same order, one
// at a time. SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include <crossdock/core/deadline.hpp>
#include <crossdock/core/export.hpp>
#include <crossdock/core/result.hpp>

namespace crossdock::symm {
inline namespace v1 {

// Which of how many processes this one is.
struct Membership {
  std::uint32_t member = 0;
  std::uint32_t members = 1;
};

class Exchange {
 public:
  virtual ~Exchange() = default;
  [[nodiscard]] virtual Membership membership() const = 0;
  // Every member's bytes, by member. Ends by the deadline; kDeadline should name who did not come.
  // After an error the exchange is not used again.
  virtual Result<std::vector<std::string>> all_gather(std::string_view bytes,
                                                      Deadline deadline) = 0;
  // "store tcp://host:2379, name ep0", for messages.
  [[nodiscard]] virtual std::string describe() const = 0;
};

// Over the store at `url` (inproc://, file://, tcp://, http://). `name` is used for one group in
// the life of the store; every member gives the same one.
CROSSDOCK_API Result<std::shared_ptr<Exchange>> open_store_exchange(std::string_view url,
                                                                    std::string_view name,
                                                                    Membership membership,
                                                                    Deadline deadline);

// Over a function of the caller that is an Exchange::all_gather().
using AllGather =
    std::function<Result<std::vector<std::string>>(std::string_view bytes, Deadline deadline)>;
CROSSDOCK_API Result<std::shared_ptr<Exchange>> make_exchange(Membership membership,
                                                              AllGather all_gather);

// Over a function that gathers `bytes` bytes from every member: `send` has `bytes`, `receive` has
// `members * bytes`, by member. Called twice for each all_gather(): for the sizes, then for the
// bytes padded to the longest.
using FixedAllGather =
    std::function<Result<>(const void* send, void* receive, std::size_t bytes, Deadline deadline)>;
CROSSDOCK_API Result<std::shared_ptr<Exchange>> make_fixed_exchange(Membership membership,
                                                                    FixedAllGather all_gather);

}  // namespace v1
}  // namespace crossdock::symm
