// The rules, in the order in which they are applied. See agreement.hpp.
// SPDX-License-Identifier: Apache-2.0
#include "symm/agreement.hpp"

#include <algorithm>
#include <fmt/format.h>
#include <fstream>
#include <map>
#include <sys/stat.h>
#include <unistd.h>

#include <crossdock/symm/group_options.hpp>

#include "wire/checksum.hpp"

namespace crossdock::symm {
namespace {

using message::Proposal;
using Proposals = std::vector<Proposal>;

constexpr Code kLastCode = Code::kDenied;

Error incompatible(std::string text) {
  return Error{.code = Code::kIncompatible, .scope = Scope::kPeer, .message = std::move(text)};
}

std::string backend_name(std::uint8_t backend) {
  if (backend == static_cast<std::uint8_t>(Backend::kGpu)) return "the GPU";
  if (backend == static_cast<std::uint8_t>(Backend::kCpu)) return "the CPU";
  return fmt::format("backend {}", backend);
}

Result<Proposals> decode_all(const std::vector<std::string>& parts) {
  Proposals proposals;
  for (std::size_t member = 0; member < parts.size(); ++member) {
    auto proposal = message::decode_proposal(parts[member]);
    if (!proposal.ok())
      return incompatible(
          fmt::format("what process {} of {} said is no proposal for a symmetric "
                      "group: {}",
                      member, parts.size(), proposal.error().message));
    proposals.push_back(std::move(proposal).value());
  }
  return proposals;
}

Result<> check_versions(const Proposals& all) {
  const Proposal& first = all.front();
  for (const Proposal& p : all) {
    if (p.protocol != first.protocol || p.protocol != message::kProtocol)
      return incompatible(fmt::format(
          "rank {} speaks protocol {} of symmetric groups (crossdock {}), rank {} speaks {} "
          "(crossdock {}): install one version everywhere",
          p.first_rank, p.protocol, p.library, first.first_rank, first.protocol, first.library));
    if (p.library != first.library)
      return incompatible(
          fmt::format("rank {} has crossdock {}, rank {} has {}: install one version everywhere",
                      p.first_rank, p.library, first.first_rank, first.library));
  }
  return {};
}

Result<> check_failures(const Proposals& all) {
  for (const Proposal& p : all)
    if (p.failure) return failure_of_peer(*p.failure);
  return {};
}

Result<> check_worlds(const Proposals& all) {
  const Proposal& first = all.front();
  for (const Proposal& p : all) {
    if (p.world != first.world)
      return incompatible(fmt::format("rank {} says the world has {} ranks, rank {} says {}",
                                      p.first_rank, p.world, first.first_rank, first.world));
    if (p.backend != first.backend)
      return incompatible(fmt::format("rank {} runs on {}, rank {} on {}: all ranks need the same",
                                      p.first_rank, backend_name(p.backend), first.first_rank,
                                      backend_name(first.backend)));
    if (p.elastic != first.elastic || p.generation != first.generation)
      return incompatible(fmt::format(
          "rank {} makes generation {} of {} group, rank {} generation {} of {}", p.first_rank,
          p.generation, p.elastic != 0 ? "an elastic" : "a fixed", first.first_rank,
          first.generation, first.elastic != 0 ? "an elastic one" : "a fixed one"));
  }
  return {};
}

std::string area_text(const Proposal& p, std::size_t i) {
  if (i >= p.areas.size()) return "nothing";
  const message::Area& area = p.areas[i];
  return fmt::format("'{}' of {} bytes at {}", area.name, area.bytes, area.offset);
}

bool same_area(const message::Area& a, const message::Area& b) {
  return a.name == b.name && a.offset == b.offset && a.bytes == b.bytes;
}

Result<> check_windows(const Proposals& all) {
  const Proposal& first = all.front();
  for (const Proposal& p : all) {
    const std::size_t count = std::max(p.areas.size(), first.areas.size());
    std::size_t i = 0;
    while (i < std::min(p.areas.size(), first.areas.size()) &&
           same_area(p.areas[i], first.areas[i]))
      ++i;
    if (i == count && p.window_bytes == first.window_bytes) continue;
    std::string text = fmt::format(
        "rank {} asks for a window of {} bytes, rank {} for {} bytes: all ranks need the same",
        p.first_rank, p.window_bytes, first.first_rank, first.window_bytes);
    if (i < count)
      text += fmt::format("; their areas differ from number {} on: {} and {}", i, area_text(p, i),
                          area_text(first, i));
    return incompatible(std::move(text));
  }
  return {};
}

Result<> place_ranks(Agreement& agreement) {
  const std::uint32_t world = agreement.members.front().world;
  if (world == 0 || world > message::kMostRanks)
    return invalid_argument(
        fmt::format("world = {} must be 1 to {} ranks", world, message::kMostRanks));
  agreement.member_of_rank.assign(world, kVacant);
  for (std::uint32_t member = 0; member < agreement.members.size(); ++member)
    for (const message::ProposedRank& r : agreement.members[member].ranks) {
      if (r.rank >= world)
        return invalid_argument(fmt::format("rank {} of process {} is outside a world of {} ranks",
                                            r.rank, member, world));
      std::uint32_t& owner = agreement.member_of_rank[r.rank];
      if (owner != kVacant)
        return invalid_argument(
            fmt::format("rank {} is given twice: to process {} and process {} of {}", r.rank, owner,
                        member, agreement.members.size()));
      owner = member;
    }
  if (agreement.members.front().elastic != 0) return {};
  for (std::uint32_t rank = 0; rank < world; ++rank)
    if (agreement.member_of_rank[rank] == kVacant)
      return invalid_argument(
          fmt::format("rank {} of a world of {} belongs to none of the {} "
                      "processes",
                      rank, world, agreement.members.size()));
  return {};
}

const char* sharing_of(const Proposal& p) {
  return p.share_gpus != 0 ? "true" : "false";
}

// What is allowed is what all allow, not what the process allows that looks.
Result<> check_devices(const Proposals& all) {
  const Proposal& first = all.front();
  std::map<std::string, std::uint32_t> rank_of;
  for (const Proposal& p : all) {
    if (p.share_gpus != first.share_gpus)
      return incompatible(fmt::format(
          "rank {} has symm.share_gpus = {}, rank {} has {}: set it alike in all processes",
          p.first_rank, sharing_of(p), first.first_rank, sharing_of(first)));
    for (const message::ProposedRank& r : p.ranks) {
      if (r.device.empty()) continue;
      const auto [found, fresh] = rank_of.emplace(r.device, r.rank);
      if (fresh || first.share_gpus != 0) continue;
      return invalid_argument(fmt::format(
          "rank {} and rank {} are on the same GPU, {}: every rank needs a GPU of its own (with "
          "CUDA_VISIBLE_DEVICES, devices of each process count from 0), or symm.share_gpus = true "
          "for tests",
          found->second, r.rank, r.device));
    }
  }
  return {};
}

// A kernel is prepared for one architecture, and its roles are balanced for one.
Result<> check_architectures(const Proposals& all) {
  const message::ProposedRank* first = nullptr;
  for (const Proposal& p : all)
    for (const message::ProposedRank& r : p.ranks) {
      if (first == nullptr) first = &r;
      if (r.sm != first->sm)
        return incompatible(
            fmt::format("rank {} is on {} (sm_{}), rank {} on {} (sm_{}): all ranks "
                        "need GPUs of one architecture",
                        r.rank, r.model, r.sm, first->rank, first->model, first->sm));
    }
  return {};
}

Result<> choose_sharing(Agreement& agreement) {
  const Proposals& all = agreement.members;
  if (all.size() == 1 && all.front().elastic == 0) return {};
  const auto elsewhere = std::find_if(
      all.begin(), all.end(), [&](const Proposal& p) { return p.host != all.front().host; });
  if (elsewhere == all.end()) {
    agreement.sharing = Sharing::kDescriptor;
    return {};
  }
  const bool fabric =
      all.front().backend == static_cast<std::uint8_t>(Backend::kGpu) &&
      std::all_of(all.begin(), all.end(), [](const Proposal& p) { return p.fabric == 1; });
  if (!fabric)
    return make_error(
        Code::kUnsupported,
        fmt::format("rank {} is not on the host of rank {}, or in another network namespace "
                    "({}; {}), and windows cannot travel between them: containers of one host "
                    "need a shared network namespace (--network=host), hosts need GPUs with "
                    "fabric handles (NVLink switches and IMEX)",
                    elsewhere->first_rank, all.front().first_rank, elsewhere->host,
                    all.front().host));
  agreement.sharing = Sharing::kFabric;
  return {};
}

}  // namespace

std::string name_ranks(const std::vector<std::uint32_t>& ranks) {
  std::string text;
  for (const std::uint32_t rank : ranks)
    text += fmt::format("{}{}", text.empty() ? "" : ", ", rank);
  return (ranks.size() == 1 ? "rank " : "ranks ") + text;
}

std::string Agreement::ranks_of(std::uint32_t member) const {
  if (member >= members.size()) return fmt::format("process {}", member);
  std::vector<std::uint32_t> ranks;
  for (const message::ProposedRank& r : members[member].ranks)
    ranks.push_back(r.rank);
  return name_ranks(ranks);
}

std::uint64_t Agreement::token_of(std::uint32_t rank) const {
  const std::uint32_t member = member_of_rank[rank];
  return member == kVacant ? 0 : members[member].token;
}

Result<Agreement> agree(const std::vector<std::string>& parts) {
  CROSSDOCK_TRY(proposals, decode_all(parts));
  Agreement agreement;
  agreement.members = std::move(proposals);
  wire::StreamChecksum digest;
  for (const std::string& part : parts)
    digest.update(wire::as_bytes(part));
  agreement.digest = digest.digest();
  CROSSDOCK_CHECK_OK(check_versions(agreement.members));
  CROSSDOCK_CHECK_OK(check_failures(agreement.members));
  CROSSDOCK_CHECK_OK(check_worlds(agreement.members));
  CROSSDOCK_CHECK_OK(place_ranks(agreement));
  CROSSDOCK_CHECK_OK(check_windows(agreement.members));
  CROSSDOCK_CHECK_OK(check_devices(agreement.members));
  CROSSDOCK_CHECK_OK(check_architectures(agreement.members));
  CROSSDOCK_CHECK_OK(choose_sharing(agreement));
  return agreement;
}

Error failure_of_peer(const message::Failure& failure) {
  const bool known = failure.code != 0 && failure.code <= static_cast<std::uint16_t>(kLastCode);
  return Error{.code = known ? static_cast<Code>(failure.code) : Code::kInternal,
               .scope = Scope::kPeer,
               .message = fmt::format("rank {} failed: {}", failure.rank, failure.text)};
}

message::Failure to_failure(const Error& error, std::uint32_t rank) {
  return {.code = static_cast<std::uint16_t>(error.code), .rank = rank, .text = error.message};
}

std::string host_identity() {
  std::string boot;
  std::ifstream("/proc/sys/kernel/random/boot_id") >> boot;
  if (boot.empty()) {
    char name[256] = {};
    (void)::gethostname(name, sizeof name - 1);
    boot = name;
  }
  struct stat network{};
  if (::stat("/proc/self/ns/net", &network) != 0) return boot;
  return fmt::format("{}/net-{}", boot, network.st_ino);
}

}  // namespace crossdock::symm
