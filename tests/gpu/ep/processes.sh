#!/usr/bin/env bash
# processes.sh CROSSDOCK: dispatch and combine between one process for each GPU, or GPU_TEST_RANKS of them,
# at least two, which share GPUs where there are fewer; results compared by `crossdock bench ep` in every
# process. 77: there is no GPU.
# SPDX-License-Identifier: Apache-2.0
set -uo pipefail
crossdock=$1
gpus=$(nvidia-smi -L 2>/dev/null | grep -c '^GPU') || true
if ((gpus < 1)); then
  echo "skipped: needs a GPU, found none"
  exit 77
fi
ranks=${GPU_TEST_RANKS:-$gpus}
((ranks >= 2)) || ranks=2
# Processes on one GPU run in turns of some milliseconds: fewer calls, which is what more tokens bring.
size=(--tokens 512)
repeat=2
if ((ranks > gpus)); then
  export CROSSDOCK_SYMM_SHARE_GPUS=true
  size=(--tokens 1024 --small-tokens 0)
  repeat=1
fi
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
children=()
for ((rank = 0; rank < ranks; ++rank)); do
  timeout 200 "$crossdock" bench ep --rank "$rank" --world "$ranks" --store "file://$folder" \
    "${size[@]}" --sms 12 --repeat "$repeat" --timeout 150s >"$folder/out.$rank" 2>&1 &
  children+=($!)
done
failed=0
for ((rank = 0; rank < ranks; ++rank)); do
  wait "${children[rank]}" || failed=1
done
cat "$folder"/out.*
exit "$failed"
