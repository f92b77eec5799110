# shellcheck shell=bash
# gpu [--sanitize[=TOOL[:SUITE]] [--seconds N]] [--bench-only|--test-only] [--json DIR]: build and run the GPU tests and benches
# For a host with 1 or more GPUs, a CUDA toolkit, CMake, Ninja, g++ and Python. Third-party headers and
# nanobind come from .deps/ when it is there (./x vendor), else from the system. The Python package is
# built for the python3 on the PATH, which runs its tests and bench when it has torch. Benches print tables and
# store the same as JSON in DIR (build/gpu/figures), from where it can be copied into bench/baseline/.
# Kernels are compiled by the first bench, which times it, into build/gpu/kernels; tests and benches then
# load them from there. --sanitize runs a part of the tests under compute-sanitizer instead (memcheck, racecheck,
# synccheck; or the tool, or the tool and suite, that is named), for at most N seconds (420) after the build.
# SPDX-License-Identifier: Apache-2.0

gpu_configure() {
  local more=()
  [[ -d $ROOT/.deps/usr ]] && more+=("-DCMAKE_PREFIX_PATH=$ROOT/.deps/usr")
  [[ -f build/gpu/build.ninja ]] ||
    cmake -S . -B build/gpu -G Ninja -DCMAKE_BUILD_TYPE=Release -DCROSSDOCK_WERROR=OFF \
      "-DPython_EXECUTABLE=$(command -v python3)" "${more[@]}" >&2
}

# shellcheck source=tools/x/lib/gpu_sanitize.sh
source "$ROOT/tools/x/lib/gpu_sanitize.sh"

x_gpu() {
  local sanitize='' seconds=420 tests=1 benches=1 json=build/gpu/figures
  while (($#)); do
    case $1 in
      --sanitize) sanitize=all ;;
      --sanitize=*) sanitize=${1#*=} ;;
      --seconds)
        seconds=${2:?--seconds needs a number}
        shift
        ;;
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
  [[ -z $sanitize ]] && gpu_has_python && targets+=(crossdock_python)
  cmake --build build/gpu --parallel "$(build_jobs)" --target "${targets[@]}" >&2
  if [[ -n $sanitize ]]; then
    gpu_sanitize "$sanitize" "$seconds" || die "gpu: failed: sanitizers"
    return
  fi
  export CROSSDOCK_JIT_CACHE_DIR=$ROOT/build/gpu/kernels
  mkdir -p "$json"
  # A failure does not keep the rest from running.
  local broken=()
  rm -rf "$CROSSDOCK_JIT_CACHE_DIR"
  gpu_bench jit "$json" jit --cache-dir "$CROSSDOCK_JIT_CACHE_DIR" || broken+=("bench jit")
  ((tests == 0)) || gpu_tests || broken+=(tests)
  ((benches == 0)) || gpu_benches "$json" || broken+=(benches)
  say "figures: $json"
  [[ ${#broken[@]} -eq 0 ]] || die "gpu: failed: ${broken[*]}"
}

# Whether the Python package is part of the build; if not, cmake has said why.
gpu_has_python() { [[ -d build/gpu/python/crossdock ]]; }

gpu_tests() {
  ctest --test-dir build/gpu -L gpu --output-on-failure
}

# One bench of the command: its table on the terminal, its JSON in the folder, and how long it took.
gpu_bench() {
  local file=$1 folder=$2 failed=0 begin=$SECONDS
  shift 2
  say "bench $*"
  timeout 300 build/gpu/tools/crossdock bench "$@" --output "$folder/$file.json" || failed=1
  say "bench $file: $((SECONDS - begin)) s"
  return "$failed"
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

gpu_has_torch() {
  python3 -c 'import sys, torch; sys.exit(not torch.cuda.is_available())' 2>/dev/null
}

# What dispatch and combine do: by SMs, tokens and width, beside products, with skewed choices, and
# few tokens as decoding has them.
gpu_benches_ep() {
  local folder=$1 hidden failed=0
  gpu_bench ep "$folder" ep --expanded --small-tokens 0 || failed=1
  gpu_bench ep_beside "$folder" ep --tokens 4096 --sms 0 --beside-gemm --small-tokens 0 || failed=1
  gpu_bench ep_sizes "$folder" ep --tokens 1 32 512 8192 --sms 0 --small-tokens 0 || failed=1
  gpu_bench ep_zipf "$folder" ep --skewed --sms 0 --small-tokens 0 || failed=1
  # Rows that combine cuts where others are whole, and shorter ones.
  for hidden in 2048 4096 8192; do
    gpu_bench "ep_hidden$hidden" "$folder" ep --hidden "$hidden" --sms 12 --small-tokens 0 || failed=1
  done
  gpu_bench ep_decode "$folder" ep --only-small --overlap --no-host-counts --compressed --masks \
    --expanded || failed=1
  return "$failed"
}

# Grouped products, the same beside torch's, and whole layers.
gpu_benches_moe() {
  local folder=$1 failed=0
  local chain=(moe --chain --format fp8 --tokens 128 8192 --repeat 5)
  gpu_bench moe "$folder" moe --repeat 9 --warm-up 150ms || failed=1
  gpu_bench moe_chain "$folder" "${chain[@]}" --routing even gate-zipf || failed=1
  gpu_bench moe_chain_shared "$folder" "${chain[@]}" --model v3 --shared || failed=1
  if gpu_has_torch; then
    gpu_bench moe_vs_torch "$folder" moe --model v3 --rows 1024 --vs torch --vs-timeout 20s || failed=1
  else
    say "bench moe --vs torch: skipped, python3 has no torch with CUDA"
  fi
  return "$failed"
}

# Every GPU bench that this build has; each says how long it took.
gpu_benches() {
  local folder=$1 failed=0 known begin=$SECONDS
  known=$(build/gpu/tools/crossdock bench --help)
  has() { grep -Eq "^ +$1( |\$)" <<<"$known"; }
  if has symm; then gpu_bench symm "$folder" symm || failed=1; fi
  if has ep; then gpu_benches_ep "$folder" || failed=1; fi
  if has moe; then gpu_benches_moe "$folder" || failed=1; fi
  gpu_bench_python "$folder" || failed=1
  say "benches: $((SECONDS - begin)) s"
  return "$failed"
}
