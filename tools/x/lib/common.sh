# shellcheck shell=bash
# What the subcommands of ./x share. Sourced, never run; sets no variable of the caller's environment.
# SPDX-License-Identifier: Apache-2.0

say() { printf '== %s\n' "$*" >&2; }
die() {
  printf 'x: %s\n' "$*" >&2
  exit 1
}

# Makes x_<name> known, once, so that subcommands can call each other.
load() {
  declare -F "x_$1" >/dev/null && return
  # shellcheck source=/dev/null
  source "$ROOT/tools/x/$1.sh"
}

cpus() { nproc 2>/dev/null || getconf _NPROCESSORS_ONLN; }

# Compilers need up to 1 GiB each: as many jobs as there are CPUs and memory for.
build_jobs() {
  local by_memory
  by_memory=$(awk '/^MemAvailable:/ {print int($2 / 1048576)}' /proc/meminfo 2>/dev/null || echo 1)
  local by_cpu
  by_cpu=$(cpus)
  local jobs=$((by_memory < by_cpu ? by_memory : by_cpu))
  echo $((jobs > 0 ? jobs : 1))
}

# configure_and_build PRESET [TARGET]: quiet unless it fails or configures. A .venv that is newer than
# the build tree has it look for Python again.
configure_and_build() {
  local preset=$1 target=${2:-all}
  [[ -f build/$preset/build.ninja && build/$preset/build.ninja -nt .venv/complete ]] ||
    cmake --preset "$preset" >&2
  cmake --build --preset "$preset" --target "$target" --parallel "$(build_jobs)" >&2
}

check_preset() {
  case $1 in
    dev | release | asan | tsan | ubsan | fuzz) ;;
    *) die "there is no preset '$1'; use dev, release, asan, tsan, ubsan or fuzz" ;;
  esac
}
