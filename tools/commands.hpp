// The subcommands of `crossdock`. Each lives in the file of its name and adds itself, with options
// and callback, to the command line; main.cpp calls these in the order of the help text.
// SPDX-License-Identifier: Apache-2.0
#pragma once

namespace CLI {
class App;
}

namespace crossdock::tools {

void add_info(CLI::App& app);    // version, build, settings
void add_topo(CLI::App& app);    // what is in this host
void add_doctor(CLI::App& app);  // what would make it slow or fail
void add_store(CLI::App& app);   // a metadata store server
void add_bench(CLI::App& app);   // figures beside the ceilings of the machine
void add_demo(CLI::App& app);    // prefill to decode, between two processes
void add_trace(CLI::App& app);   // merge trace files
void add_jit(CLI::App& app);     // the cache of compiled kernels, register budgets

}  // namespace crossdock::tools
