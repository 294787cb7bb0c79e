#!/usr/bin/env bash
# Installs Debian's packages of the programs that tests start and that must be installed: Chromium (the page) and
# buildah (the image). As root where apt-get is; elsewhere, and without a network, it names what is missing, and the
# tests that need it say that they are skipped, or fail where CI is set. Quick when all is there.
# No test installs any itself: to it /var/lib, with dpkg's state, is an overlay (tests/isolated).
set -euo pipefail

wanted=()
command -v chromium >/dev/null || command -v "${CHROMIUM:-chromium-browser}" >/dev/null ||
    command -v google-chrome >/dev/null || wanted+=(chromium fonts-dejavu-core)
command -v buildah >/dev/null || wanted+=(buildah)
[ "${#wanted[@]}" -gt 0 ] || exit 0
if [ "$(id -u)" != 0 ] || ! command -v apt-get >/dev/null; then
    echo "*** tests/install-programs.sh: not here: ${wanted[*]}; root on Debian could install them" >&2
    exit 0
fi
# Once with the lists that are there, once with new ones.
export DEBIAN_FRONTEND=noninteractive
install=(apt-get install --yes --quiet --no-install-recommends "${wanted[@]}")
"${install[@]}" >&2 || { apt-get update --quiet >&2 && "${install[@]}" >&2; } ||
    echo "*** tests/install-programs.sh: cannot install ${wanted[*]}" >&2
