# shellcheck shell=bash
# demo [options]: set up, build the release and run `crossdock demo pd` with the options
# `./x demo --help` lists them once it is built.
# SPDX-License-Identifier: Apache-2.0

x_demo() {
  load build
  x_build release crossdock_cli
  if [[ $# -eq 0 || $1 == -* ]]; then set -- pd "$@"; fi
  exec build/release/tools/crossdock demo "$@"
}
