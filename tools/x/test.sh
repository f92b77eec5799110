# shellcheck shell=bash
# test [preset|--asan|--tsan|--ubsan|--all|--fuzz [s]] [-R regex] [-L label]: set up, build, test
# Prints the summary of ctest last. `--all` is dev and the three sanitizers; `--fuzz 60` runs each
# fuzz target for that many seconds. -R, -L, -LE and -E go to ctest.
# SPDX-License-Identifier: Apache-2.0

# ThreadSanitizer of GCC 12 cannot place its shadow when the kernel randomises addresses widely.
without_aslr() {
  if setarch "$(uname -m)" -R true 2>/dev/null; then
    setarch "$(uname -m)" -R "$@"
  else
    "$@"
  fi
}

run_ctest() {
  local preset=$1
  shift
  local runner=()
  [[ $preset == tsan ]] && runner=(without_aslr)
  say "testing preset $preset"
  "${runner[@]}" ctest --preset "$preset" --parallel "$(cpus)" "$@"
}

run_fuzzers() {
  local seconds=$1 target found=0
  say "fuzzing each target for $seconds s"
  for target in build/fuzz/tests/fuzz/fuzz_*; do
    [[ -f $target && -x $target ]] || continue
    found=1
    local corpus=build/fuzz/corpus/${target##*/}
    mkdir -p "$corpus"
    "$target" -max_total_time="$seconds" -timeout=10 -rss_limit_mb=2048 -print_final_stats=1 \
      -artifact_prefix="$corpus-" "$corpus"
  done
  ((found)) || die "the fuzz preset built no fuzz target"
}

x_test() {
  local presets=() fuzz_seconds=0 pass=()
  while (($#)); do
    case $1 in
      --asan | --tsan | --ubsan) presets+=("${1#--}") ;;
      --all) presets+=(dev asan tsan ubsan) ;;
      --fuzz)
        fuzz_seconds=60
        if [[ ${2:-} =~ ^[0-9]+$ ]]; then
          fuzz_seconds=$2
          shift
        fi
        ;;
      -R | -L | -LE | -E)
        [[ $# -ge 2 ]] || die "test: $1 needs a value"
        pass+=("$1" "$2")
        shift
        ;;
      -*) die "test: unknown option '$1'; ./x help shows them" ;;
      *) check_preset "$1" && presets+=("$1") ;;
    esac
    shift
  done
  [[ ${#presets[@]} -gt 0 || $fuzz_seconds -gt 0 ]] || presets=(dev)

  load build
  local preset
  for preset in "${presets[@]}"; do
    x_build "$preset"
    run_ctest "$preset" "${pass[@]}"
  done
  if ((fuzz_seconds > 0)); then
    x_build fuzz
    run_fuzzers "$fuzz_seconds"
  fi
}
