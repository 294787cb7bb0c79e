"""Checks of the image: deploy/Dockerfile is built by BUILDAH, every line of it, in the work tree's copy.

The base image is a stand-in, made here: this machine's /usr, and in front of it an apt-get that installs nothing and a
cargo that says what it was asked for and makes empty programs. So this shows which layers are built again and what
lands in the image, in seconds and without a registry; it does not show that the sources compile in Debian's image,
which the release does.
"""

import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from engine import ROOT
from registry import check

STAND_INS = {
    "apt-get": 'echo "stand-in apt-get: $*"',
    "busybox": "printf '%s\\n' busybox sh sleep",
    "rustc": "echo 'host: @triple@'",
    "python3": """\
if [ "$1 $2" = '-m venv' ]; then
    mkdir -p "$4/bin"
    printf '#!/bin/sh\\necho /zig\\n' >"$4/bin/python"
    printf '#!/bin/sh\\necho "stand-in pip: $*"\\n' >"$4/bin/pip"
    chmod +x "$4"/bin/*
else
    exec @python@ "$@"
fi""",
    "cargo": """\
case "$1" in
metadata) exec @sysroot@/bin/cargo "$@" ;;
build)
    mkdir -p "$CARGO_TARGET_DIR/release"
    if [ "$PWD" = /skeleton ]; then
        touch "$CARGO_TARGET_DIR/.skeleton"
    elif [ -n "$(find . -name '*.rs' ! -newer "$CARGO_TARGET_DIR/.skeleton" | head -1)" ]; then
        echo "cargo would take what it made of the skeleton: a source is older"
        exit 1
    else
        for file in @included@; do
            [ -e "$file" ] || { echo "a source includes $file, which .dockerignore leaves out"; exit 1; }
        done
    fi
    for name in tessera simgpu-ctl tessera-tenant libsimcuda.so libsimnvml.so; do
        cp /usr/bin/true "$CARGO_TARGET_DIR/release/$name"
        echo "made in $PWD" >>"$CARGO_TARGET_DIR/release/$name"
    done ;;
zigbuild)
    out=$CARGO_TARGET_DIR/shim/@triple@/shim
    mkdir -p "$out"
    echo "made in $PWD" >"$out/libtessera_shim.so" ;;
*) exit 1 ;;
esac
echo "stand-in cargo: $PWD: $*" """,
}


INCLUDE = re.compile(r'\binclude(?:_str|_bytes)?!\(\s*"([^"]+)"\s*\)')


def included():
    """What sources take in as a file when they are compiled, but for the modules of their tests."""
    found = set()
    for name in run("git", "ls-files", "-co", "--exclude-standard", "--", "*.rs", cwd=ROOT).splitlines():
        source = ROOT / name
        if name.endswith("tests.rs") or "tests" in Path(name).parts[1:] or not source.is_file():
            continue
        text = source.read_text().partition("#[cfg(test)]\nmod tests {")[0]
        for file in INCLUDE.findall(text):
            found.add((source.parent / file).resolve().relative_to(ROOT))
    return sorted(found)


def run(*command, **options):
    return subprocess.run(command, check=True, capture_output=True, text=True, **options).stdout


class Builder:
    """A buildah with images of its own."""

    def __init__(self, directory):
        self.directory = Path(directory)
        self.context = self.directory / "context"
        sysroot = run("rustc", "--print", "sysroot", cwd=ROOT).strip()
        triple = re.search(r"(?m)^host: (.*)$", run("rustc", "-vV", cwd=ROOT))[1]
        words = {"sysroot": sysroot, "triple": triple, "python": os.path.realpath(sys.executable), "included": " ".join(map(str, included()))}
        self.words = {f"@{name}@": word for name, word in words.items()}
        # What the steps use of this machine.
        self.mounts = ["/usr", "/etc/alternatives", sysroot, sys.base_prefix]

    def buildah(self, *arguments, check=True):
        command = [os.environ["BUILDAH"], "--root", self.directory / "root", "--runroot", self.directory / "run", "--storage-driver", "vfs", *arguments]
        done = subprocess.run(command, check=False, capture_output=True, text=True, cwd=self.context)
        assert done.returncode == 0 or not check, done.stdout + done.stderr
        return done.stdout + done.stderr

    def base(self):
        """The stand-in for what FROM names."""
        base = self.directory / "base"
        for name in ["dev", "etc", "proc", "root", "stand-in", "sys", "target", "tmp", "usr", "var/lib/apt/lists"]:
            (base / name).mkdir(parents=True)
        for name in ["bin", "lib", "lib64", "sbin"]:
            if os.path.islink(f"/{name}"):
                (base / name).symlink_to(os.readlink(f"/{name}"))
        for name, text in STAND_INS.items():
            for word, value in self.words.items():
                text = text.replace(word, value)
            (base / "stand-in" / name).write_text(f"#!/bin/bash\nset -e\n{text}\n")
            (base / "stand-in" / name).chmod(0o755)
        froms = set(re.findall(r"(?m)^FROM (docker\.io/library/rust:\S+)", (ROOT / "deploy/Dockerfile").read_text()))
        (name,) = froms
        (self.directory / "Base").write_text("FROM scratch\nCOPY base/ /\nENV PATH=/stand-in:/usr/bin:/bin\n")
        self.buildah("bud", "-f", self.directory / "Base", "-t", name, self.directory)

    def copy(self):
        """The context, as a clone has it."""
        names = run("git", "ls-files", "-co", "--exclude-standard", "-z", cwd=ROOT).split("\0")
        for name in filter(None, names):
            source, to = ROOT / name, self.context / name
            if source.is_file() or source.is_symlink():
                to.parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(source, to, follow_symlinks=False)

    def build(self, *options):
        """The log of a build."""
        volumes = [word for path in self.mounts for word in ("-v", f"{path}:{path}:ro")]
        return self.buildah(
            "bud", "--layers", "--isolation", "chroot", "--pull-never", *volumes, "-f", "deploy/Dockerfile", "-t", "tessera", *options, "."
        )

    def files(self):
        """The image's files, and its configuration."""
        container = self.buildah("from", "--pull-never", "tessera").strip()
        root = Path(self.buildah("mount", container).strip())
        found = {str(path.relative_to(root)): path.read_bytes() for path in root.rglob("*") if path.is_file() and not path.is_symlink()}
        config = json.loads(self.buildah("inspect", container))["OCIv1"]["config"]
        self.buildah("rm", container)
        return found, config


