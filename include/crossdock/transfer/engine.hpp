// The transfer engine: registers memory, opens peers, moves batches of one-sided reads and writes.
//
//   engine ── register_memory ──> Region          peer ── submit(batch) ──> Transfer
//          ── open(name) ───────> Peer            engine ── mailbox(name) ─> Mailbox
//
// Engine, Region, Peer and Mailbox are thread-safe handles on shared state, so any order of
// destruction is safe; a Transfer has one owner. After close() every call returns kClosed. Using an
// engine in a child after fork() returns kUnsupported, or nothing where there is no error to
// return.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <functional>
#include <map>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include <crossdock/core/export.hpp>
#include <crossdock/core/result.hpp>
#include <crossdock/transfer/types.hpp>

namespace crossdock::transfer::detail {
class EngineCore;
class RegionCore;
class PeerCore;
class TransferCore;
class MailboxCore;
}  // namespace crossdock::transfer::detail

namespace crossdock::transfer {
inline namespace v1 {

struct EngineOptions {
  // How peers call this engine in the store. Empty: "host:port" of the control port.
  std::string name = {};
  // Where the control port listens: "127.0.0.1:0", "[::1]:7000", "0.0.0.0:7000". Port 0 lets the
  // system choose. Empty: `control.listen` of the configuration. Nothing else is bound.
  std::string listen = {};
  // The address peers shall dial; without a port, that of the port listened on. Empty: the one
  // listened on; of 0.0.0.0, the one on the way out.
  std::string advertise = {};
  // Metadata: "p2p" (no server: names are addresses), "inproc://id", "file:///dir",
  // "tcp://host:port", "http://host:port/path". Entries have a lease that the engine renews, but
  // for a plain HTTP service, which has none: what an engine that died left there stays (a warning
  // says so when it is published).
  std::string store = "p2p";
  // Overrides of the configuration table by name, e.g. {"transfer.slice_bytes", "1MiB"};
  // `crossdock info --config` lists the names.
  std::map<std::string, std::string> config = {};
  // Gets the lines of the log that `log.level` lets pass, in place of stderr. It runs on whichever
  // thread logs, on several at once and on those that keep peers alive: it must be quick, and not
  // call the engine. What it throws is swallowed. stderr gets what it takes without waiting.
  std::function<void(const LogLine&)> on_log = {};
};

// Registered memory. Dropping the last handle releases the region as soon as nothing uses it;
// release() does it now and tells.
class CROSSDOCK_API Region {
 public:
  [[nodiscard]] void* address() const noexcept;
  [[nodiscard]] std::size_t length() const noexcept;
  // Ends the registration: local transfers on it must be over, and every peer that may write or
  // read it must have confirmed that it stopped. kBusy names who still holds it when `deadline`
  // passes; the region then stays registered but refuses new transfers, and release() may be called
  // again. After success nobody touches the memory.
  Result<> release(Deadline deadline);

 private:
  friend class Engine;
  explicit Region(std::shared_ptr<detail::RegionCore> core) : core_(std::move(core)) {}
  std::shared_ptr<detail::RegionCore> core_;
};

// A submitted batch. Dropping it does not stop the transfer; it runs to its deadline at most.
class CROSSDOCK_API Transfer {
 public:
  [[nodiscard]] std::uint64_t id() const noexcept;
  [[nodiscard]] Status status() const;
  // Blocks until the transfer is terminal. Ok when delivered, otherwise its error. When `deadline`
  // passes first, kDeadline with scope kCall: the transfer goes on.
  Result<> wait(Deadline deadline);
  // Asks to stop; returns at once. Slices that have not started will not start; the state becomes
  // kCancelled (or kDelivered, if that came first) when nothing touches the buffers any more.
  void cancel();

 private:
  friend class Engine;
  explicit Transfer(std::shared_ptr<detail::TransferCore> core) : core_(std::move(core)) {}
  std::shared_ptr<detail::TransferCore> core_;
};

// Another engine, as it was when it was opened. When it restarts or dies this handle is dead for
// good, whatever comes to live at its address; open() again.
class CROSSDOCK_API Peer {
 public:
  [[nodiscard]] const std::string& name() const noexcept;
  [[nodiscard]] std::uint64_t instance() const noexcept;
  [[nodiscard]] bool alive() const noexcept;
  // The transport that transfers to it take: "loopback", "shm", "tcp".
  [[nodiscard]] std::string transport() const;
  // Its regions, as far as it announced them; updates arrive by themselves.
  [[nodiscard]] std::vector<RemoteRegion> regions() const;
  // The region with this label; waits for it to be announced until `deadline`.
  Result<RemoteRegion> region(std::string_view label, Deadline deadline) const;

 private:
  friend class Engine;
  explicit Peer(std::shared_ptr<detail::PeerCore> core) : core_(std::move(core)) {}
  std::shared_ptr<detail::PeerCore> core_;
};

// Keeps a function registered with an engine. Its end, or end(), takes the function back; when that
// returns it does not run any more, unless it is called from within it. Move-only;
// thread-compatible.
class CROSSDOCK_API Subscription {
 public:
  Subscription() = default;
  Subscription(Subscription&&) noexcept = default;
  Subscription& operator=(Subscription&& other) noexcept;
  ~Subscription() { end(); }
  void end() noexcept;

 private:
  friend class Engine;
  friend class Mailbox;
  Subscription(std::shared_ptr<detail::MailboxCore> core, std::uint64_t token)
      : core_(std::move(core)), token_(token) {}
  std::shared_ptr<detail::MailboxCore> core_;
  std::uint64_t token_ = 0;
};

// Where notifications with one mailbox name arrive. Bounded (`control.mailbox_messages`,
// `control.mailbox_bytes`); when full the sender's transfer fails with kWouldBlock rather than
// losing a message silently. It also learns of every peer that is lost, once an instance; while
// nobody reads, the newest 4,096 of these are kept.
class CROSSDOCK_API Mailbox {
 public:
  Result<Message> receive(Deadline deadline);
  [[nodiscard]] std::optional<Message> try_receive();
  // As long as the subscription lives, messages go to `fn` on the control thread instead of the
  // queue; those queued before go first, on this thread. `fn` must not wait, or nobody is served
  // meanwhile; it may submit, also a notification. Calls that wait for that thread (open, transfer,
  // notify, wait, release, fence, region, receive) are kInvalidArgument there, unless they need not
  // wait. kBusy while another subscription of this mailbox lives: none is taken over.
  Result<Subscription> on_message(std::function<void(Message)> fn);

 private:
  friend class Engine;
  explicit Mailbox(std::shared_ptr<detail::MailboxCore> core) : core_(std::move(core)) {}
  std::shared_ptr<detail::MailboxCore> core_;
};

class CROSSDOCK_API Engine {
 public:
  static Result<Engine> create(EngineOptions options = {});

  Engine(Engine&&) noexcept = default;
  Engine& operator=(Engine&&) noexcept;
  // Local, bounded and silent: stops transfers, tells nobody. Prefer close().
  ~Engine();

  [[nodiscard]] const std::string& name() const noexcept;
  [[nodiscard]] const std::string& address() const noexcept;  // of the control port, "host:port"
  [[nodiscard]] std::uint64_t instance() const noexcept;

  // Registers caller-owned memory, readable and writable, which must stay mapped until the region
  // is released. Overlap with a region, a start that is no multiple of kRegionAlignment, null, zero
  // length and wrap-around are kInvalidArgument. Requests may name any bytes within a region.
  Result<Region> register_memory(void* address, std::size_t length, RegionOptions options = {});
  // All or none, announced to peers once.
  Result<std::vector<Region>> register_memory(std::span<const MemoryRange> ranges,
                                              RegionOptions options = {});
  // Memory of the engine's own, zeroed, page-aligned, freed when released and the last handle is
  // gone. Processes on this host map it; without transport shm it is private, in huge pages.
  Result<Region> allocate(std::size_t length, RegionOptions options = {});

  // Finds `name` in the store, connects, authenticates, learns its regions.
  Result<Peer> open(std::string_view name, Deadline deadline);

  // Starts a batch. All requests are checked first; one bad request refuses the whole batch and
  // nothing moves. Never blocks on the peer. kWouldBlock when `transfer.max_pending` transfers are
  // in flight.
  Result<Transfer> submit(const Peer& peer, std::span<const Request> batch,
                          TransferOptions options = {});
  // submit() and wait() in one; returns when terminal, at the transfer's deadline plus the time it
  // takes to quiesce. If it is stuck even then (a handler blocks the control thread, a copy the
  // kernel): kDeadline with scope kCall, and its buffers are in use until pending() lists it no
  // more.
  Result<> transfer(const Peer& peer, std::span<const Request> batch, TransferOptions options = {});

  // Sends a plain notification; ok when the peer's engine has it.
  Result<> notify(const Peer& peer, Notification notification, Deadline deadline);
  // The mailbox of that name, made on first use. Messages that arrive before are kept for it.
  Result<Mailbox> mailbox(std::string_view name);

  // As long as the subscription lives, `fn` is told on the control thread what becomes of peers:
  // kPeerLost, as mailboxes are, and kLinkLost. It must not wait, as that of
  // Mailbox::on_message.
  Result<Subscription> watch_peers(std::function<void(Message)> fn);

  // Makes an engine stop touching this engine's memory, and waits for the proof: its
  // acknowledgement, its death, or the end of its connections. It must open this engine again
  // before it can start new transfers. kDeadline: no proof yet; treat its pages as in use.
  // Ok also when that instance has not opened this engine, for then it cannot reach its memory.
  Result<> fence(const Peer& peer, Deadline deadline);
  // By Message::peer_instance or Peer::instance(); also for an instance that is gone.
  Result<> fence_instance(std::uint64_t instance, Deadline deadline);
  // By Engine::name() of the other engine, which need not be the name it is opened by here.
  // kNotFound when no engine of that name has opened this one: that proves nothing.
  Result<> fence(std::string_view engine_name, Deadline deadline);
  // Whether an engine of this instance has opened this one and not been lost yet: its loss will be
  // told. On a closed engine: whether some engine has not confirmed that it let go.
  [[nodiscard]] bool opened_by(std::uint64_t instance) const;

  [[nodiscard]] std::vector<PendingTransfer> pending() const;
  // Prometheus text exposition format.
  [[nodiscard]] std::string metrics() const;

  // Orderly end: stops and quiesces transfers, makes peers let go of this engine's regions, removes
  // the store entry, joins threads. After it, no memory is touched. Idempotent; may come beside any
  // other call, which then returns kClosed. kBusy names peers that did not confirm and may still
  // touch memory of this engine: keep registered memory mapped (its own stays). kDeadline
  // while another thread closes it. kInvalidArgument in a callback of this engine.
  Result<> close(Deadline deadline);

 private:
  explicit Engine(std::shared_ptr<detail::EngineCore> core) : core_(std::move(core)) {}
  std::shared_ptr<detail::EngineCore> core_;
};

}  // namespace v1
}  // namespace crossdock::transfer
