#!/usr/bin/env bash
# Builds and runs the consumer with pkg-config alone: pkg_config_consumer.sh static|shared STAGE LIBDIR
# COMPILER WORKDIR. The prefix is found from where the .pc file lies.
# SPDX-License-Identifier: Apache-2.0
set -euo pipefail
form=$1 stage=$2 libdir=$3 compiler=$4 workdir=$5
export PKG_CONFIG_PATH=$stage/$libdir/pkgconfig
pkg-config --exists --print-errors crossdock
source=$(dirname "${BASH_SOURCE[0]}")/consumer/main.cpp
program=$workdir/pkg_config_$form
read -ra cflags <<<"$(pkg-config --cflags crossdock)"
if [[ $form == static ]]; then
  read -ra libs <<<"$(pkg-config --static --libs crossdock)"
  libs=("${libs[@]/#-lcrossdock/-l:libcrossdock.a}")
else
  read -ra libs <<<"$(pkg-config --libs crossdock)"
  libs+=("-Wl,-rpath,$stage/$libdir")
fi
"$compiler" -std=c++20 "${cflags[@]}" "$source" "${libs[@]}" -o "$program"
"$program"
if [[ $(ldd "$program") == *libcrossdock* ]]; then linked=shared; else linked=static; fi
[[ $linked == "$form" ]] || { echo "linked $linked, expected $form" && exit 1; }
