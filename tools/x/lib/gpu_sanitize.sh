# shellcheck shell=bash
# The tests of ./x gpu --sanitize: which suites run under which tool of compute-sanitizer, how long, and what is
# left out. Sourced by gpu.sh.
# SPDX-License-Identifier: Apache-2.0

# tool | suite | most seconds | tests | what is left out, and why. A tool makes kernels 5 to 50 times slower, so rows
# take tests that run every kernel, path and format at least once, in small shapes; tests whose names say so
# (NotUnderSanitizer) are in no row. racecheck and synccheck look at shared memory and barriers, which gpu_cuda and
# gpu_heap have no kernels for. In the order of what is lost when the time is over.
gpu_sanitize_rows() {
  cat <<'EOF'
racecheck|gpu_symm|120|SymmGpu.*:SymmGraphGpu.*|faults: nobody shares memory there; probes: their machine code is a test of its own
racecheck|gpu_ep|75|EpGpu.OddTokensAndRows:EpGpu.Fp8CastFusedWithScalesByColumn:EpGpu.CompressedRowsOfFewTokens:EpGpu.MasksOnAllPaths:EpGpu.FewTokensOfDifferentRanksAndNone:EpFewCopiesGpu.*:EpExpandedGpu.InTurns*|many tokens and many rounds: the same kernels again
racecheck|gpu_moe|75|GemmGpu.OddShapes:GemmGpu.OutputsOfManyTilesInPlacesOfStages:GemmGpu.GraphsReadNewCounts:MoeLayerGpu.FewTokensAndNone:WeightsGpu.HasTheBitsOfTheCpu|every tile and layout: a product of each format is enough to wait for
racecheck|gpu_coll|20|CollGpu.SmallAndWideRowsAreFetchedToo|the copy engines do the rest
memcheck|gpu_symm|40|*|nothing
memcheck|gpu_ep|60|EpGpu.OddTokensAndRows:EpGpu.Fp8*:EpGpu.NoTokens*:EpGpu.CombineByPush:EpGpu.RowsByExpert*:EpGpu.Compressed*:EpGpu.FewTokens*:EpGpu.MasksOnAllPaths:EpGpu.HalvesOf*:EpGpu.OtherRows*:EpGpu.ExpandedAndMaskedCopies:EpFewCopiesGpu.*:EpExpandedGpu.*|rounds by the thousand: their memory is that of the others
memcheck|gpu_moe|60|GemmGpu.OddShapes:GemmGpu.LongK:GemmGpu.GraphsReadNewCounts:GemmGpu.CountsBeyond*:MoeLayerGpu.FewTokensAndNone:MoeLayerGpu.OddRoutings:WeightsGpu.*|every tile and layout: minutes of the host's reference
memcheck|gpu_coll|25|*|nothing
memcheck|gpu_heap|25|*|nothing
memcheck|gpu_cuda|25|*-CudaGpu.ThousandCyclesDoNotGrow|a thousand cycles: each is the first one again
synccheck|gpu_symm|40|SymmGpu.*:SymmGraphGpu.*|as racecheck
synccheck|gpu_ep|50|EpGpu.OddTokensAndRows:EpGpu.Fp8Cast*:EpGpu.CombineByPush:EpGpu.RowsByExpert*:EpGpu.Compressed*:EpGpu.FewTokens*:EpGpu.MasksOnAllPaths:EpFewCopiesGpu.*:EpExpandedGpu.InTurns*|as racecheck
synccheck|gpu_moe|50|GemmGpu.OddShapes:GemmGpu.OutputsOfManyTilesInPlacesOfStages:GemmGpu.GraphsReadNewCounts:MoeLayerGpu.FewTokensAndNone|as racecheck
synccheck|gpu_coll|20|CollGpu.SmallAndWideRowsAreFetchedToo|as racecheck
EOF
}

# gpu_sanitize_row TOOL SUITE SECONDS TESTS: one line of the table, and what is wrong below it.
gpu_sanitize_row() {
  local tool=$1 suite=$2 most=$3 tests=$4 folder=build/gpu/sanitize begin=$SECONDS status=0 judged=0 more=()
  local log=$folder/$tool-$suite.log output=$folder/$tool-$suite.out verdict
  # Some tests provoke errors of the driver; those are not findings.
  [[ $tool == memcheck ]] && more=(--report-api-errors no)
  [[ $tests == *-* ]] || tests+=-
  rm -f "$log"
  timeout --kill-after=10 "$most" "$COMPUTE_SANITIZER" --tool "$tool" "${more[@]}" --error-exitcode 9 \
    --print-limit 1000 --target-processes all --log-file "$log" "build/gpu/tests/gpu/$suite" \
    "--gtest_filter=$tests:*NotUnderSanitizer*" >"$output" 2>&1 || status=$?
  ((status != 137)) || status=124
  verdict=$(python3 tools/x/lib/sanitizer_reports.py --tool "$tool" --log "$log" --output "$output" \
    --status "$status") || judged=1
  printf '%-9s  %-8s  %4d s  %s\n' "$tool" "$suite" $((SECONDS - begin)) "$verdict"
  return "$judged"
}

# gpu_sanitize WHAT SECONDS: WHAT is `all`, a tool, or tool:suite. Rows that SECONDS leave no time for are named, and
# fail.
gpu_sanitize() {
  local what=$1 seconds=$2 begin=$SECONDS failed=0 rows=0 tool suite most tests left_out left
  COMPUTE_SANITIZER=${COMPUTE_SANITIZER:-compute-sanitizer}
  command -v "$COMPUTE_SANITIZER" >/dev/null ||
    die "gpu --sanitize needs compute-sanitizer on the PATH, or its place in COMPUTE_SANITIZER"
  "$COMPUTE_SANITIZER" --version | grep -i version >&2
  mkdir -p build/gpu/sanitize
  # Reports tell known ones by the lines of the source, which these kernels have.
  export CROSSDOCK_JIT_LINE_INFO=true CROSSDOCK_JIT_CACHE_DIR=$ROOT/build/gpu/kernels_with_lines
  local threads
  threads=$(build_jobs)
  CROSSDOCK_JIT_THREADS=$((threads < 64 ? threads : 64)) build/gpu/tools/crossdock jit warm >build/gpu/sanitize/warm.log ||
    die "gpu --sanitize: crossdock jit warm failed; see build/gpu/sanitize/warm.log"
  tail -n 1 build/gpu/sanitize/warm.log >&2
  say "kernels with lines: $((SECONDS - begin)) s"
  while IFS='|' read -r tool suite most tests left_out; do
    [[ $what == all || $what == "$tool" || $what == "$tool:$suite" ]] || continue
    rows=$((rows + 1))
    left=$((seconds - SECONDS + begin))
    if ((left < 10)); then
      printf '%-9s  %-8s  NOT RUN: the %d s are over\n' "$tool" "$suite" "$seconds"
      failed=1
      continue
    fi
    # One row alone may take all there is.
    [[ $what != *:* ]] || most=$left
    gpu_sanitize_row "$tool" "$suite" $((most < left ? most : left)) "$tests" </dev/null || failed=1
    printf '%-9s  %-8s          of %d tests; left out: %s\n' '' '' \
      "$("build/gpu/tests/gpu/$suite" --gtest_list_tests | grep -c '^  ')" "$left_out"
  done < <(gpu_sanitize_rows)
  ((rows > 0)) || die "gpu --sanitize=$what: there is no such tool or suite"
  say "sanitizers: $((SECONDS - begin)) s; logs in build/gpu/sanitize"
  return "$failed"
}
