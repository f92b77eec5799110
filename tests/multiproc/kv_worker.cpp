// The child and its handle. Commands, all with the request id first:
//   prefill: admit ID PAGES | push ID FIRST_LAYER END_LAYER | finish ID | wait ID MS | abort ID |
//            release ID | poison BYTE | free | close | asked ID MS (a receiver asked for it)
//   decode:  expect ID PAGES MS SENDER... | wait_layer ID LAYER MS | wait ID MS | verify ID |
//            abort ID | release ID | poison BYTE | check BYTE | free
//   either:  quarantined | hear MAILBOX MS (a message came, and nobody else takes it)
// Answers are "ok", "error TEXT", or numbers.
// SPDX-License-Identifier: Apache-2.0
#include "multiproc/kv_worker.hpp"

#include <algorithm>
#include <condition_variable>
#include <csignal>
#include <cstring>
#include <fcntl.h>
#include <iostream>
#include <mutex>
#include <optional>
#include <poll.h>
#include <set>
#include <sstream>
#include <sys/wait.h>
#include <unistd.h>
#include <vector>

#include <crossdock/kv/receiver.hpp>
#include <crossdock/kv/sender.hpp>
#include <crossdock/transfer/engine.hpp>

#include "kv/pattern.hpp"

namespace crossdock::multiproc {
namespace {

using namespace std::chrono_literals;

std::string answer(const Result<>& result) {
  return result.ok() ? "ok" : "error " + result.error().describe();
}

class Rank {
 public:
  Rank(transfer::Engine engine, const kv::PageLayout& layout)
      : engine_(std::move(engine)), pool_(kv::PagePool::create(engine_, layout).value()) {}

  void become_prefill() {
    kv::SenderOptions options;
    options.on_asked = [this](kv::RequestId id) {
      const std::lock_guard lock(mutex_);
      asked_.insert(id);
      changed_.notify_all();
    };
    sender_.emplace(kv::KvSender::create(engine_, pool_, std::move(options)).value());
  }
  void become_decode() {
    kv::ReceiverOptions options;
    options.stop_timeout = options.fence_timeout = 1'000ms;
    receiver_.emplace(kv::KvReceiver::create(engine_, pool_, options).value());
  }
  const std::string& name() const { return engine_.name(); }

  std::string obey(const std::string& line) {
    std::istringstream in(line);
    std::string verb;
    in >> verb;
    if (verb == "poison" || verb == "check") return fill_or_check(verb, in);
    if (verb == "free") return std::to_string(pool_.stats().free);
    if (verb == "quarantined") return std::to_string(pool_.stats().quarantined);
    if (verb == "close") return close();
    if (verb == "hear") return hear(in);
    kv::RequestId id = 0;
    in >> id;
    if (verb == "release") return answer(pool_.release(id));
    if (verb == "wait_free") return wait_free(id);
    return sender_ ? obey_prefill(verb, id, in) : obey_decode(verb, id, in);
  }

 private:
  static Deadline read_deadline(std::istringstream& in) {
    std::uint64_t ms = 0;
    in >> ms;
    return Deadline::in(std::chrono::milliseconds(ms));
  }

  std::string close() {
    if (sender_)
      if (const auto closed = sender_->close(Deadline::in(10s)); !closed.ok())
        return answer(closed);
    return answer(engine_.close(Deadline::in(10s)));
  }

  std::string hear(std::istringstream& in) {
    std::string name;
    in >> name;
    const auto heard = engine_.mailbox(name).value().receive(read_deadline(in));
    return heard.ok() ? "ok" : "error " + heard.error().describe();
  }

  // Waits until every page of the pool can be had: nothing in use or quarantine.
  std::string wait_free(std::uint64_t ms) {
    const kv::RequestId all = UINT64_MAX;
    const auto table =
        pool_.admit({.request = all, .num_pages = pool_.layout().options().num_pages},
                    Deadline::in(std::chrono::milliseconds(ms)));
    return table.ok() ? answer(pool_.release(all)) : "error " + table.error().describe();
  }

