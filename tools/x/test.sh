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
  # Every process tells what its sanitizer found in a file, also one that its test kills, or whose
  # output the test keeps.
  local reports=$ROOT/build/$preset/reports failed=0
  rm -rf "$reports"
  mkdir -p "$reports"
  local to="log_path='$reports/report'"
  ASAN_OPTIONS="$to ${ASAN_OPTIONS:-}" TSAN_OPTIONS="$to ${TSAN_OPTIONS:-}" \
    UBSAN_OPTIONS="$to ${UBSAN_OPTIONS:-}" \
    "${runner[@]}" ctest --preset "$preset" --parallel "$(cpus)" "$@" || failed=1
  check_reports "$preset" "$reports" && ((failed == 0))
}

check_reports() {
  local preset=$1 files
  mapfile -t files < <(find "$2" -type f)
  ((${#files[@]} > 0)) || return 0
  sed -n 1,40p "${files[0]}"
  say "preset $preset: the sanitizer found something in ${#files[@]} processes; the first is above," \
    "all are in $2"
  return 1
}

# Runs one target for SECONDS; its log says what it found. Exported for the shells of xargs.
run_fuzzer() {
  local target=$1 seconds=$2 name=${1##*/fuzz_}
  local corpus=build/fuzz/corpus/$name log=build/fuzz/log/$name.log
  if "$target" -max_total_time="$seconds" -timeout=10 -rss_limit_mb=2048 -print_final_stats=1 \
    -artifact_prefix="build/fuzz/log/$name-" "$corpus" >"$log" 2>&1; then
    echo "$name: no finding, $(sed -n 's/^stat::number_of_executed_units: *//p' "$log") runs"
  else
    tail -n 40 "$log"
    echo "$name: FOUND something; the whole log is in $log, the input beside it"
    return 1
  fi
}

run_fuzzers() {
  local seconds=$1 target targets=()
  for target in build/fuzz/tests/fuzz/fuzz_*; do
    [[ -f $target && -x $target && ${target##*/} != fuzz_seeds ]] && targets+=("$target")
  done
  ((${#targets[@]} > 0)) || die "the fuzz preset built no fuzz target"
  say "fuzzing ${#targets[@]} targets for $seconds s each, $(cpus) at a time"
  mkdir -p build/fuzz/log
  build/fuzz/tests/fuzz/fuzz_seeds --write-seeds build/fuzz/corpus
  export -f run_fuzzer
  printf '%s\0' "${targets[@]}" |
    xargs -0 -P "$(cpus)" -I {} bash -c "run_fuzzer {} $seconds"
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
    x_build fuzz fuzz_targets
    run_fuzzers "$fuzz_seconds"
  fi
}
