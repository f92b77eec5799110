# shellcheck shell=bash
# setup [--lint] [--fuzz]: install what is missing (Debian, Ubuntu)
# As root it installs exactly the missing packages; as another user it names them and stops.
# SPDX-License-Identifier: Apache-2.0

readonly BUILD_PACKAGES=(
  cmake ninja-build g++ pkg-config python3
  libfmt-dev libxxhash-dev nlohmann-json3-dev libtomlplusplus-dev libcli11-dev liburing-dev
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
    "build needs fmt 9, xxHash, nlohmann-json, toml++ 3, CLI11 2, liburing and GoogleTest"
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
  if ! command -v dpkg-query >/dev/null; then
    check_other_system
    return
  fi
  local missing
  mapfile -t missing < <(missing_packages "${wanted[@]}")
  [[ ${#missing[@]} -eq 0 ]] && return
  if [[ $(id -u) -ne 0 ]]; then
    die "these packages are missing: ${missing[*]}. As root: apt-get install --no-install-recommends" \
      "${missing[*]}"
  fi
  say "installing ${missing[*]}"
  apt-get update -q >&2
  DEBIAN_FRONTEND=noninteractive apt-get install -y -q --no-install-recommends "${missing[@]}" >&2
}