  std::string fill_or_check(const std::string& verb, std::istringstream& in) {
    int value = 0;
    in >> value;
    auto* bytes = reinterpret_cast<unsigned char*>(pool_.base());
    const std::size_t size = pool_.layout().pool_bytes();
    if (verb == "poison") {
      std::memset(bytes, value, size);
      return "ok";
    }
    const auto* wrong =
        std::find_if(bytes, bytes + size, [value](unsigned char b) { return b != value; });
    return wrong == bytes + size ? "ok" : "error byte " + std::to_string(wrong - bytes);
  }

  std::string obey_prefill(const std::string& verb, kv::RequestId id, std::istringstream& in) {
    if (verb == "admit") {
      std::uint32_t pages = 0;
      in >> pages;
      const auto table = pool_.admit({.request = id, .num_pages = pages});
      return table.ok() ? "ok" : "error " + table.error().describe();
    }
    if (verb == "push") return push(id, in);
    if (verb == "asked") return asked(id, read_deadline(in));
    if (verb == "finish") return answer(sender_->finish(id));
    if (verb == "wait") return answer(sender_->wait(id, read_deadline(in)));
    if (verb == "abort") return sender_->abort(id, "told to"), "ok";
    return "error no command " + verb;
  }

  std::string asked(kv::RequestId id, Deadline deadline) {
    std::unique_lock lock(mutex_);
    const auto here = [&] { return asked_.count(id) > 0; };
    return changed_.wait_until(lock, deadline.when(), here) ? "ok" : "error nobody asked";
  }

  std::string push(kv::RequestId id, std::istringstream& in) {
    std::uint32_t layer = 0, end = 0;
    in >> layer >> end;
    const auto table = pool_.table(id).value();
    const std::uint32_t tokens = pool_.layout().options().page_tokens;
    for (; layer < end; ++layer) {
      for (std::uint32_t i = 0; i < table.pages.size(); ++i)
        kv::pattern::fill_page(pool_.layout(), pool_.base(), layer, table.pages[i],
                               {id, i * tokens});
      if (const auto pushed = sender_->push(id, layer); !pushed.ok()) return answer(pushed);
    }
    return "ok";
  }

  std::string obey_decode(const std::string& verb, kv::RequestId id, std::istringstream& in) {
    if (verb == "expect") return expect(id, in);
    if (verb == "wait") return answer(receiver_->wait(id, read_deadline(in)));
    if (verb == "abort") return receiver_->abort(id, "told to"), "ok";
    if (verb == "verify") return verify(id);
    if (verb == "wait_layer") {
      std::uint32_t layer = 0;
      in >> layer;
      return answer(receiver_->wait(id, layer, read_deadline(in)));
    }
    return "error no command " + verb;
  }

  std::string expect(kv::RequestId id, std::istringstream& in) {
    std::uint32_t pages = 0;
    in >> pages;
    kv::Expectation expectation;
    expectation.request = id;
    expectation.deadline = read_deadline(in);
    for (std::string sender; in >> sender;)
      expectation.senders.push_back(sender);
    const auto table = pool_.admit({.request = id, .num_pages = pages});
    if (!table.ok()) return "error " + table.error().describe();
    return answer(receiver_->expect(expectation));
  }

  std::string verify(kv::RequestId id) {
    const auto table = pool_.table(id).value();
    const std::uint32_t tokens = pool_.layout().options().page_tokens;
    for (std::uint32_t layer = 0; layer < pool_.layout().shape().num_layers; ++layer)
      for (std::uint32_t i = 0; i < table.pages.size(); ++i)
        if (const auto bad = kv::pattern::check_page(pool_.layout(), pool_.base(), layer,
                                                     table.pages[i], {id, i * tokens}))
          return "error " + bad->describe();
    return "ok";
  }

