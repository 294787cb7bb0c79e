"""Checks of the release: its workflows' structure and pins, and each script of deploy/release that needs no registry."""

import hashlib
import os
import re
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path

import yaml

import engine
from engine import CHART, ROOT, render
from registry import check

RELEASE = ROOT / "deploy/release"
WORKFLOWS = sorted((ROOT / ".github/workflows").glob("*.yml"))


def run(*command, fails=False, **options):
    done = subprocess.run(command, check=False, capture_output=True, text=True, **options)
    assert (done.returncode != 0) is fails, done.stdout + done.stderr
    return done.stderr if fails else done.stdout.strip()


@check
def workflows_are_pinned_and_whole():
    """Actions by commit, the narrowest rights, jobs and outputs that exist, scripts that exist, and shell that parses."""
    assert [path.name for path in WORKFLOWS] == ["ci.yml", "release.yml", "soak.yml"]
    for path in WORKFLOWS:
        text = path.read_text()
        workflow = engine.load(text)
        assert workflow["permissions"] == {"contents": "read"}, f"{path.name}: rights are given by job"
        assert workflow["defaults"]["run"] == {"shell": "bash"}, f"{path.name}: another shell overlooks what fails in a pipe"
        for use in re.findall(r"(?m)uses: (.*)$", text):
            assert re.fullmatch(r"[\w-]+/[\w-]+@[0-9a-f]{40} # v\d+\.\d+\.\d+", use), f"{path.name}: not pinned: {use}"
        jobs = workflow["jobs"]
        for name, job in jobs.items():
            needs = job.get("needs", [])
            needs = [needs] if isinstance(needs, str) else needs
            assert set(needs) <= set(jobs), (name, needs)
            said = yaml.safe_dump(job)
            for other, output in re.findall(r"needs\.(\w+)\.outputs\.(\w+)", said):
                assert other in needs and output in jobs[other]["outputs"], (name, other, output)
            for key in re.findall(r"\bmatrix\.(\w+)", said):
                assert all(key in entry for entry in job["strategy"]["matrix"]["include"]), (name, key)
            ids = {step.get("id") for step in job["steps"]}
            for step in re.findall(r"steps\.(\w+)\.outputs", said):
                assert step in ids, (name, step)
            for step in job["steps"]:
                script = step.get("run")
                if script is None:
                    assert "uses" in step, (name, step)
                    continue
                # What somebody else can name must not be pasted into a script.
                assert "${{" not in script, f"{path.name}, {name}: pass it by env"
                run("bash", "-n", "-c", script)
                for file in re.findall(r"(?:deploy/release|\.ci)/[\w-]+", script):
                    assert os.access(ROOT / file, os.X_OK), f"{path.name}: no {file}"
                known = {**workflow.get("env", {}), **job.get("env", {}), **step.get("env", {})}
                set_here = set(re.findall(r"(?m)^\s*(\w+)=", script))
                for variable in set(re.findall(r"\$\{?([A-Za-z_]\w*)", script)) - set(known) - set_here:
                    assert variable.startswith("GITHUB_"), f"{path.name}, {name}: nothing sets ${variable}"


@check
def release_versions_agree():
    """A tree whose files have one version passes; each that has another is named."""
    with tempfile.TemporaryDirectory() as directory:
        tree = Path(directory)
        for name in ["Cargo.toml", "CHANGELOG.md", "deploy/helm/tessera/Chart.yaml"]:
            (tree / name).parent.mkdir(parents=True, exist_ok=True)
            (tree / name).write_text((ROOT / name).read_text())
        version = re.search(r'(?m)^version = "(.*)"$', (tree / "Cargo.toml").read_text())[1]
        changes = tree / "CHANGELOG.md"
        changes.write_text(f"## [{version}]\n")
        env = os.environ | {"TREE": str(tree)}
        run(RELEASE / "check", f"v{version}", env=env)
        changes.write_text("## [Unreleased]\n")
        assert "CHANGELOG.md" in run(RELEASE / "check", f"v{version}", env=env, fails=True)
        said = run(RELEASE / "check", "v9.9.9", env=env, fails=True)
        assert all(name in said for name in ("Cargo.toml", "Chart.yaml", "appVersion")), said
        assert "a tag is v" in run(RELEASE / "check", "1.2", env=env, fails=True)


