// The process under test in kv_test: this test executable again, as one prefill or decode rank that
// obeys lines on stdin and answers each with one line on stdout. See kv_worker.cpp for the
// commands. SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <string>
#include <sys/types.h>

#include <crossdock/core/deadline.hpp>

namespace crossdock::multiproc {

struct KvWorkerOptions {
  std::string role;  // "prefill" or "decode"
  std::string transport = "auto";
  std::string shape = "layers=8,heads=8,dim=128,dtype=2";
  std::uint32_t num_pages = 512;
  std::uint32_t tp_size = 1;
  std::uint32_t tp_rank = 0;
  bool block_first = false;
};

// In the child process: obeys until stdin ends. argv as made by KvWorker.
bool is_kv_worker(int argc, char** argv);
int kv_worker_main(int argc, char** argv);

// In the test: owns a child; kills and reaps it at the end.
class KvWorker {
 public:
  explicit KvWorker(const KvWorkerOptions& options);
  KvWorker(const KvWorker&) = delete;
  ~KvWorker();

  [[nodiscard]] const std::string& name() const noexcept { return name_; }
  // Sends the command and returns the answer; "timeout" or "gone" when none came.
  std::string ask(const std::string& command, std::chrono::milliseconds patience);
  std::string ask(const std::string& command) { return ask(command, std::chrono::seconds(60)); }
  void signal(int number) const;

 private:
  std::string read_line(Deadline deadline);
  pid_t pid_ = -1;
  int to_ = -1;
  int from_ = -1;
  std::string buffer_;
  std::string name_;
};

}  // namespace crossdock::multiproc
