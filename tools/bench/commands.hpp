// The benches that have files of their own; bench.cpp calls these in the order of the help text.
// SPDX-License-Identifier: Apache-2.0
#pragma once

namespace CLI {
class App;
}

namespace crossdock::tools::bench {

void add_symm(CLI::App& group);  // symmetric memory and the first kernels
void add_ep(CLI::App& group);    // expert-parallel dispatch and combine
void add_moe(CLI::App& group);   // grouped products of expert layers
void add_jit(CLI::App& group);   // compiling and loading kernels

}  // namespace crossdock::tools::bench
