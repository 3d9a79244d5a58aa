#!/usr/bin/env bash
# Prints the name of a working C++17 compiler, or says that one is missing. $CXX is tried first.
set -u

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cat >"$folder/probe.cc" <<'PROGRAM'
#include <optional>
#include <thread>
int main() {
  std::optional<int> status;
  if constexpr (sizeof(int) >= 4) {
    std::thread([&] { status = 0; }).join();
  }
  return status.value();
}
PROGRAM

for compiler in ${CXX:-} c++ g++ clang++; do
  if command -v "$compiler" >/dev/null 2>&1 &&
    "$compiler" -std=c++17 -pthread "$folder/probe.cc" -o "$folder/probe" >/dev/null 2>&1 &&
    "$folder/probe"; then
    echo "$compiler"
    exit 0
  fi
done

cat >&2 <<MESSAGE
Cokernel needs a C++17 compiler to build its runtime, and none was found (tried ${CXX:+$CXX, }c++, g++, clang++).
Install one (Debian: apt-get install g++; Fedora: dnf install gcc-c++; macOS: xcode-select
--install), or name one: make CXX=/path/to/clang++
MESSAGE
exit 1
