#!/usr/bin/env bash
# The shared library exports crossdock names only and needs the C and C++ runtime only:
# check_exports.sh LIBRARY
# SPDX-License-Identifier: Apache-2.0
set -euo pipefail
library=$1
foreign=$(nm -DC --defined-only "$library" | cut -d' ' -f3- |
  grep -vE '^(crossdock::|crossdock_|(typeinfo|typeinfo name|vtable) for crossdock::)' || true)
[[ -z $foreign ]] || { printf 'exports foreign symbols:\n%s\n' "$foreign" && exit 1; }
# Read to the end: a grep that leaves early breaks nm's pipe, which counts as a failure.
nm -DC --defined-only "$library" | grep 'crossdock::v1::Error::describe' >/dev/null ||
  { echo "does not export the public API" && exit 1; }
needed=$(objdump -p "$library" | awk '$1 == "NEEDED" {print $2}' |
  grep -vE '^(libstdc\+\+|libm|libgcc_s|libc|libpthread|libdl|ld-linux.*)\.so' || true)
[[ -z $needed ]] || { printf 'needs more than the C and C++ runtime:\n%s\n' "$needed" && exit 1; }
