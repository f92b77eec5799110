// A plain HTTP service in the role of a metadata store: GET, PUT and DELETE on a dictionary, by
// Python's own server in a child process. It knows neither leases nor revisions.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <csignal>
#include <string>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

namespace crossdock::support {

inline constexpr const char* kPlainService = R"(
import http.server, sys, urllib.parse
table = {}
class Handler(http.server.BaseHTTPRequestHandler):
    def key(self):
        return urllib.parse.parse_qs(urllib.parse.urlsplit(self.path).query)["key"][0]
    def answer(self, status, body=b""):
        self.send_response(status)
        self.end_headers()
        self.wfile.write(body)
    def do_GET(self):
        key = self.key()
        self.answer(200, table[key]) if key in table else self.answer(404, b"none")
    def do_PUT(self):
        table[self.key()] = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        self.answer(200)
    def do_DELETE(self):
        self.answer(200 if table.pop(self.key(), None) is not None else 404)
    def log_message(self, *arguments):
        pass
server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
server.handle_error = lambda *arguments: None  # a client that gave up
print(server.server_address[1], flush=True)
server.serve_forever()
)";

class PlainService {
 public:
  PlainService() {
    int out[2];
    if (::pipe(out) != 0) return;
    child_ = ::fork();
    if (child_ == 0) {
      ::prctl(PR_SET_PDEATHSIG, SIGKILL);  // a test that aborts leaves nothing behind
      ::dup2(out[1], 1);
      ::execlp("python3", "python3", "-c", kPlainService, nullptr);
      ::_exit(127);
    }
    ::close(out[1]);
    char c;
    while (::read(out[0], &c, 1) == 1 && c != '\n')
      port_ = port_ * 10 + (c - '0');
    ::close(out[0]);
  }
  ~PlainService() {
    if (child_ <= 0) return;
    ::kill(child_, SIGKILL);
    ::waitpid(child_, nullptr, 0);
  }
  PlainService(const PlainService&) = delete;
  PlainService& operator=(const PlainService&) = delete;
  // False when Python cannot be run.
  [[nodiscard]] bool runs() const { return port_ != 0; }
  [[nodiscard]] std::string url() const {
    return "http://127.0.0.1:" + std::to_string(port_) + "/metadata";
  }

 private:
  pid_t child_ = -1;
  int port_ = 0;
};

}  // namespace crossdock::support
