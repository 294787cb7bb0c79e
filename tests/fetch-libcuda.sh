#!/usr/bin/env bash
# Unpacks NVIDIA's libcuda.so.1 and libnvidia-ml.so.1 from Debian's non-free archive into DIRECTORY.
# The files are for checks on this machine only; they are never part of anything that is distributed.
# Usage: fetch-libcuda.sh DIRECTORY
# Exit status: 0 there, 75 (EX_TEMPFAIL) cannot be had here, with the reason on standard error.
set -euo pipefail

out="${1:?usage: fetch-libcuda.sh DIRECTORY}"
here="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)"

# Two test processes may come here at once.
mkdir -p "$out"
exec 9>"$out/.lock"
flock 9
[ -e "$out/lib/libcuda.so.1" ] && [ -e "$out/lib/libnvidia-ml.so.1" ] && exit 0

unpacked="$(mktemp -d)"
trap 'rm -rf "$unpacked"' EXIT
"$here/fetch-packages.sh" "$unpacked" trixie non-free libcuda1 libnvidia-ml1
mkdir -p "$out/lib"
for library in libnvidia-ml libcuda; do
    file="$(find "$unpacked" -type f -name "$library.so.[0-9]*" -print -quit)"
    [ -n "$file" ] || { echo "fetch-libcuda.sh: no $library in the package" >&2; exit 75; }
    cp "$file" "$out/lib/$(basename "$file")"
    ln -sf "$(basename "$file")" "$out/lib/$library.so.1"
done
