// How blocks that copy wait: for words that sources tell, and for each other. One thread.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <crossdock/comm/epoch.cuh>
#include <crossdock/comm/polled_word.cuh>

namespace crossdock::device {

// Until the word is of this epoch, and all that came before it can be read; or until the source is
// in the mask, where there is one. A
// later epoch will do: a source stores it over data of this one only when this rank has ended this
// one. False when the rank aborts; the source is named if it does not come.
CROSSDOCK_DEVICE bool ep_wait_told(const LaunchCommon& c, const u32* word,
                                   const Expected& epoch_of_source, const u32* mask) {
  const Reached reached{static_cast<u32>(epoch_of_source.value)};
  return wait_until(c, epoch_of_source, AcquireSys{word},
                    OrMasked<Reached>{reached, mask, epoch_of_source.peer});
}

// Until a block of this rank has put its word of the epoch, and what came before it can be read.
// False when the rank aborts.
CROSSDOCK_DEVICE bool ep_wait_copy_word(const LaunchCommon& c, const u64* word, u32 epoch,
                                        u32& value) {
  u64 seen = 0;
  const bool put =
      wait_until(c, {Phase::kGridSync, kNoPeer, epoch}, seen, AcquireGpu{word}, UpperIs<32>{epoch});
  value = word_value(seen);
  return put;
}
CROSSDOCK_DEVICE void ep_put_copy_word(u64* word, u32 epoch, u32 value) {
  ptx::st_release_gpu(word, epoch_word(epoch, value));  // pairs with ep_wait_copy_word
}

}  // namespace crossdock::device
