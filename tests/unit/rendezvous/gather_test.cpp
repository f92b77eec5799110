// Gatherings over a store that fails: one that stops answering is named in place of the ranks, and
// an answer that was lost costs nobody its rank.
// SPDX-License-Identifier: Apache-2.0
#include <functional>
#include <gmock/gmock.h>

#include "rendezvous/store.hpp"

namespace crossdock::rendezvous {
namespace {

using namespace std::chrono_literals;
using ::testing::HasSubstr;
using ::testing::Not;

// Passes calls on to a store of this process, unless `before` or `after` says otherwise.
class FaultyStore final : public Store {
 public:
  enum class Call : std::uint8_t { kCompareAndPut, kGet, kWait, kOther };
  using Fault = std::function<std::optional<Error>(Call)>;
  explicit FaultyStore(const char* name)
      : inner(open_store(std::string("inproc://") + name, Deadline::in(5s)).value()) {}
  std::string describe() const override { return "faulty://" + inner->describe(); }

  std::shared_ptr<Store> inner;
  Fault before = [](Call) { return std::nullopt; };  // the call is not executed
  Fault after = [](Call) { return std::nullopt; };   // it is, and its answer is lost

 private:
  template <class Action>
  auto pass(Call call, Action action) -> decltype(action()) {
    if (auto error = before(call)) return std::move(*error);
    auto answer = action();
    if (auto error = after(call)) return std::move(*error);
    return answer;
  }
  Result<> do_put(std::string_view key, std::string_view value, Lease lease, Deadline d) override {
    return pass(Call::kOther, [&] { return inner->put(key, value, lease, d); });
  }
  Result<std::optional<Entry>> do_get(std::string_view key, Deadline d) override {
    return pass(Call::kGet, [&] { return inner->get(key, d); });
  }
  Result<> do_remove(std::string_view key, Deadline d) override {
    return pass(Call::kOther, [&] { return inner->remove(key, d); });
  }
  Result<std::vector<std::string>> do_list(std::string_view prefix, Deadline d) override {
    return pass(Call::kOther, [&] { return inner->list(prefix, d); });
  }
  Result<Entry> do_wait(std::string_view key, Deadline d) override {
    return pass(Call::kWait, [&] { return inner->wait(key, d); });
  }
  Result<bool> do_compare_and_put(std::string_view key, std::uint64_t revision,
                                  std::string_view value, Deadline d) override {
    return pass(Call::kCompareAndPut,
                [&] { return inner->compare_and_put(key, revision, value, d); });
  }
  Result<bool> do_compare_and_remove(std::string_view key, std::uint64_t revision,
                                     Deadline d) override {
    return pass(Call::kOther, [&] { return inner->compare_and_remove(key, revision, d); });
  }
};

Error silence() {
  return make_error(Code::kDeadline, "store tcp://s:7000: s:7000 sent nothing in time");
}
Error closed() {
  return make_error(Code::kPeerLost, "store tcp://s:7000: the server closed the connection");
}

using Call = FaultyStore::Call;

TEST(Gathering, AStoreThatStopsAnsweringIsNamedAndNoRank) {
  FaultyStore store("gather-hangs");
  store.before = [](Call call) {
    return call == Call::kCompareAndPut ? std::nullopt : std::optional(silence());
  };
  const auto all =
      all_gather(store, {.name = "g", .rank = 1, .world = 3}, "x", Deadline::in(100ms));
  ASSERT_EQ(all.code(), Code::kDeadline);
  EXPECT_THAT(all.error().message, HasSubstr("'g'"));
  EXPECT_THAT(all.error().message, HasSubstr("tcp://s:7000"));
  EXPECT_THAT(all.error().message, Not(HasSubstr("did not come")));
}

TEST(Gathering, WhereTheListOfTheMissingEndsForTheStoreIsSaid) {
  FaultyStore store("gather-hangs-later");
  int gets = 0;
  store.before = [&](Call call) {
    return call == Call::kGet && ++gets > 1 ? std::optional(silence()) : std::nullopt;
  };
  const auto all =
      all_gather(store, {.name = "g", .rank = 1, .world = 3}, "x", Deadline::in(100ms));
  ASSERT_EQ(all.code(), Code::kDeadline);
  EXPECT_THAT(all.error().message, HasSubstr("did not come in time: 0; and the rest is unknown"));
  EXPECT_THAT(all.error().message, HasSubstr("tcp://s:7000"));
}

TEST(Gathering, AnAnswerThatWasLostWithItsConnectionIsMadeUpFor) {
  for (const bool executed : {true, false}) {
    FaultyStore store(executed ? "gather-lost-answer" : "gather-lost-request");
    int puts = 0;
    (executed ? store.after : store.before) = [&](Call call) {
      return call == Call::kCompareAndPut && ++puts == 1 ? std::optional(closed()) : std::nullopt;
    };
    const auto all = all_gather(store, {.name = "g"}, "x", Deadline::in(10s));
    ASSERT_TRUE(all.ok()) << all.error().describe();
    EXPECT_EQ(all->front(), "x");
  }
}

TEST(Gathering, ARankThatAnotherHasIsTakenAlsoAfterALostConnection) {
  FaultyStore store("gather-taken");
  ASSERT_TRUE(store.inner->put("g/0", "another's", {}, Deadline::in(5s)).ok());
  int puts = 0;
  store.after = [&](Call call) {
    return call == Call::kCompareAndPut && ++puts == 1 ? std::optional(closed()) : std::nullopt;
  };
  EXPECT_EQ(all_gather(store, {.name = "g"}, "x", Deadline::in(10s)).code(),
            Code::kInvalidArgument);
  EXPECT_EQ(store.inner->get("g/0", Deadline::in(5s)).value()->value, "another's");
}

TEST(Gathering, ANameMayBeUsedAgainAfterAnAnswerThatCameTooLate) {
  FaultyStore store("gather-late");
  int puts = 0;
  store.after = [&](Call call) {
    return call == Call::kCompareAndPut && ++puts == 1 ? std::optional(silence()) : std::nullopt;
  };
  EXPECT_EQ(all_gather(store, {.name = "g"}, "x", Deadline::in(10s)).code(), Code::kDeadline);
  const auto again = all_gather(store, {.name = "g"}, "y", Deadline::in(10s));
  ASSERT_TRUE(again.ok()) << again.error().describe();
  EXPECT_EQ(again->front(), "y");
}

}  // namespace
}  // namespace crossdock::rendezvous
