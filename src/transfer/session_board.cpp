// See session_board.hpp.
// SPDX-License-Identifier: Apache-2.0
#include "transfer/session_board.hpp"

#include <algorithm>
#include <fmt/format.h>

#include "transfer/engine_core.hpp"

namespace crossdock::transfer::detail {

bool Revocation::wait(Deadline deadline) {
  std::unique_lock lock(mutex_);
  return changed_.wait_until(lock, deadline.when(), [&] {
    return started_ && (abandoned_ || waiting_for_.empty());
  }) && !abandoned_;
}

std::string Revocation::holders() const {
  const std::lock_guard lock(mutex_);
  std::string names;
  for (const auto& [session, name] : waiting_for_)
    names += fmt::format("{}'{}'", names.empty() ? "" : ", ", name);
  return names;
}

void SessionBoard::add(std::shared_ptr<InboundSession> session) {
  sessions_.insert(session);
  recount();
  session->start();
}

void SessionBoard::sever_lanes(const InboundSession& session) {
  // What it returns is known: quiesced() asks for the word of a peer that copies by itself.
  for (const auto& transport : engine_.transports())
    (void)transport->sever_inbound(session.data_token());
}

void SessionBoard::closed(const std::shared_ptr<InboundSession>& session, const Error& why) {
  if (sessions_.erase(session) == 0) return;
  recount();
  session->end();
  CROSSDOCK_LOG(engine_.log(), kInfo, "peer '{}' closed its session: {}", session->peer_name(),
                why.message);
  // Its data lanes end first: after kPeerLost nothing it started may touch our memory.
  sever_lanes(*session);
  if (let_go_ || session->quiesced()) return over(session, why);
  // This end gave up, and the peer may be inside a copy: its pages are in use until it closes its
  // end, which it does when its rails are gone, or dies.
  CROSSDOCK_LOG(engine_.log(), kInfo,
                "peer '{}' copies by itself: the memory it may write stays in use until it closes "
                "its end too, or dies",
                session->peer_name());
  doubted_.insert(session);
  recount();
  session->link().linger([this, weak = std::weak_ptr(session), why] {
    const auto gone = weak.lock();
    if (!gone || doubted_.erase(gone) == 0) return;
    recount();
    over(gone, why);
  });
}

bool SessionBoard::knows_instance(std::uint64_t instance) const {
  const auto is = [&](const auto& session) { return session->peer_instance() == instance; };
  return std::any_of(sessions_.begin(), sessions_.end(), is) ||
         std::any_of(doubted_.begin(), doubted_.end(), is);
}

void SessionBoard::over(const std::shared_ptr<InboundSession>& session, const Error& why) {
  for (auto it = revocations_.begin(); it != revocations_.end();) {
    const auto revocation = it->second;
    settle(*revocation, *session);
    it = revocation->wait(Deadline::now()) ? revocations_.erase(it) : std::next(it);
  }
  // An engine that has another session here is not lost.
  if (knows_instance(session->peer_instance())) return;
  engine_.mailboxes().broadcast({.kind = Message::Kind::kPeerLost,
                                 .peer = session->peer_name(),
                                 .peer_instance = session->peer_instance(),
                                 .payload = why.message});
}

void SessionBoard::settle(Revocation& revocation, const InboundSession& session) {
  const std::lock_guard lock(revocation.mutex_);
  revocation.waiting_for_.erase(&session);
  revocation.changed_.notify_all();
}

void SessionBoard::acknowledged(const InboundSession& session, std::uint64_t token) {
  const auto found = revocations_.find(token);
  if (found == revocations_.end()) return;
  const auto revocation = found->second;
  settle(*revocation, session);
  if (revocation->wait(Deadline::now())) revocations_.erase(token);
}

std::shared_ptr<InboundSession> SessionBoard::by_token(std::uint64_t data_token) const {
  for (const auto& session : sessions_)
    if (session->data_token() == data_token) return session;
  return nullptr;
}

void SessionBoard::close_all(const Error& why, bool let_go) {
  let_go_ = let_go;
  const auto sessions = sessions_;
  for (const auto& session : sessions) {
    (void)session->link().send(wire::Bye{.reason = why.message});
    session->link().close(why);
  }
  doubted_.clear();
}

void SessionBoard::broadcast(const std::vector<std::vector<std::byte>>& frames) {
  const auto sessions = sessions_;  // closing one changes the set
  for (const auto& session : sessions)
    for (const auto& frame : frames)
      if (const auto sent = session->link().send(frame); !sent.ok()) {
        session->link().close(sent.error());
        break;
      }
}

SessionBoard::Sessions SessionBoard::those(const Which& which) const {
  Sessions found;
  for (const auto* set : {&sessions_, &doubted_})
    for (const auto& session : *set)
      if (which(*session)) found.push_back(session);
  return found;
}

// A session that cannot be asked is closed; then its end is waited for.
void SessionBoard::ask(const std::shared_ptr<Revocation>& revocation, const Sessions& sessions,
                       std::vector<std::uint32_t> region_ids) {
  const wire::Revoke message{.token = next_token_++, .region_ids = std::move(region_ids)};
  {
    const std::lock_guard lock(revocation->mutex_);
    for (const auto& session : sessions)
      revocation->waiting_for_.emplace(session.get(), session->peer_name());
    revocation->started_ = true;
    if (sessions.empty()) return revocation->changed_.notify_all();
  }
  revocations_.emplace(message.token, revocation);
  for (const auto& session : sessions)
    if (const auto sent = session->link().send(message); !sent.ok())
      session->link().close(sent.error());
}

std::shared_ptr<Revocation> SessionBoard::revoke(std::vector<std::uint32_t> region_ids) {
  auto revocation = std::make_shared<Revocation>();
  // Destroyed with the task, run or not.
  const std::shared_ptr<void> started(nullptr, [this, revocation](void*) {
    const std::lock_guard lock(revocation->mutex_);
    if (revocation->started_) return;
    revocation->started_ = true;
    revocation->abandoned_ = !engine_.let_go();
    revocation->changed_.notify_all();
  });
  engine_.loop().post([this, revocation, started, ids = std::move(region_ids)] {
    ask(revocation, those([](const InboundSession&) { return true; }), ids);
  });
  return revocation;
}

void SessionBoard::cut_lanes(Revocation& revocation) {
  engine_.loop().run([&] {
    for (const auto& session : sessions_) {
      sever_lanes(*session);
      if (!session->copies_itself()) settle(revocation, *session);
    }
  });
}

// The sessions are chosen once, at the call: one that begins later has begun nothing before, and
// is not closed for what another did.
Result<bool> SessionBoard::fence(const Which& which, Deadline deadline) {
  const auto revocation = std::make_shared<Revocation>();
  Sessions fenced;
  const bool ran = engine_.loop().run([&] {
    fenced = those(which);
    ask(revocation, fenced, {});
    for (const auto& session : fenced) {
      sever_lanes(*session);
      // Its lanes were all it had: no need to wait for its word.
      if (!session->copies_itself()) settle(*revocation, *session);
    }
  });
  if (!ran) return make_error(Code::kClosed, "the engine is closed");
  if (fenced.empty()) return false;
  if (!revocation->wait(deadline))
    return Error{.code = Code::kDeadline,
                 .scope = Scope::kPeer,
                 .retry = Retry::kLater,
                 .message = fmt::format("{} copies by itself and has neither confirmed that it "
                                        "stopped nor died; treat the memory it writes as in use",
                                        revocation->holders())};
  engine_.loop().run([&] {
    const auto why = make_error(Code::kClosed, "fenced off");
    for (const auto& session : fenced) {
      (void)session->link().send(wire::Bye{.reason = why.message});
      session->link().close(why);
    }
  });
  return true;
}

Result<> SessionBoard::fence_instance(std::uint64_t instance, Deadline deadline) {
  CROSSDOCK_CHECK_OK(
      fence([&](const InboundSession& session) { return session.peer_instance() == instance; },
            deadline));
  return {};
}

Result<> SessionBoard::fence_name(const std::string& name, Deadline deadline) {
  CROSSDOCK_TRY(
      found,
      fence([&](const InboundSession& session) { return session.peer_name() == name; }, deadline));
  if (found) return {};
  return make_error(
      Code::kNotFound,
      fmt::format("no engine that calls itself '{}' has opened this one, which proves nothing of "
                  "an engine that is dialled by that name; fence it by its Peer or its instance",
                  name));
}

}  // namespace crossdock::transfer::detail
