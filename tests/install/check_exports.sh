#!/usr/bin/env bash
# The shared library exports crossdock names only, all of them that are public, and needs the C and C++
# runtime only: check_exports.sh LIBRARY. The static library lies beside it.
# SPDX-License-Identifier: Apache-2.0
set -euo pipefail
library=$1
foreign=$(nm -DC --defined-only "$library" | cut -d' ' -f3- |
  grep -vE '^(crossdock::|crossdock_|(typeinfo|typeinfo name|vtable) for crossdock::)' || true)
[[ -z $foreign ]] || { printf 'exports foreign symbols:\n%s\n' "$foreign" && exit 1; }
# Public is what has a version in its name; CROSSDOCK_API is easily forgotten, and then the static library
# alone has the function.
public_functions() { sed -nE 's/^[0-9a-f]+ T (crossdock::([a-z_]+::)?v1::)/\1/p' | grep -vF '::detail::' | sort -u; }
declared=$(nm -C --defined-only "${library%.so}.a" | public_functions)
exported=$(nm -DC --defined-only "$library" | public_functions)
[[ $declared == *crossdock::v1::Error::describe* ]] ||
  { echo "the static library holds no public API" && exit 1; }
hidden=$(comm -23 <(echo "$declared") <(echo "$exported"))
[[ -z $hidden ]] || { printf 'lacks CROSSDOCK_API:\n%s\n' "$hidden" && exit 1; }
needed=$(objdump -p "$library" | awk '$1 == "NEEDED" {print $2}' |
  grep -vE '^(libstdc\+\+|libm|libgcc_s|libc|libpthread|libdl|ld-linux.*)\.so' || true)
[[ -z $needed ]] || { printf 'needs more than the C and C++ runtime:\n%s\n' "$needed" && exit 1; }
