#!/usr/bin/env bash
# Makes the Python environment that the tests of deploy/ use, in DIRECTORY, at the versions of
# requirements.txt. Quick when it is there already. Exit status 75: the packages can't be fetched.
set -euo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
[ $# -eq 1 ] || { sed -n '2,3p' "${BASH_SOURCE[0]}" >&2; exit 64; }
mkdir -p "$1"
exec 9>"$1/../.deploy-tools.lock"
flock 9
"$here/../../tools/venv" "$1" "$here/requirements.txt"
# The wheel brings its library under three names, 85 MB each.
for library in "$1"/lib/python3*/site-packages/helm_python/lib/libhelm_c.so; do
    for name in "$library".0*; do
        ! cmp -s "$library" "$name" || ln -f "$library" "$name"
    done
done