@check
def release_names_are_taken_by_registries():
    """The step that names version, image and charts, run as GitHub runs it, for an owner with capitals."""
    workflow = engine.load((ROOT / ".github/workflows/release.yml").read_text())
    (step,) = (step for step in workflow["jobs"]["version"]["steps"] if step.get("id") == "version")
    version = re.search(r'(?m)^version = "(.*)"$', (ROOT / "Cargo.toml").read_text())[1]
    with tempfile.TemporaryDirectory() as directory:
        tree, out = Path(directory), Path(directory) / "out"
        for name in ["Cargo.toml", "deploy/helm/tessera/Chart.yaml"]:
            (tree / name).parent.mkdir(parents=True, exist_ok=True)
            (tree / name).write_text((ROOT / name).read_text())
        (tree / "CHANGELOG.md").write_text(f"## [{version}]\n")
        env = {"TREE": directory, "GITHUB_REF_NAME": f"v{version}", "GITHUB_REPOSITORY_OWNER": "Some-One", "GITHUB_OUTPUT": str(out)}
        run("bash", "--noprofile", "--norc", "-eo", "pipefail", "-c", step["run"], cwd=ROOT, env=os.environ | env)
        said = dict(line.split("=", 1) for line in out.read_text().splitlines())
    assert said == {"version": version, "image": "ghcr.io/some-one/tessera", "charts": "ghcr.io/some-one/charts"}, said
    assert set(said) == set(workflow["jobs"]["version"]["outputs"])


@check
def chart_is_packaged_whole():
    """By the script and Helm's packer: the archive renders as the tree does with the image of the release, and its alerts
    and dashboard are files."""
    with tempfile.TemporaryDirectory() as directory:
        helm = Path(directory) / "helm"
        helm.write_text(
            f"#!{sys.executable}\nimport sys, helm_python\n_, verb, chart, _, version, _, app, _, out = sys.argv\n"
            "assert verb == 'package'\nhelm_python.package(chart, destination=out, version=version, app_version=app)\n"
        )
        helm.chmod(0o755)
        version = engine.load((CHART / "Chart.yaml").read_text())["version"]
        env = os.environ | {"HELM": str(helm)}
        published = "ghcr.io/some-one/tessera"
        for none in ("tessera", "ghcr.io/Some-One/tessera", f"{published}:{version}", "ghcr.io/some-one/tes#sera"):
            assert "is no image" in run(RELEASE / "chart", version, none, directory, env=env, fails=True), none
        archive = run(RELEASE / "chart", version, published, directory, env=env)
        assert archive == f"{directory}/tessera-{version}.tgz"
        with tarfile.open(archive) as packed:
            packed.extractall(directory, filter="data")
        whole = Path(directory) / "tessera"
        for name in ("files/rules.yaml", "files/dashboard.json", "files/schema.json", "README.md", "values.schema.json"):
            assert (whole / name).is_file() and not (whole / name).is_symlink(), name
        values = {"assumeApiVersions": ["monitoring.coreos.com/v1"], "metrics": {"grafanaDashboard": {"enabled": True}}}
        assert render(values, chart=whole) == render(values | {"image": {"repository": published}})
        # A repository of one's own still wins.
        own = values | {"image": {"repository": "registry.example.com/tessera"}}
        assert render(own, chart=whole) == render(own)


