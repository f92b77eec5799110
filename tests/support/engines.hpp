// Engines, memory and patterns for tests of the transfer engine.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <chrono>
#include <cstdint>
#include <cstring>
#include <gtest/gtest.h>
#include <string>
#include <vector>

#include <crossdock/transfer/engine.hpp>

namespace crossdock::testing {

using namespace std::chrono_literals;
using transfer::Engine;
using transfer::EngineOptions;
using transfer::Op;
using transfer::Peer;
using transfer::Region;
using transfer::Request;
using transfer::Transfer;
using transfer::TransferOptions;

inline Deadline soon() {
  return Deadline::in(20s);
}

// An engine whose peers reach it by these transports; "auto" for the best. Memory that it registers
// is declared before it: its threads may still read when the last transfer has been delivered.
inline Engine make_engine(const std::string& transports = "auto", EngineOptions options = {}) {
  options.config.emplace("transport.enabled", transports);
  options.config.emplace("log.level", "warn");
  auto engine = Engine::create(std::move(options));
  if (!engine.ok()) ADD_FAILURE() << engine.error().describe();
  return std::move(engine).value();
}

// Bytes that differ at every offset and seed.
inline void fill_pattern(void* data, std::size_t length, std::uint64_t seed) {
  auto* out = static_cast<unsigned char*>(data);
  std::uint64_t x = seed * 0x9e3779b97f4a7c15u + 1;
  for (std::size_t i = 0; i < length; ++i) {
    if (i % 8 == 0) {
      x ^= x << 13;
      x ^= x >> 7;
      x ^= x << 17;
    }
    out[i] = static_cast<unsigned char>(x >> (8 * (i % 8)));
  }
}

inline bool has_pattern(const void* data, std::size_t length, std::uint64_t seed) {
  std::vector<unsigned char> expected(length);
  fill_pattern(expected.data(), length, seed);
  return std::memcmp(data, expected.data(), length) == 0;
}

inline std::uint64_t address_of(const Region& region, std::size_t offset = 0) {
  return reinterpret_cast<std::uint64_t>(region.address()) + offset;
}

inline std::byte* bytes_of(const Region& region, std::size_t offset = 0) {
  return static_cast<std::byte*>(region.address()) + offset;
}

// The value of a counter without labels. One that is not there fails the test: a name that was
// changed would otherwise read as "nothing happened".
inline std::uint64_t metric(const Engine& engine, const std::string& name) {
  const std::string text = engine.metrics();
  const std::string line = "\n" + name + " ";
  const auto at = text.find(line);
  if (at != std::string::npos) return std::stoull(text.substr(at + line.size()));
  ADD_FAILURE() << "the engine has no metric " << name;
  return 0;
}

// Two engines, a region each, and the first one's view of the second.
struct Pair {
  explicit Pair(const std::string& transports, std::size_t bytes = 1 << 20,
                bool engine_memory = false, EngineOptions source_options = {},
                EngineOptions target_options = {})
      : source_memory(engine_memory ? 0 : bytes),
        target_memory(engine_memory ? 0 : bytes),
        source(make_engine(transports, std::move(source_options))),
        target(make_engine(transports, std::move(target_options))),
        local(engine_memory ? source.allocate(bytes).value()
                            : source.register_memory(source_memory.data(), bytes).value()),
        remote(engine_memory ? target.allocate(bytes).value()
                             : target.register_memory(target_memory.data(), bytes).value()),
        peer(open()) {}

  Peer open() {
    auto opened = source.open(target.name(), soon());
    if (!opened.ok()) ADD_FAILURE() << opened.error().describe();
    return std::move(opened).value();
  }
  Request write(std::size_t offset, std::size_t length) const {
    return at(Op::kWrite, offset, offset, length);
  }
  Request read(std::size_t offset, std::size_t length) const {
    return at(Op::kRead, offset, offset, length);
  }
  Request at(Op op, std::size_t from, std::size_t to, std::size_t length) const {
    return {.op = op,
            .local = bytes_of(local, from),
            .remote = address_of(remote, to),
            .length = length};
  }
  Result<> run(std::vector<Request> batch, TransferOptions options = {}) {
    if (!options.deadline) options.deadline = soon();
    return source.transfer(peer, batch, std::move(options));
  }

  std::vector<std::byte> source_memory, target_memory;  // outlive the engines that use them
  Engine source;
  Engine target;
  Region local, remote;
  Peer peer;
};

}  // namespace crossdock::testing
