// Result<T>: a value or an Error. Nothing in Crossdock throws across its API; a Result that is
// dropped is a compiler warning. There is no conversion to bool or int of an Error.
// Thread-compatible, like std::variant.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdio>
#include <cstdlib>
#include <optional>
#include <type_traits>
#include <utility>
#include <variant>

#include <crossdock/core/error.hpp>

namespace crossdock {
inline namespace v1 {

// A library or caller bug: value() of an error. Prints the error and aborts.
[[noreturn]] void die_on_error(const Error& error) noexcept;

template <class T = void>
class [[nodiscard]] Result {
  static_assert(!std::is_reference_v<T> && !std::is_same_v<std::remove_cv_t<T>, Error>);

 public:
  using value_type = T;
  Result(T value) : state_(std::in_place_index<0>, std::move(value)) {}      // NOLINT: implicit
  Result(Error error) : state_(std::in_place_index<1>, std::move(error)) {}  // NOLINT: implicit

  [[nodiscard]] bool ok() const noexcept { return state_.index() == 0; }
  explicit operator bool() const noexcept { return ok(); }

  // Precondition: ok(). Breaking it aborts with the error's text. Of a temporary it is the value
  // itself, no reference into it: C++20 ends the temporary of `for (auto& x : f().value())` before
  // the loop's body runs, and a bound reference does not keep it either.
  T& value() & { return check(), std::get<0>(state_); }
  const T& value() const& { return check(), std::get<0>(state_); }
  T value() && { return check(), std::get<0>(std::move(state_)); }
  T& operator*() & { return value(); }
  const T& operator*() const& { return value(); }
  T operator*() && { return std::move(*this).value(); }
  T* operator->() { return &value(); }
  const T* operator->() const { return &value(); }
  T value_or(T other) && { return ok() ? std::get<0>(std::move(state_)) : std::move(other); }

  // Precondition: !ok(). Of a temporary the error is returned itself, as the value is.
  const Error& error() const& { return std::get<1>(state_); }
  Error error() && { return std::get<1>(std::move(state_)); }
  // kOk when there is a value: handy in tests and switches.
  [[nodiscard]] Code code() const noexcept { return ok() ? Code::kOk : std::get<1>(state_).code; }

 private:
  void check() const {
    if (!ok()) die_on_error(std::get<1>(state_));
  }
  std::variant<T, Error> state_;
};

template <>
class [[nodiscard]] Result<void> {
 public:
  using value_type = void;
  Result() = default;
  Result(Error error) : error_(std::move(error)) {}  // NOLINT: implicit

  [[nodiscard]] bool ok() const noexcept { return !error_.has_value(); }
  explicit operator bool() const noexcept { return ok(); }
  void value() const {
    if (error_) die_on_error(*error_);
  }
  const Error& error() const& { return *error_; }
  Error error() && { return std::move(*error_); }
  [[nodiscard]] Code code() const noexcept { return error_ ? error_->code : Code::kOk; }

 private:
  std::optional<Error> error_;
};

}  // namespace v1
}  // namespace crossdock

// Propagation inside functions that return a Result: `CROSSDOCK_TRY(fd, open_socket(a));` declares
// `fd` or returns the error; CROSSDOCK_CHECK_OK does the same for Result<void>.
#define CROSSDOCK_CONCAT_(a, b) a##b
#define CROSSDOCK_CONCAT(a, b) CROSSDOCK_CONCAT_(a, b)
#define CROSSDOCK_TRY_(tmp, var, ...)           \
  auto tmp = (__VA_ARGS__);                     \
  if (!tmp.ok()) return std::move(tmp).error(); \
  auto var = std::move(tmp).value()
#define CROSSDOCK_TRY(var, ...) \
  CROSSDOCK_TRY_(CROSSDOCK_CONCAT(crossdock_try_, __LINE__), var, __VA_ARGS__)
#define CROSSDOCK_CHECK_OK(...)                                        \
  do {                                                                 \
    if (auto crossdock_result = (__VA_ARGS__); !crossdock_result.ok()) \
      return std::move(crossdock_result).error();                      \
  } while (0)