@check
def a_release_that_failed_midway_can_be_run_again():
    """The step that writes the release, with programs that only note their arguments: a release that is there is
    completed, one that is not is made."""
    workflow = engine.load((ROOT / ".github/workflows/release.yml").read_text())
    (script,) = (s["run"] for s in workflow["jobs"]["publish"]["steps"] if "gh release create" in s.get("run", ""))
    for there, verb in ((True, "upload"), (False, "create")):
        with tempfile.TemporaryDirectory() as directory:
            place = Path(directory)
            for name in ("cosign", "git", "gh", "deploy/release/krew"):
                program = place / ("bin" if "/" not in name else ".") / name
                program.parent.mkdir(parents=True, exist_ok=True)
                program.write_text(f'#!/bin/sh\necho "$0 $*" >>{place}/said\n[ "$2" != view ] || exit {int(not there)}\n')
                program.chmod(0o755)
            (place / "made").mkdir()
            for file in ("digest-amd64", "digest-arm64", "tessera.yaml"):
                (place / "made" / file).write_text("")
            env = {"PATH": f"{place}/bin:{os.environ['PATH']}", "VERSION": "1.2.3", "GITHUB_REF_NAME": "v1.2.3"}
            env |= {"GITHUB_SERVER_URL": "https://example.com", "GITHUB_REPOSITORY": "a/b"}
            run("bash", "--noprofile", "--norc", "-eo", "pipefail", "-c", script, cwd=place, env=os.environ | env)
            calls = re.findall(r"/gh release (\w+) v1\.2\.3(.*)", (place / "said").read_text())
            assert [call for call, _ in calls] == ["view", verb], calls
            assert calls[1][1].endswith("SHA256SUMS tessera.yaml") and ("--clobber" in calls[1][1]) is there, calls


@check
def krew_manifest_fits_its_archives():
    """Checksums are those of the archives, which hold what the manifest takes out of them, and pack the same twice."""
    with tempfile.TemporaryDirectory() as directory:
        made = Path(directory)
        (made / "tessera").write_text("#!/bin/sh\n")
        for arch in ("amd64", "arm64"):
            if arch == "arm64":
                said = run(RELEASE / "krew", "1.2.3", "https://example.com/v1.2.3/", made, made / "out.yaml", fails=True)
                assert "arm64" in said, said
            run(RELEASE / "archive", made / "tessera", made / f"kubectl-tessera-linux-{arch}.tar.gz")
        run(RELEASE / "krew", "1.2.3", "https://example.com/v1.2.3/", made, made / "out.yaml")
        manifest = engine.load((made / "out.yaml").read_text())
        assert manifest["apiVersion"] == "krew.googlecontainertools.github.com/v1alpha2" and manifest["kind"] == "Plugin"
        spec = manifest["spec"]
        assert manifest["metadata"]["name"] == "tessera" and spec["version"] == "v1.2.3" and len(spec["shortDescription"]) <= 50
        seen = []
        for platform in spec["platforms"]:
            seen.append(platform["selector"]["matchLabels"])
            file = made / platform["uri"].removeprefix("https://example.com/v1.2.3/")
            assert hashlib.sha256(file.read_bytes()).hexdigest() == platform["sha256"]
            with tarfile.open(file) as packed:
                names = {member.name: member.mode for member in packed.getmembers()}
            assert {entry["from"] for entry in platform["files"]} == set(names) and names[platform["bin"]] & 0o111
        assert seen == [{"os": "linux", "arch": "amd64"}, {"os": "linux", "arch": "arm64"}]
        assert "is no version" in run(RELEASE / "krew", "v1", "u", made, made / "o", fails=True)


@check
def sbom_lists_the_lock_file():
    """Where cargo-cyclonedx is installed: every package that the program links, at the lock file's version."""
    import json
    import shutil
    import tomllib

    if not shutil.which("cargo-cyclonedx"):
        print("SKIPPED: no cargo-cyclonedx")
        return
    with tempfile.TemporaryDirectory() as directory:
        out = Path(directory) / "sbom.json"
        run(RELEASE / "sbom", "tessera-cli", "x86_64-unknown-linux-gnu", out)
        assert directory not in out.read_text() and "/tmp/" not in out.read_text()
        sbom = json.loads(out.read_text())
    assert (sbom["bomFormat"], sbom["metadata"]["component"]["name"]) == ("CycloneDX", "tessera-cli")
    locked = {(p["name"], p["version"]) for p in tomllib.loads((ROOT / "Cargo.lock").read_text())["package"]}
    found = {(c["name"], c["version"]) for c in sbom["components"]}
    assert found <= locked and {"tokio", "redb", "kube"} <= {name for name, _ in found}, found - locked
