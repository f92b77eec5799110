#!/usr/bin/env bash
# processes.sh CROSSDOCK: dispatch and combine between one process for each GPU, results compared by
# `crossdock bench ep` in every process. 77: there are not two GPUs.
# SPDX-License-Identifier: Apache-2.0
set -uo pipefail
crossdock=$1
gpus=$(nvidia-smi -L 2>/dev/null | grep -c '^GPU') || true
if ((gpus < 2)); then
  echo "skipped: needs two GPUs, found $gpus"
  exit 77
fi
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
children=()
for ((rank = 0; rank < gpus; ++rank)); do
  timeout 200 "$crossdock" bench ep --rank "$rank" --world "$gpus" --store "file://$folder" \
    --tokens 512 --sms 12 --repeat 2 --timeout 150s >"$folder/out.$rank" 2>&1 &
  children+=($!)
done
failed=0
for ((rank = 0; rank < gpus; ++rank)); do
  wait "${children[rank]}" || failed=1
done
cat "$folder"/out.*
exit "$failed"
