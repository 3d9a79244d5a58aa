#!/usr/bin/env bash
# Prints the path of a Python >= 3.12, preferring the version in .python-version.
# A candidate counts only if it runs: version managers leave shims on PATH for versions
# that are not active, and those exist but refuse to start.
set -u
cd "$(dirname "$0")/.."

wanted=$(cat .python-version)
minimum="import sys; sys.exit(sys.version_info < (3, 12))"

works() {
  [ -x "$1" ] && "$1" -c "$minimum" >/dev/null 2>&1
}

candidates() {
  [ -n "${PYTHON:-}" ] && command -v "$PYTHON"
  local version root
  for version in "$wanted" 3.13 3.12 3.14; do
    type -aP "python$version"
    for root in ${PYENV_ROOT:+"$PYENV_ROOT"} "$HOME/.pyenv"; do
      ls -d "$root"/versions/"$version"*/bin/python"$version" 2>/dev/null
    done
    ls -d "$HOME"/.local/share/uv/python/cpython-"$version"*/bin/python"$version" 2>/dev/null
  done
  type -aP python3 python
}

while read -r candidate; do
  if works "$candidate"; then
    # The path of the interpreter itself, and not of a shim that depends on the folder.
    exec "$candidate" -c "import sys; print(sys.executable)"
  fi
done < <(candidates)

found=$(python3 --version 2>/dev/null || echo "none")
cat >&2 <<MESSAGE
Cokernel needs Python 3.12 or newer, and none was found (python3 on PATH: $found).
Install one (for example Debian: apt-get install python3 python3-venv; macOS: brew install
python@$wanted; pyenv: pyenv install $wanted), or name one: make PYTHON=/path/to/python3.13
MESSAGE
exit 1
