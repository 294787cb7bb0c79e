#!/usr/bin/env bash
# Unpacks Debian packages into DIRECTORY, from the mirror that this machine's apt is configured for,
# without installing them and without touching apt's configuration. Absolute links are made to lead
# into DIRECTORY.
# Usage: fetch-packages.sh DIRECTORY SUITE COMPONENT PACKAGE...
# Exit status: 0 there, 75 (EX_TEMPFAIL) cannot be had here, with the reason on standard error.
set -euo pipefail

[ $# -ge 4 ] || { sed -n '2,6p' "${BASH_SOURCE[0]}" >&2; exit 64; }
out="$(realpath -m "$1")" suite=$2 component=$3
shift 3
unavailable() {
    echo "fetch-packages.sh: $*" >&2
    exit 75
}

# Two test processes may come here at once.
mkdir -p "$out"
exec 9>"$out/.lock"
flock 9
[ "$(cat "$out/.packages" 2>/dev/null)" != "$*" ] || exit 0

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
mkdir -p "$private/lists/partial" "$private/cache/archives/partial"
: >"$private/status"
echo "deb [signed-by=$keyring] $mirror $suite $component" >"$private/sources.list"
options=(
    -o "Dir::Etc::SourceList=$private/sources.list"
    -o "Dir::Etc::SourceParts=-"
    -o "Dir::State::Lists=$private/lists"
    -o "Dir::State::Status=$private/status" # nothing is installed: any version will do
    -o "Dir::Cache=$private/cache"
    -o "Acquire::Languages=none"
    -o "Acquire::Retries=2"
    -o "Acquire::http::Timeout=20"
)
[ "$(id -u)" != 0 ] || options+=(-o "APT::Sandbox::User=root")
cd "$private"
apt-get "${options[@]}" -qq update >&2 || unavailable "cannot reach $mirror"
apt-get "${options[@]}" -qq download "$@" >&2 || unavailable "not all of $* in $suite of $mirror"
for package in ./*.deb; do
    dpkg-deb -x "$package" "$out"
done
# Links lead to where the packages would be installed.
out="$(cd "$out" && pwd)"
find "$out" -type l -lname '/*' ! -lname "$out/*" -print0 | while IFS= read -r -d '' link; do
    ln -sfn "$out$(readlink "$link")" "$link"
done
echo "$*" >"$out/.packages"
