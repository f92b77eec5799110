# shellcheck shell=bash
# lint [--fast] [--all] [--fix]: format, layers, headers, clang-tidy, shellcheck, spelling, sizes
# clang-tidy looks at files that differ from the main branch; --all at every file, --fast at none.
# --fix lets clang-format rewrite. A check whose tool is missing fails; setup installs them.
# SPDX-License-Identifier: Apache-2.0

readonly CODE_FOLDERS=(include src tools tests device bench examples python)

# Tracked and new files below the code folders with one of the endings.
code_files() {
  local ending=$1
  git ls-files -c -o --exclude-standard -- "${CODE_FOLDERS[@]}" | grep -E "\\.($ending)\$" | sort -u |
    while read -r file; do [[ -f $file ]] && echo "$file"; done
}

changed_files() {
  {
    git diff --name-only --diff-filter=d "$(git merge-base HEAD main 2>/dev/null || echo HEAD)"
    git ls-files -o --exclude-standard
  } | grep -E '^(src|tools)/.*\.cpp$' | sort -u
}

check_format() {
  local mode=(--dry-run -Werror)
  ((LINT_FIX)) && mode=(-i)
  code_files 'hpp|cpp|cuh|cu|h|c' | xargs -r clang-format-19 "${mode[@]}"
}

check_tidy() {
  local files
  case $LINT_SCOPE in
    fast) return 0 ;;
    all) mapfile -t files < <(git ls-files 'src/*.cpp' 'tools/*.cpp') ;;
    *) mapfile -t files < <(changed_files) ;;
  esac
  [[ ${#files[@]} -gt 0 ]] || return 0
  [[ -f build/dev/compile_commands.json ]] || cmake --preset dev >/dev/null
  # The commands may be of another compiler, whose warnings clang does not all know.
  printf '%s\0' "${files[@]}" |
    xargs -0 -n 4 -P "$(cpus)" clang-tidy-19 -p build/dev --quiet --warnings-as-errors='*' \
      --extra-arg=-Wno-unknown-warning-option
}

check_headers() {
  python3 cmake/check_headers.py --include include include &&
    python3 cmake/check_headers.py --include include --include src --include device src
}

check_shell() { shellcheck -x x tools/x/*.sh tools/x/lib/*.sh tests/python/*.sh .ci/run; }

check_spelling() {
  git ls-files -c -o --exclude-standard | grep -vE '\.(svg|jsonl|json)$|^LICENSE$' |
    xargs codespell --ignore-words-list "$(tr '\n' ',' <tools/x/lib/spelling_ignore.txt)"
}

x_lint() {
  LINT_SCOPE=changed LINT_FIX=0
  while (($#)); do
    case $1 in
      --fast) LINT_SCOPE=fast ;;
      --all) LINT_SCOPE=all ;;
      --fix) LINT_FIX=1 ;;
      *) die "lint: unknown option '$1'; there are --fast, --all and --fix" ;;
    esac
    shift
  done
  load setup
  x_setup --lint
  local failed=() check
  for check in format layers style headers shell spelling tidy; do
    say "lint: $check"
    case $check in
      layers) python3 cmake/check_layers.py || failed+=("$check") ;;
      style) python3 cmake/check_style.py || failed+=("$check") ;;
      *) "check_$check" || failed+=("$check") ;;
    esac
  done
  [[ ${#failed[@]} -eq 0 ]] || die "lint failed: ${failed[*]}"
  say "lint: clean"
}
