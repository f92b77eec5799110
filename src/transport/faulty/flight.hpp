// A shard on its way through the fault injector: the engine's shard, the one that the wrapped
// endpoint gets in its place, and the faults that were drawn for it. Owned by FaultyCore; guarded
// by its mutex except where noted.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <chrono>
#include <cstdint>
#include <memory>
#include <optional>
#include <random>
#include <vector>

#include "transport/faulty/transport.hpp"
#include "transport/transport.hpp"

namespace crossdock::transport::faulty {

struct Faults {
  std::chrono::nanoseconds delay{0};
  bool drop = false;
  bool duplicate = false;
  bool corrupt = false;
  bool fail = false;
  std::uint64_t choice = 0;  // which slice, which bit
};

// Draws the faults of one shard after the other.
class Dice {
 public:
  explicit Dice(const FaultyOptions& options) : options_(options), random_(options.seed) {}
  Faults draw();
  // Uniform in [0, n). Precondition: n > 0.
  std::uint64_t below(std::uint64_t n) { return random_() % n; }

 private:
  bool happens(std::uint32_t ppm) { return ppm != 0 && random_() % 1'000'000 < ppm; }
  const FaultyOptions options_;
  std::mt19937_64 random_;
};

struct Flight {
  enum class State : std::uint8_t {
    kDelayed,  // waits for its time; the wrapped endpoint does not know it
    kPosted,   // with the wrapped endpoint
    kHeld,     // over, not yet reported
  };

  // `sink`: gets the callbacks of `inner`.
  Flight(Shard& engine_shard, const Faults& drawn, ShardSink& sink);
  // Flips a bit in what a finished read brought. No lock needed: the buffers are still the shard's.
  void corrupt_read() noexcept;

  Shard* const outer;
  const Faults faults;
  Shard inner;
  State state = State::kPosted;
  std::uint32_t pins = 0;   // not to be reported while a duplicate of its transfer is
  bool reportable = false;  // the result is known and nothing but pins holds it back
  std::optional<Error> result;

 private:
  void flip_source();
  std::vector<Slice> slices_;  // in place of the engine's, when the source must be another
  std::vector<std::byte> scratch_;
};

}  // namespace crossdock::transport::faulty