def asked(log):
    """What cargo was asked to build, by directory."""
    return re.findall(r"(?m)^stand-in cargo: (\S+): (build|zigbuild)", log)


@check
def image_is_built_in_layers():
    """Every line of the Dockerfile runs; an edited source builds no dependency again, a new dependency does."""
    whole = [(where, what) for where in ("/skeleton", "/tessera") for what in ("build", "zigbuild")]
    with tempfile.TemporaryDirectory() as directory:
        builder = Builder(directory)
        builder.copy()
        builder.base()
        log = builder.build()
        assert asked(log) == whole, log
        assert "stand-in apt-get: install" in log and "stand-in pip: " in log, log
        files, config = builder.files()
        assert {"usr/local/bin/tessera", "usr/local/bin/libtessera.so", "bin/busybox", "usr/share/doc/tessera/LICENSE", "etc/passwd"} <= set(files), sorted(files)
        assert any(name.endswith("/libc.so.6") for name in files), sorted(files)
        assert not any(name.split("/")[0] in ("skeleton", "tessera", "target", "stand-in", "root") for name in files), sorted(files)
        for name in ("tessera", "libtessera.so"):
            assert b"made in /tessera" in files[f"usr/local/bin/{name}"], f"{name} is the skeleton's"
        assert (config["Entrypoint"], config["Cmd"]) == (["tessera"], ["serve"]), config

        main = builder.context / "plugin/cli/src/main.rs"
        main.write_text(main.read_text() + "// another comment\n")
        (builder.context / "plugin/cli/src/more.rs").write_text("//! A new file.\n")
        log = builder.build()
        assert asked(log) == whole[2:], f"an edited source builds the dependencies again:\n{log}"
        assert "stand-in apt-get" not in log and "stand-in pip" not in log, log

        manifest = builder.context / "plugin/cli/Cargo.toml"
        manifest.write_text(manifest.read_text() + "\n# another dependency\n")
        assert asked(builder.build()) == whole
        # Nothing is left of it to do for the other image.
        log = builder.build("--target", "simulator")
        files, config = builder.files()
        assert asked(log) == [] and "usr/local/bin/tessera-tenant" in files and config["Entrypoint"] == ["tessera-tenant"], (log, config)


@check
def image_skeleton_is_a_workspace():
    """cargo accepts manifests with empty sources, and finds every package and program."""
    with tempfile.TemporaryDirectory() as directory:
        out = Path(directory) / "skeleton"
        run(ROOT / "deploy/image/skeleton", ROOT, out)
        command = ["cargo", "metadata", "--no-deps", "--locked", "--offline", "--format-version", "1"]

        def programs(at):
            packages = json.loads(run(*command, cwd=at))["packages"]
            return {(p["name"], t["name"]) for p in packages for t in p["targets"] if set(t["kind"]) & {"bin", "cdylib", "lib"}}

        assert programs(out) == programs(ROOT)
        # `metadata` overlooks a target that the manifest names and that is not there; a build does not.
        run("cargo", "check", "--quiet", "--locked", "--offline", "-p", "tessera-cuda", "--target-dir", Path(directory) / "target", cwd=out)
        sources = [path for path in out.rglob("*.rs") if path.read_text() not in ("", "fn main() {}\n")]
        assert not sources, sources
