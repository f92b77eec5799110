# shellcheck shell=bash
# vendor: fill .deps/ with the third-party headers and libraries, for a machine without a registry
# Downloads the same Debian packages that `./x setup` installs and unpacks them below .deps/usr, and
# nanobind's sources from PyPI into .deps/nanobind. Git ignores .deps, which has at most 20 MB or the command
# fails. Needs apt-get, dpkg and Python with pip here, nothing on the other machine.
# SPDX-License-Identifier: Apache-2.0

readonly VENDORED=(libfmt-dev libfmt9 libxxhash-dev nlohmann-json3-dev libtomlplusplus-dev libcli11-dev
  libgtest-dev libgmock-dev)
readonly MOST_MEGABYTES=20

x_vendor() {
  command -v apt-get >/dev/null || die "vendor needs apt-get; run it on Debian or Ubuntu"
  local work
  work=$(mktemp -d)
  (cd "$work" && apt-get download -qq "${VENDORED[@]}") || die "cannot download ${VENDORED[*]}"
  rm -rf "$ROOT/.deps"
  mkdir -p "$ROOT/.deps"
  local package
  for package in "$work"/*.deb; do
    dpkg -x "$package" "$ROOT/.deps"
  done
  vendor_nanobind "$work"
  rm -rf "$work" "$ROOT/.deps/usr/share/doc"
  local megabytes
  megabytes=$(du -sm "$ROOT/.deps" | cut -f1)
  ((megabytes <= MOST_MEGABYTES)) ||
    die ".deps holds $megabytes MB, more than the $MOST_MEGABYTES that may travel: vendor fewer or smaller packages"
  say ".deps holds $megabytes MB: ${VENDORED[*]} nanobind"
}

# A wheel of nanobind is its sources, with those of the one library it needs.
vendor_nanobind() {
  local requirement
  requirement=$(grep '^nanobind' "$ROOT/python/requirements-dev.txt")
  python3 -m pip download -q --no-deps --disable-pip-version-check -d "$1" "$requirement" >&2 ||
    die "vendor cannot download $requirement from PyPI"
  python3 -m zipfile -e "$1"/nanobind-*.whl "$ROOT/.deps"
  rm -rf "$ROOT"/.deps/nanobind-*.dist-info
}
