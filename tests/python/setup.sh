#!/usr/bin/env bash
# Makes .venv at the repository's root with the clients and headers that the tests use, at the
# versions of requirements.txt. Quick when it is there already.
set -euo pipefail

here="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)"
root="$(cd "$here/../.." && pwd)"

status=0
"$root/tools/venv" "$root/.venv" "$here/requirements.txt" || status=$?
if [ "$status" -eq 75 ]; then
    # Without a network the tests that need these say that they are skipped; on CI they must run.
    case "${CI:-false}" in
    false) echo "*** tests/python/setup.sh: no packages; tests that need them are SKIPPED" >&2 && exit 0 ;;
    esac
fi
exit "$status"
