// Streams of a GPU that the calls of a rank were given, each with an event behind the last call:
// what a group waits for before it frees what they use. A stream may be destroyed by its owner; its
// event stays. Calls that are captured leave nothing here: whoever replays the graph gives the
// group nothing. Single-owner.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <vector>

#include <crossdock/core/deadline.hpp>

#include "coll/lane.hpp"
#include "cuda/stream.hpp"

namespace crossdock::coll {

class GivenStreams {
 public:
  // Behind all that is on the stream now. Makes an event at the first call with a stream.
  Result<> note(const cuda::Stream& stream);
  // Until all of it is over. Work that ended in an error is over: nothing runs in its context.
  [[nodiscard]] bool are_over(Deadline deadline) const;
  [[nodiscard]] u32 in_use() const;

 private:
  struct Given {
    cuda::StreamHandle stream;
    cuda::Event behind;
  };
  // Also of work that ended in an error.
  static bool is_reached(const Given& given);

  std::vector<Given> given_;
};

// Notes the stream of a lane when a call ends, whether or not it succeeded.
class NoteAtEnd {
 public:
  NoteAtEnd(GivenStreams& streams, const Lane& lane) : streams_(streams), lane_(lane) {}
  // An event that cannot be recorded means that the context is over.
  ~NoteAtEnd() {
    if (lane_.stream() != nullptr) static_cast<void>(streams_.note(*lane_.stream()));
  }
  NoteAtEnd(const NoteAtEnd&) = delete;
  NoteAtEnd& operator=(const NoteAtEnd&) = delete;

 private:
  GivenStreams& streams_;
  const Lane& lane_;
};

}  // namespace crossdock::coll
