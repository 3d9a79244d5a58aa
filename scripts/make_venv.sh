#!/usr/bin/env bash
# Makes the virtual environment $1 unless a working one of Python >= 3.12 is there already.
set -eu
cd "$(dirname "$0")/.."
venv=$1

if "$venv/bin/python" -c "import sys, pip; sys.exit(sys.version_info < (3, 12))" 2>/dev/null; then
  exit 0
fi

python=$(scripts/find_python.sh)
if ! "$python" -c "import venv, ensurepip" 2>/dev/null; then
  echo "$python has no venv module, which Cokernel's make needs." >&2
  echo "Install it (Debian: apt-get install python3-venv) or name another Python: make PYTHON=..." >&2
  exit 1
fi
echo "Making $venv with $("$python" --version) ($python)"
"$python" -m venv --clear "$venv"
