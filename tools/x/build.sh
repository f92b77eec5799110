# shellcheck shell=bash
# build [preset] [target]: set up and build; presets: dev release asan tsan ubsan fuzz
# SPDX-License-Identifier: Apache-2.0

x_build() {
  local preset=${1:-dev}
  check_preset "$preset"
  load setup
  if [[ $preset == fuzz ]]; then x_setup --fuzz; else x_setup; fi
  configure_and_build "$preset" "${2:-all}"
}
