# shellcheck shell=bash
# bench [what] [options]: set up, build the release and run `crossdock bench` with the options
# `./x bench --help` lists them once it is built.
# SPDX-License-Identifier: Apache-2.0

x_bench() {
  load build
  x_build release crossdock_cli
  exec build/release/tools/crossdock bench "$@"
}
