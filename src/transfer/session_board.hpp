// The peers that opened this engine, and the revocations under way: memory that peers were asked to
// let go of, and who has not confirmed yet. State lives on the control loop; revoke() and wait()
// are for any thread.
//
//   session ── its end seen ──> over: kPeerLost, revocations no longer wait for it
//      └── given up by this engine, and the peer copies by itself ──> doubted ── its end seen ──>
//      over
//
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <atomic>
#include <condition_variable>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <string>
#include <vector>

#include "transfer/inbound_session.hpp"

namespace crossdock::transfer::detail {

// One request to let go. Thread-safe.
class Revocation {
 public:
  // True when every peer confirmed or is gone; false when the deadline passed or the engine ended
  // first.
  bool wait(Deadline deadline);
  // Names of the peers that still may touch the memory.
  [[nodiscard]] std::string holders() const;

 private:
  friend class SessionBoard;
  mutable std::mutex mutex_;
  std::condition_variable changed_;
  bool started_ = false;
  bool abandoned_ = false;  // the engine ended before anybody could be asked
  std::map<const InboundSession*, std::string> waiting_for_;
};

class SessionBoard {
 public:
  explicit SessionBoard(EngineCore& engine) : engine_(engine) {}

  // Loop thread.
  void add(std::shared_ptr<InboundSession> session);
  void closed(const std::shared_ptr<InboundSession>& session, const Error& why);
  void acknowledged(const InboundSession& session, std::uint64_t token);
  [[nodiscard]] std::shared_ptr<InboundSession> by_token(std::uint64_t data_token) const;
  // At the end of the engine. `let_go`: every peer has confirmed that it touches nothing any more.
  void close_all(const Error& why, bool let_go);

  // To every session. One that does not take a frame is closed: it would miss what it must know.
  void broadcast(const std::vector<std::vector<std::byte>>& frames);

  // Any thread. Ends the lanes of all sessions, and with them the waiting for peers that have
  // nothing else.
  void cut_lanes(Revocation& revocation);
  // Asks every session to let go of these regions; none named: of all.
  std::shared_ptr<Revocation> revoke(std::vector<std::uint32_t> region_ids);
  // Ends what an engine may do to our memory, and the sessions it has at the call. kDeadline names
  // the proof that is missing. An instance without a session cannot touch anything: ok. A name
  // without one proves nothing, as its owner may be known here by another: kNotFound.
  Result<> fence_instance(std::uint64_t instance, Deadline deadline);
  Result<> fence_name(const std::string& name, Deadline deadline);
  [[nodiscard]] std::size_t size() const { return count_.load(); }
  // Whether the loss of this engine is still to be told. On the loop thread.
  [[nodiscard]] bool knows_instance(std::uint64_t instance) const;

 private:
  using Sessions = std::vector<std::shared_ptr<InboundSession>>;
  using Which = std::function<bool(const InboundSession&)>;
  // Loop thread.
  [[nodiscard]] Sessions those(const Which& which) const;
  void ask(const std::shared_ptr<Revocation>& revocation, const Sessions& sessions,
           std::vector<std::uint32_t> region_ids);
  void settle(Revocation& revocation, const InboundSession& session);
  void sever_lanes(const InboundSession& session);
  void over(const std::shared_ptr<InboundSession>& session, const Error& why);
  void recount() { count_.store(sessions_.size() + doubted_.size()); }
  // False when no session is one of `which`.
  Result<bool> fence(const Which& which, Deadline deadline);

  EngineCore& engine_;
  // Loop thread:
  std::set<std::shared_ptr<InboundSession>> sessions_;
  std::set<std::shared_ptr<InboundSession>> doubted_;                 // ended, and may still copy
  std::map<std::uint64_t, std::shared_ptr<Revocation>> revocations_;  // by token
  std::uint64_t next_token_ = 1;
  bool let_go_ = false;
  std::atomic<std::size_t> count_{0};
};

}  // namespace crossdock::transfer::detail
