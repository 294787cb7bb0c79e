"""Renders the chart: with the `helm` that is installed (or that HELM names), else with Helm's engine as a
library."""

import json
import os
import re
import shutil
import subprocess
import tempfile
from pathlib import Path

import yaml

ROOT = Path(__file__).resolve().parents[2]
CHART = ROOT / "deploy/helm/tessera"

# As Helm orders what it installs; the rest comes after, as it stands.
ORDER = [
    "Namespace", "NetworkPolicy", "ServiceAccount", "ConfigMap", "ClusterRole", "ClusterRoleBinding", "Role",
    "RoleBinding", "Service", "DaemonSet",
]


class ChartError(Exception):
    """What Helm refuses, in its words."""


def helm():
    """The `helm` program, if there is one."""
    return os.environ.get("HELM") or shutil.which("helm")


def load(text):
    """The value of a YAML document, by libyaml: the parser in Python takes ten times as long."""
    return yaml.load(text, yaml.CSafeLoader)


def load_all(text):
    """The values of a text of several documents."""
    return yaml.load_all(text, yaml.CSafeLoader)


def template(values=None, namespace="tessera", release="tessera", chart=CHART):
    """What the templates render, as one text."""
    return (_by_program if helm() else _by_library)(values, namespace, release, chart)


def documents(*arguments, **options):
    """Text and value of the rendered objects in the order in which they are installed."""
    def place(document):
        kind = document[1]["kind"]
        return ORDER.index(kind) if kind in ORDER else len(ORDER)

    texts = map(_clean, re.split(r"(?m)^---[ \t]*$", template(*arguments, **options)))
    return sorted((document for document in ((text, load(text)) for text in texts) if document[1] is not None), key=place)


def render(*arguments, **options):
    """The texts of the rendered objects in the order in which they are installed."""
    return [text for text, _ in documents(*arguments, **options)]


def objects(*arguments, **options):
    """The rendered objects in that order."""
    return [value for _, value in documents(*arguments, **options)]


def notes(values=None, namespace="tessera", release="tessera"):
    """What Helm says after an installation."""
    if helm():
        with _values_file(values) as file:
            command = [helm(), "install", release, str(CHART), "--dry-run=client", "--namespace", namespace, "-f", file.name]
            run = subprocess.run(command, capture_output=True, text=True, check=False)
        if run.returncode != 0:
            raise ChartError(run.stderr)
        return run.stdout.partition("\nNOTES:\n")[2]
    return _parts(values, namespace, release, CHART)["tessera/templates/NOTES.txt"]


def lint(values=None):
    """What `helm lint --strict` complains of."""
    if helm():
        with _values_file(values) as file:
            command = [helm(), "lint", "--strict", "--namespace", "tessera", str(CHART), "-f", file.name]
            run = subprocess.run(command, capture_output=True, text=True, check=False)
            return [] if run.returncode == 0 else [run.stdout + run.stderr]
    from helm_python import lint as lint_chart

    report = lint_chart(str(CHART), values, strict=True, namespace="tessera")
    worth = [f"{m['path']}: {m['error']}" for m in report["messages"] if m["severity"] >= 2]
    return worth + list(report.get("errors") or [])


def _clean(document):
    lines = [line.rstrip() for line in document.strip("\n").split("\n") if not line.startswith("# Source: ")]
    return "\n".join(lines).strip("\n") + "\n"


def _by_library(values, namespace, release, path):
    parts = _parts(values, namespace, release, path)
    return "\n---\n".join(parts[path] for path in sorted(parts) if path.endswith(".yaml"))


def _parts(values, namespace, release, path):
    """Each template's text, by Helm's engine as a library."""
    import helm_python
    from helm_python import Chart

    try:
        with Chart.load(path) as chart:
            return chart.render(values=values or {}, name=release, namespace=namespace)
    except helm_python.HelmError as error:
        raise ChartError(str(error)) from error


def _by_program(values, namespace, release, path):
    with _values_file(values) as file:
        command = [helm(), "template", release, str(path), "--namespace", namespace, "-f", file.name]
        run = subprocess.run(command, capture_output=True, text=True, check=False)
    if run.returncode != 0:
        raise ChartError(run.stderr)
    return run.stdout


def _values_file(values):
    file = tempfile.NamedTemporaryFile("w", suffix=".json")
    json.dump(values or {}, file)
    file.flush()
    return file
