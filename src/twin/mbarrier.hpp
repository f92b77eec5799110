// What the asynchronous engine needs of mbarriers: finding the state behind a word and completing
// phases.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "twin/runtime.hpp"

namespace crossdock::twin {

// nullptr when the word holds no valid mbarrier.
Mbarrier* find_mbarrier(Cta& cta, const void* word);
// Flips the phase when all arrivals and bytes are there, and wakes who polls it.
void complete_phase_if_due(Runtime& runtime, Mbarrier& barrier, const void* word);

}  // namespace crossdock::twin
