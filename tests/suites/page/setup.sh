#!/usr/bin/env bash
# Makes the Python environment that the page's tests use, in DIRECTORY, at the versions of requirements.txt, and
# sees that there is a Chromium: root installs Debian's. Quick when all is there. Prints Chromium's path. Exit status
# 75: something can't be had. CHROMIUM names another Chromium or Chrome.
set -euo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
[ $# -eq 1 ] || { sed -n '2,4p' "${BASH_SOURCE[0]}" >&2; exit 64; }
mkdir -p "$1"
exec 9>"$1/../.page-tools.lock"
flock 9

chromium() {
    local name
    for name in ${CHROMIUM:-chromium chromium-browser google-chrome}; do
        command -v "$name" && return
    done
    return 1
}

if ! chromium >/dev/null; then
    hint="no Chromium: install the package chromium, or name one in CHROMIUM"
    if [ -n "${CHROMIUM:-}" ] || [ "$(id -u)" -ne 0 ] || ! command -v apt-get >/dev/null; then
        echo "$hint" >&2
        exit 75
    fi
    # Once with the lists that are there, once with new ones.
    export DEBIAN_FRONTEND=noninteractive
    install=(apt-get install --yes --quiet --no-install-recommends chromium fonts-dejavu-core)
    "${install[@]}" >&2 || { apt-get update --quiet >&2 && "${install[@]}" >&2; } || { echo "$hint" >&2; exit 75; }
fi
"$here/../../../tools/venv" "$1" "$here/requirements.txt" >&2
chromium
