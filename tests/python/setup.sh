#!/usr/bin/env bash
# Makes .venv at the repository's root with the clients and headers that the tests use, at the
# versions of requirements.txt. Quick when it is there already.
set -euo pipefail

here="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)"
venv="$here/../../.venv"
python="${PYTHON:-python3}"
requirements="$here/requirements.txt"

# The stamp is written last, so that an interrupted run is done again.
stamp="$venv/.requirements"
if [ -x "$venv/bin/python" ] && cmp -s "$requirements" "$stamp" && "$venv/bin/python" -c ''; then
    exit 0
fi

if ! command -v "$python" >/dev/null; then
    echo "tests/python/setup.sh: no $python: install Python 3.10 or newer, or set PYTHON" >&2
    exit 1
fi
rm -f "$stamp"
if ! "$python" -m venv --clear "$venv"; then
    echo "tests/python/setup.sh: $python can't make virtual environments;" \
        "on Debian and Ubuntu: apt install python3-venv" >&2
    exit 1
fi
if ! "$venv/bin/pip" --disable-pip-version-check --quiet install --requirement "$requirements"; then
    # Without a network the tests that need these say that they are skipped; on CI they must run.
    case "${CI:-false}" in
    false) echo "*** tests/python/setup.sh: no packages; tests that need them are SKIPPED" >&2 && exit 0 ;;
    *) exit 1 ;;
    esac
fi
cp "$requirements" "$stamp"
