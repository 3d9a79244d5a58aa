#!/usr/bin/env bash
# Builds and runs the runtime's own C++ tests, once under the address and undefined-behaviour
# sanitizers and once under the thread sanitizer. Each file of tests/runtime/ is one program with
# a main(); it is linked with every file of the runtime but the Python module.
set -euo pipefail
cd "$(dirname "$0")/.."
python=$1

compiler=$(scripts/check_compiler.sh)
headers=$("$python" -c "import jax.ffi; print(jax.ffi.include_dir())")
folder=build/sanitize
mkdir -p "$folder"

shopt -s nullglob
sources=()
for source in src/cokernel/runtime/*.cc src/cokernel/runtime/checked/*.cc; do
  grep -q nanobind "$source" || sources+=("$source")
done
tests=(tests/runtime/*.cc)
if [ ${#tests[@]} -eq 0 ]; then
  echo "There are no tests in tests/runtime/." >&2
  exit 1
fi

for sanitizer in address,undefined thread; do
  objects=()
  for source in "${sources[@]}"; do
    object="$folder/$(basename "$source" .cc).${sanitizer/,/_}.o"
    "$compiler" -std=c++17 -O1 -g -fno-omit-frame-pointer -fsanitize="$sanitizer" \
      -fno-sanitize-recover=all -pthread -Isrc/cokernel/runtime -isystem "$headers" \
      -c "$source" -o "$object"
    objects+=("$object")
  done
  for test in "${tests[@]}"; do
    program="$folder/$(basename "$test" .cc).${sanitizer/,/_}"
    "$compiler" -std=c++17 -O1 -g -fno-omit-frame-pointer -fsanitize="$sanitizer" \
      -fno-sanitize-recover=all -pthread -Isrc/cokernel/runtime -isystem "$headers" \
      "$test" "${objects[@]}" -ldl -o "$program"
    echo "$(basename "$test") under -fsanitize=$sanitizer"
    TSAN_OPTIONS="halt_on_error=1 ${TSAN_OPTIONS:-}" "$program"
  done
done