  std::mutex mutex_;
  std::condition_variable changed_;
  std::set<kv::RequestId> asked_;
  transfer::Engine engine_;
  kv::PagePool pool_;
  std::optional<kv::KvSender> sender_;
  std::optional<kv::KvReceiver> receiver_;
};

constexpr const char* kMark = "kv-worker";

}  // namespace

bool is_kv_worker(int argc, char** argv) {
  return argc == 9 && std::strcmp(argv[1], kMark) == 0;
}

int kv_worker_main(int, char** argv) {
  const std::string role = argv[2];
  transfer::EngineOptions options;
  options.config["transport.enabled"] = argv[3];
  kv::LayoutOptions layout;
  layout.num_pages = static_cast<std::uint32_t>(std::stoul(argv[5]));
  layout.tp_size = static_cast<std::uint32_t>(std::stoul(argv[6]));
  layout.tp_rank = static_cast<std::uint32_t>(std::stoul(argv[7]));
  layout.order = argv[8] == std::string("block-first") ? kv::PoolOrder::kBlockFirst
                                                       : kv::PoolOrder::kLayerFirst;
  Rank rank(transfer::Engine::create(options).value(),
            kv::PageLayout::create(kv::parse_model_shape(argv[4]).value(), layout).value());
  role == "prefill" ? rank.become_prefill() : rank.become_decode();
  std::cout << rank.name() << std::endl;
  for (std::string line; std::getline(std::cin, line);)
    std::cout << rank.obey(line) << std::endl;
  return 0;
}

KvWorker::KvWorker(const KvWorkerOptions& o) {
  std::vector<std::string> args = {"kv_test",
                                   kMark,
                                   o.role,
                                   o.transport,
                                   o.shape,
                                   std::to_string(o.num_pages),
                                   std::to_string(o.tp_size),
                                   std::to_string(o.tp_rank),
                                   o.block_first ? "block-first" : "layer-first"};
  std::vector<char*> argv;
  for (auto& arg : args)
    argv.push_back(arg.data());
  argv.push_back(nullptr);
  int in[2], out[2];
  if (::pipe2(in, O_CLOEXEC) != 0 || ::pipe2(out, O_CLOEXEC) != 0) std::abort();
  pid_ = ::fork();  // the test process has no threads
  if (pid_ == 0) {
    ::dup2(in[0], STDIN_FILENO);
    ::dup2(out[1], STDOUT_FILENO);
    ::execv("/proc/self/exe", argv.data());
    ::_exit(127);
  }
  ::close(in[0]);
  ::close(out[1]);
  to_ = in[1];
  from_ = out[0];
  name_ = read_line(Deadline::in(30s));
}

KvWorker::~KvWorker() {
  ::close(to_);
  ::close(from_);
  ::kill(pid_, SIGKILL);
  ::waitpid(pid_, nullptr, 0);
}

void KvWorker::signal(int number) const {
  ::kill(pid_, number);
}

std::string KvWorker::ask(const std::string& command, std::chrono::milliseconds patience) {
  const std::string line = command + "\n";
  if (::write(to_, line.data(), line.size()) != static_cast<ssize_t>(line.size())) return "gone";
  return read_line(Deadline::in(patience));
}

std::string KvWorker::read_line(Deadline deadline) {
  for (;;) {
    const auto end = buffer_.find('\n');
    if (end != std::string::npos) {
      std::string line = buffer_.substr(0, end);
      buffer_.erase(0, end + 1);
      return line;
    }
    pollfd wait{from_, POLLIN, 0};
    if (::poll(&wait, 1, deadline.remaining_ms()) <= 0) return "timeout";
    char chunk[4096];
    const auto got = ::read(from_, chunk, sizeof(chunk));
    if (got <= 0) return "gone";
    buffer_.append(chunk, static_cast<std::size_t>(got));
  }
}

}  // namespace crossdock::multiproc
