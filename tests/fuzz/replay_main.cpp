// fuzz_replay: runs every fuzz target over its seeds, all their truncations, and a number of
// mutations drawn from a fixed seed; so that a plain test run already covers what fuzzing found
// once. Any file named on the command line is run through every target, too (crash inputs).
//
//   fuzz_replay [FILE...]             run
//   fuzz_replay --write-seeds DIR     write DIR/<target>/<n>: start corpora for libFuzzer
// SPDX-License-Identifier: Apache-2.0
#include <filesystem>
#include <fstream>
#include <iterator>
#include <random>
#include <string_view>

#include "fuzz.hpp"

namespace crossdock::fuzz {
namespace {

constexpr int kMutationsPerSeed = 300;
// Longer seeds are truncated at every n-th byte only.
constexpr std::size_t kMaxTruncations = 512;

std::vector<Target>& targets() {
  static std::vector<Target> all;
  return all;
}

std::string mutate(std::string text, std::mt19937_64& random) {
  const auto below = [&random](std::size_t n) { return static_cast<std::size_t>(random() % n); };
  for (std::size_t left = 1 + below(4); left != 0 && !text.empty(); --left) {
    const std::size_t at = below(text.size());
    switch (below(5)) {
      case 0:
        text[at] = static_cast<char>(text[at] ^ (1 << below(8)));
        break;
      case 1:
        text[at] = static_cast<char>(random());
        break;
      case 2:
        text.erase(at, 1 + below(8));
        break;
      case 3:
        text.insert(at, text.substr(below(text.size()), 1 + below(16)));
        break;
      default:
        text.replace(at, std::min<std::size_t>(4, text.size() - at), 4, '\xff');
        break;
    }
  }
  return text;
}

void run_one(const Target& target, std::string_view input) {
  // A copy of its own size, so that a sanitizer sees the first byte read past the end.
  const std::vector<char> exact(input.begin(), input.end());
  current_input = wire::as_bytes(std::string_view(exact.data(), exact.size()));
  target.run(current_input);
}

std::size_t replay(const Target& target) {
  std::mt19937_64 random(0x5eed);
  std::size_t runs = 1;
  run_one(target, {});
  for (const std::string& seed : target.seeds()) {
    const std::size_t step = seed.size() / kMaxTruncations + 1;
    for (std::size_t n = 0; n <= seed.size(); n += step, ++runs)
      run_one(target, std::string_view(seed).substr(0, n));
    run_one(target, seed);
    for (int i = 0; i < kMutationsPerSeed; ++i, ++runs)
      run_one(target, mutate(seed, random));
  }
  return runs;
}

int write_seeds(const std::filesystem::path& directory) {
  for (const Target& target : targets()) {
    std::filesystem::create_directories(directory / target.name);
    int number = 0;
    for (const std::string& seed : target.seeds())
      std::ofstream(directory / target.name / std::to_string(number++), std::ios::binary) << seed;
  }
  return 0;
}

int replay_all(const std::vector<std::string>& files) {
  for (const Target& target : targets()) {
    for (const std::string& name : files) {
      std::ifstream file(name, std::ios::binary);
      run_one(target, std::string(std::istreambuf_iterator<char>(file), {}));
    }
    const std::size_t runs = replay(target);
    std::printf("%-18s %zu inputs\n", target.name, runs);
    if (target.seeds().empty()) {
      std::fprintf(stderr, "%s has no seeds\n", target.name);
      return 1;
    }
  }
  return targets().empty() ? 1 : 0;
}

}  // namespace

Registration::Registration(const Target& target) {
  targets().push_back(target);
}

}  // namespace crossdock::fuzz

int main(int argc, char** argv) {
  const std::vector<std::string> arguments(argv + 1, argv + argc);
  if (arguments.size() == 2 && arguments[0] == "--write-seeds")
    return crossdock::fuzz::write_seeds(arguments[1]);
  return crossdock::fuzz::replay_all(arguments);
}
