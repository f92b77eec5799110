// Text and shorthands of Error. No state. What the shared library exports is marked here, at the
// definitions.
// SPDX-License-Identifier: Apache-2.0
#include <cstring>
#include <fmt/format.h>

#include <crossdock/core/error.hpp>
#include <crossdock/core/export.hpp>
#include <crossdock/core/result.hpp>

namespace crossdock {
inline namespace v1 {
namespace {

std::string_view file_name(const char* path) {
  const std::string_view all = path;
  const auto slash = all.rfind('/');
  return slash == std::string_view::npos ? all : all.substr(slash + 1);
}

std::string native_text(const Native& native) {
  switch (native.domain) {
    case Native::Domain::kNone:
      return {};
    case Native::Domain::kErrno:
      return fmt::format(" [errno {}]", native.value);
    case Native::Domain::kCuda:
      return fmt::format(" [CUresult {}]", native.value);
    case Native::Domain::kNvrtc:
      return fmt::format(" [nvrtcResult {}]", native.value);
    case Native::Domain::kVerbs:
      return fmt::format(" [verbs status {}]", native.value);
  }
  return {};
}

Retry retry_of_errno(int value) {
  switch (value) {
    case EAGAIN:
    case EBUSY:
    case EMFILE:
    case ENFILE:
    case ENOMEM:
    case ENOBUFS:
    case EADDRINUSE:
    case ENOSPC:
    case EDQUOT:
    case ENETDOWN:
    case EHOSTDOWN:
    case ENONET:
    case ENETUNREACH:  // connect() says these two where an interface or a host is down
    case EHOSTUNREACH:
      return Retry::kLater;
    case ECONNRESET:
    case EPIPE:
    case ECONNREFUSED:
    case ETIMEDOUT:
      return Retry::kAfterReconnect;
    default:
      return Retry::kNo;
  }
}

Code code_of_errno(int value) {
  switch (value) {
    case EINVAL:
    case ENOTDIR:
    case EISDIR:
    case ELOOP:
    case ENAMETOOLONG:
      return Code::kInvalidArgument;
    case ENOENT:
    case ESRCH:
    case ESTALE:
      return Code::kNotFound;
    case EADDRINUSE:
    case EBUSY:
      return Code::kBusy;
    case ENOMEM:
    case ENOBUFS:
    case EMFILE:
    case ENFILE:
    case EAGAIN:  // of threads and locked memory: a socket's is no error and does not come here
    case ENOSPC:
    case EDQUOT:
    case EFBIG:
      return Code::kNoMemory;
    case ECONNRESET:
    case EPIPE:
    case ECONNABORTED:
      return Code::kPeerLost;
    case ECONNREFUSED:
    case EHOSTUNREACH:
    case ENETUNREACH:
    case EADDRNOTAVAIL:
    case ENETDOWN:
    case EHOSTDOWN:
    case ENONET:
      return Code::kUnreachable;
    case ETIMEDOUT:
      return Code::kDeadline;
    case EACCES:
    case EPERM:
    case EROFS:
      return Code::kDenied;
    case ENOSYS:
    case EOPNOTSUPP:
    case EAFNOSUPPORT:
      return Code::kUnsupported;
    default:
      return Code::kInternal;
  }
}

}  // namespace

CROSSDOCK_API std::string_view to_string(Code code) noexcept {
  switch (code) {
    case Code::kOk:
      return "ok";
    case Code::kInvalidArgument:
      return "invalid argument";
    case Code::kNotFound:
      return "not found";
    case Code::kBusy:
      return "busy";
    case Code::kWouldBlock:
      return "would block";
    case Code::kDeadline:
      return "deadline exceeded";
    case Code::kCancelled:
      return "cancelled";
    case Code::kPeerLost:
      return "peer lost";
    case Code::kUnreachable:
      return "unreachable";
    case Code::kNoMemory:
      return "out of memory";
    case Code::kUnsupported:
      return "unsupported";
    case Code::kIncompatible:
      return "incompatible";
    case Code::kClosed:
      return "closed";
    case Code::kInternal:
      return "internal error";
    case Code::kCorrupt:
      return "corrupt data";
    case Code::kDenied:
      return "denied";
  }
  return "unknown code";
}

CROSSDOCK_API std::string_view to_string(Scope scope) noexcept {
  switch (scope) {
    case Scope::kCall:
      return "call";
    case Scope::kTransfer:
      return "transfer";
    case Scope::kPeer:
      return "peer";
    case Scope::kDevice:
      return "device";
    case Scope::kEngine:
      return "engine";
  }
  return "unknown scope";
}

CROSSDOCK_API std::string_view to_string(Retry retry) noexcept {
  switch (retry) {
    case Retry::kNo:
      return "no";
    case Retry::kLater:
      return "later";
    case Retry::kAfterReconnect:
      return "after reconnect";
  }
  return "unknown";
}

CROSSDOCK_API std::string Error::describe() const {
  return fmt::format("{} (scope {}, retry {}): {}{} ({}:{})", to_string(code), to_string(scope),
                     to_string(retry), message, native_text(native), file_name(where.file_name()),
                     where.line());
}

CROSSDOCK_API Error make_error(Code code, std::string message, std::source_location where) {
  return Error{.code = code, .message = std::move(message), .where = where};
}

CROSSDOCK_API Error invalid_argument(std::string message, std::source_location where) {
  return make_error(Code::kInvalidArgument, std::move(message), where);
}

CROSSDOCK_API Error errno_error(int errno_value, std::string message, std::source_location where) {
  char buffer[128];
  const char* text = ::strerror_r(errno_value, buffer, sizeof buffer);
  return Error{.code = code_of_errno(errno_value),
               .retry = retry_of_errno(errno_value),
               .native = {Native::Domain::kErrno, errno_value},
               .message = fmt::format("{}: {}", message, text),
               .where = where};
}

CROSSDOCK_API void die_on_error(const Error& error) noexcept {
  std::fprintf(stderr, "crossdock: value() of a failed Result: %s\n", error.describe().c_str());
  std::abort();
}

}  // namespace v1
}  // namespace crossdock
