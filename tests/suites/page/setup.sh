#!/usr/bin/env bash
# Makes the Python environment that the page's tests use, in DIRECTORY, at the versions of requirements.txt, and
# finds Chromium. Quick when all is there. Prints Chromium's path. Exit status 75: something can't be had. CHROMIUM
# names another Chromium or Chrome.
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
    echo "no Chromium: run tests/install-programs.sh as root (make does), or name one in CHROMIUM" >&2
    exit 75
fi
"$here/../../../tools/venv" "$1" "$here/requirements.txt" >&2
chromium
