# shellcheck shell=bash
# gpu [--sanitize] [--bench-only|--test-only] [--json DIR]: build and run the GPU tests and benches
# For a host with 1 or more GPUs, a CUDA toolkit, CMake, Ninja, g++ and Python. Third-party headers and
# nanobind come from .deps/ when it is there (./x vendor), else from the system. The Python package is
# built for the python3 on the PATH, which runs its tests and bench when it has torch. --sanitize runs the tests under
# compute-sanitizer (memcheck, racecheck, synccheck). Benches print tables and
# store the same as JSON in DIR (build/gpu/figures), from where it can be copied into bench/baseline/.
# Kernels are compiled by the first bench, which times it, into build/gpu/kernels; tests and benches then
# load them from there.
# SPDX-License-Identifier: Apache-2.0

gpu_configure() {
  local more=()
  [[ -d $ROOT/.deps/usr ]] && more+=("-DCMAKE_PREFIX_PATH=$ROOT/.deps/usr")
  [[ -f build/gpu/build.ninja ]] ||
    cmake -S . -B build/gpu -G Ninja -DCMAKE_BUILD_TYPE=Release -DCROSSDOCK_WERROR=OFF \
      "-DPython_EXECUTABLE=$(command -v python3)" "${more[@]}" >&2
}

gpu_sanitize() {
  command -v compute-sanitizer >/dev/null || die "gpu --sanitize needs compute-sanitizer on the PATH"
  local tool test failed=0 quiet
  for tool in memcheck racecheck synccheck; do
    quiet=()
    [[ $tool == memcheck ]] && quiet=(--report-api-errors no)
    for test in build/gpu/tests/gpu/gpu_*; do
      [[ -f $test && -x $test ]] || continue
      say "$tool: ${test##*/}"
      # Some tests provoke errors of the driver; those are not findings.
      compute-sanitizer --tool "$tool" "${quiet[@]}" --error-exitcode 9 --target-processes all "$test" \
        --gtest_filter='-*NotUnderSanitizer*' || failed=1
    done
  done
  return "$failed"
}

x_gpu() {
  local sanitize=0 tests=1 benches=1 json=build/gpu/figures
  while (($#)); do
    case $1 in
      --sanitize) sanitize=1 ;;
      --bench-only) tests=0 ;;
      --test-only) benches=0 ;;
      --json)
        json=${2:?--json needs a folder}
        shift
        ;;
      *) die "gpu: unknown option '$1'; ./x help shows them" ;;
    esac
    shift
  done
  command -v nvidia-smi >/dev/null || die "gpu: no nvidia-smi, so no GPU driver; see crossdock doctor"
  nvidia-smi --query-gpu=index,name,driver_version --format=csv,noheader >&2
  gpu_configure
  local targets=(gpu_tests crossdock_cli)
  gpu_has_python && targets+=(crossdock_python)
  cmake --build build/gpu --parallel "$(build_jobs)" --target "${targets[@]}" >&2
  export CROSSDOCK_JIT_CACHE_DIR=$ROOT/build/gpu/kernels
  mkdir -p "$json"
  # A failure does not keep the rest from running.
  local broken=()
  rm -rf "$CROSSDOCK_JIT_CACHE_DIR"
  gpu_bench jit "$json" --cache-dir "$CROSSDOCK_JIT_CACHE_DIR" || broken+=("bench jit")
  ((tests == 0)) || gpu_tests || broken+=(tests)
  ((benches == 0)) || gpu_benches "$json" || broken+=(benches)
  ((sanitize == 0)) || gpu_sanitize || broken+=(sanitizers)
  say "figures: $json"
  [[ ${#broken[@]} -eq 0 ]] || die "gpu: failed: ${broken[*]}"
}

# Whether the Python package is part of the build; if not, cmake has said why.
gpu_has_python() { [[ -d build/gpu/python/crossdock ]]; }

gpu_tests() {
  ctest --test-dir build/gpu -L gpu --output-on-failure
}

# One bench of the command: its table on the terminal, its JSON in the folder.
gpu_bench() {
  local name=$1 folder=$2
  shift 2
  say "bench $name"
  timeout 300 build/gpu/tools/crossdock bench "$name" --output "$folder/$name.json" "$@"
}

# Host time of calls from Python, where there is torch to make the tokens.
gpu_bench_python() {
  gpu_has_python || return 0
  if ! python3 -c 'import torch' 2>/dev/null; then
    say "bench python_ep: skipped, python3 has no torch"
    return 0
  fi
  say "bench python_ep"
  PYTHONPATH=build/gpu/python timeout 300 python3 -m crossdock.bench ep --output "$1/python_ep.json"
}

# Every GPU bench that this build has.
gpu_benches() {
  local folder=$1 name hidden failed=0 known more
  known=$(build/gpu/tools/crossdock bench --help)
  for name in symm ep moe; do
    grep -Eq "^ +$name( |\$)" <<<"$known" || continue
    more=()
    [[ $name == ep ]] && more=(--expanded --beside-gemm)
    gpu_bench "$name" "$folder" "${more[@]}" || failed=1
  done
  # Rows that combine cuts where others are whole.
  if grep -Eq "^ +ep( |\$)" <<<"$known"; then
    for hidden in 4096 8192; do
      say "bench ep --hidden $hidden"
      timeout 300 build/gpu/tools/crossdock bench ep --hidden "$hidden" --sms 12 --small-tokens 0 \
        --output "$folder/ep_hidden$hidden.json" || failed=1
    done
  fi
  # Whole expert layers: the same command, told otherwise.
  if grep -Eq "^ +moe( |\$)" <<<"$known"; then
    say "bench moe --chain"
    timeout 300 build/gpu/tools/crossdock bench moe --chain --model v3 \
      --output "$folder/moe_chain.json" || failed=1
  fi
  gpu_bench_python "$folder" || failed=1
  return "$failed"
}
