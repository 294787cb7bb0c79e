#!/bin/sh
# Runs a command in a mount namespace that looks like a container which the plugin has set up.
# Usage: in-container.sh SCRATCH_DIRECTORY PAGES_DIRECTORY SHIM COMMAND [ARGUMENT…]
# The pages directory is mounted read-only at its fixed place with `usage` writable on top of it, as plugins
# did that knew one share for each container; or, where it holds a directory for each share, each of them in
# the place. The shim and an /etc/ld.so.preload that names it are mounted too. SHIM `-`: neither of the two.
set -eu
scratch="$1"
pages="$2"
shim="$3"
shift 3
place=/usr/local/tessera

# Overlays, so that mount points can be made without touching this machine's directories.
mount -t tmpfs tmpfs "$scratch"
for directory in /usr/local /etc; do
    name="$(basename "$directory")"
    mkdir -p "$scratch/$name/upper" "$scratch/$name/work"
    mount -t overlay overlay \
        -o "lowerdir=$directory,upperdir=$scratch/$name/upper,workdir=$scratch/$name/work" "$directory"
done
mkdir -p "$place/pages"
give() {
    mkdir -p "$2"
    mount --bind "$1" "$2"
    mount -o remount,bind,ro "$2"
    if [ -f "$1/usage" ]; then
        mount --bind "$1/usage" "$2/usage"
    fi
}
several=
for share in "$pages"/*/; do
    [ -d "$share" ] || continue
    several=1
    give "${share%/}" "$place/pages/$(basename "$share")"
done
[ -n "$several" ] || give "$pages" "$place/pages"
if [ "$shim" != - ]; then
    touch "$place/libtessera.so"
    mount --bind "$shim" "$place/libtessera.so"
    echo "$place/libtessera.so" >/etc/ld.so.preload
fi
exec "$@"
