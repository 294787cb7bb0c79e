#!/usr/bin/env bash
# Unpacks NVIDIA's libcuda.so.1 and libnvidia-ml.so.1 from Debian's non-free archive into DIRECTORY,
# from the mirror that this machine's apt is configured for. The files are for checks on this
# machine only; they are never part of anything that is distributed.
# Usage: fetch-libcuda.sh DIRECTORY
# Exit status: 0 there, 75 (EX_TEMPFAIL) cannot be had here, with the reason on standard error.
set -euo pipefail

out="${1:?usage: fetch-libcuda.sh DIRECTORY}"
unavailable() {
    echo "fetch-libcuda.sh: $*" >&2
    exit 75
}

# Two test processes may come here at once.
mkdir -p "$out"
exec 9>"$out/.lock"
flock 9
[ -e "$out/lib/libcuda.so.1" ] && [ -e "$out/lib/libnvidia-ml.so.1" ] && exit 0

for tool in apt-get dpkg-deb; do
    command -v "$tool" >/dev/null || unavailable "needs $tool (a Debian-like system)"
done
[ "$(dpkg --print-architecture)" = amd64 ] || unavailable "needs amd64"

# The mirror of the configured Debian suites: deb822 files first, then one-line ones.
mirror="$(cat /etc/apt/sources.list.d/*.sources 2>/dev/null |
    awk '$1 == "URIs:" && $2 ~ /\/debian\/?$/ { print $2; exit }')"
[ -n "$mirror" ] || mirror="$(cat /etc/apt/sources.list /etc/apt/sources.list.d/*.list 2>/dev/null |
    awk '$1 == "deb" { for (i = 2; i <= NF; i++) if ($i ~ /\/debian\/?$/) { print $i; exit } }')"
keyring=/usr/share/keyrings/debian-archive-keyring.gpg
[ -n "$mirror" ] || unavailable "no Debian mirror is configured in /etc/apt"
[ -e "$keyring" ] || unavailable "$keyring is missing (package debian-archive-keyring)"

# An apt of its own: nothing of this machine's configuration changes.
private="$(mktemp -d)"
trap 'rm -rf "$private"' EXIT
mkdir -p "$private/lists/partial" "$private/cache/archives/partial" "$private/unpacked"
echo "deb [signed-by=$keyring] $mirror trixie non-free" >"$private/sources.list"
options=(
    -o "Dir::Etc::SourceList=$private/sources.list"
    -o "Dir::Etc::SourceParts=-"
    -o "Dir::State::Lists=$private/lists"
    -o "Dir::Cache=$private/cache"
    -o "Acquire::Retries=2"
    -o "Acquire::http::Timeout=20"
)
[ "$(id -u)" != 0 ] || options+=(-o "APT::Sandbox::User=root")
cd "$private"
apt-get "${options[@]}" -qq update >&2 || unavailable "cannot reach $mirror"
apt-get "${options[@]}" -qq download libcuda1 libnvidia-ml1 >&2 || unavailable "not in $mirror"
for package in ./*.deb; do
    dpkg-deb -x "$package" "$private/unpacked"
done
mkdir -p "$out/lib"
for library in libnvidia-ml libcuda; do
    file="$(find "$private/unpacked" -type f -name "$library.so.[0-9]*" -print -quit)"
    [ -n "$file" ] || unavailable "no $library in the package"
    cp "$file" "$out/lib/$(basename "$file")"
    ln -sf "$(basename "$file")" "$out/lib/$library.so.1"
done
