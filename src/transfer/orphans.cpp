// See orphans.hpp.
// SPDX-License-Identifier: Apache-2.0
#include "transfer/orphans.hpp"

#include "transfer/engine_core.hpp"

namespace crossdock::transfer::detail {
namespace {

constexpr auto kLookAgain = std::chrono::milliseconds(5);

}  // namespace

void Orphans::adopt(std::optional<mem::SharedMemory> memory,
                    std::shared_ptr<mem::RegionRecord> record) {
  // Tasks are copied, and memory has one owner. A task that the loop drops hands it to the engine.
  const std::shared_ptr<Orphan> orphan(new Orphan, [this](Orphan* raw) {
    engine_.keep_until_the_end(std::move(raw->memory));
    delete raw;
  });
  orphan->memory = std::move(memory);
  orphan->record = std::move(record);
  engine_.loop().post([this, orphan] {
    orphans_.push_back(std::move(*orphan));
    if (orphans_.size() == 1) look();
  });
}

void Orphans::look() {
  std::erase_if(orphans_, [this](Orphan& orphan) { return settle(orphan); });
  if (!orphans_.empty()) engine_.loop().call_at(Deadline::in(kLookAgain), [this] { look(); });
}

bool Orphans::settle(Orphan& orphan) {
  if (orphan.record->leases.load() != 0) return false;
  if (!orphan.revocation && engine_.sessions().size() > 0 &&
      orphan.record->access != Access::kLocalOnly)
    orphan.revocation = engine_.sessions().revoke({orphan.record->id});
  if (orphan.revocation && !orphan.revocation->wait(Deadline::now())) return false;
  return engine_.forget_region(*orphan.record).ok();
}

void Orphans::abandon() {
  for (auto& orphan : orphans_)
    engine_.keep_until_the_end(std::move(orphan.memory));
  orphans_.clear();
}

}  // namespace crossdock::transfer::detail
