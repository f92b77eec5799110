#!/usr/bin/env bash
# run.sh PYTHON PACKAGES FOLDER [options]: pytest on FOLDER with the package of the build tree. 77: that
# Python has no pytest or no NumPy, or every test was skipped.
# SPDX-License-Identifier: Apache-2.0
set -uo pipefail
python=$1 packages=$2 folder=$3
shift 3
for module in pytest numpy; do
  if ! "$python" -c "import $module" 2>/dev/null; then
    echo "skipped: $python has no $module (./x setup)"
    exit 77
  fi
done
log=$(mktemp)
trap 'rm -f "$log"' EXIT
# A test that hangs shows where each thread is, long before ctest ends it.
PYTHONPATH=$packages "$python" -m pytest -q -rs -p no:cacheprovider -o faulthandler_timeout=60 "$@" "$folder" 2>&1 |
  tee "$log"
status=${PIPESTATUS[0]}
# pytest has no code of its own for "all skipped".
tail -n 1 "$log" | grep -Eq 'passed|failed|error' || { ((status == 0 || status == 5)) && exit 77; }
exit "$status"
