# shellcheck shell=bash
# setup [--lint] [--fuzz]: install what is missing (Debian, Ubuntu), and make .venv for Python
# As root it installs exactly the missing packages; as another user it names them and stops. .venv gets
# what python/requirements-dev.txt lists from PyPI; where that cannot be reached, the Python package is
# not built and its tests say so. CROSSDOCK_NO_VENV=1 leaves Python alone.
# SPDX-License-Identifier: Apache-2.0

readonly BUILD_PACKAGES=(
  cmake ninja-build g++ pkg-config python3 python3-dev python3-venv
  libfmt-dev libxxhash-dev nlohmann-json3-dev libtomlplusplus-dev libcli11-dev
  libgtest-dev libgmock-dev
)
readonly LINT_PACKAGES=(clang-format-19 clang-tidy-19 shellcheck codespell git)
readonly FUZZ_PACKAGES=(clang-19 libclang-rt-19-dev)

# Prints the packages of its arguments that are not installed.
missing_packages() {
  local package
  for package in "$@"; do
    [[ $(dpkg-query -W -f '${db:Status-Status}' "$package" 2>/dev/null) == installed ]] ||
      echo "$package"
  done
}

# Without dpkg we cannot name packages; the compilers at least can be looked for.
check_other_system() {
  local tool missing=()
  for tool in cmake ninja c++ pkg-config python3; do
    command -v "$tool" >/dev/null || missing+=("$tool")
  done
  [[ ${#missing[@]} -eq 0 ]] && return
  die "this is neither Debian nor Ubuntu, and these are missing: ${missing[*]}. Besides them the" \
    "build needs fmt 9, xxHash, nlohmann-json, toml++ 3, CLI11 2 and GoogleTest"
}

# A Python that can make an environment and compile modules: the first on the PATH, else the system's.
usable_python() {
  local python check='import ensurepip, os, sys, sysconfig, venv
headers = os.path.join(sysconfig.get_paths()["include"], "Python.h")
sys.exit(sys.version_info < (3, 10) or not os.path.exists(headers))'
  for python in python3 /usr/bin/python3; do
    if "$python" -c "$check" 2>/dev/null; then
      echo "$python"
      return
    fi
  done
  return 1
}

# .venv/complete has the requirements that were installed: nothing to do until they change.
setup_python() {
  local list=$ROOT/python/requirements-dev.txt venv=$ROOT/.venv python
  [[ -z ${CROSSDOCK_NO_VENV:-} ]] || return 0
  cmp -s "$list" "$venv/complete" && return
  if ! python=$(usable_python); then
    say "no .venv: there is no Python 3.10 or newer with venv and headers; Python tests will be skipped"
    return 0
  fi
  say "making .venv for the Python package"
  rm -rf "$venv"
  if "$python" -m venv "$venv" >&2 && timeout 300 "$venv/bin/python" -m pip install -q --retries 1 \
    --timeout 20 --disable-pip-version-check -r "$list" >&2; then
    cp "$list" "$venv/complete"
  else
    rm -rf "$venv"
    say "no .venv: PyPI cannot be reached or lacks a package of ${list#"$ROOT"/};" \
      "Python tests will be skipped"
  fi
}

x_setup() {
  local wanted=("${BUILD_PACKAGES[@]}")
  while (($#)); do
    case $1 in
      --lint) wanted+=("${LINT_PACKAGES[@]}") ;;
      --fuzz) wanted+=("${FUZZ_PACKAGES[@]}") ;;
      *) die "setup: unknown option '$1'; there are --lint and --fuzz" ;;
    esac
    shift
  done
  setup_system "${wanted[@]}"
  setup_python
}

setup_system() {
  if ! command -v dpkg-query >/dev/null; then
    check_other_system
    return
  fi
  local missing
  mapfile -t missing < <(missing_packages "$@")
  [[ ${#missing[@]} -eq 0 ]] && return
  if [[ $(id -u) -ne 0 ]]; then
    die "these packages are missing: ${missing[*]}. As root: apt-get install --no-install-recommends" \
      "${missing[*]}"
  fi
  say "installing ${missing[*]}"
  apt-get update -q >&2
  DEBIAN_FRONTEND=noninteractive apt-get install -y -q --no-install-recommends "${missing[@]}" >&2
}
