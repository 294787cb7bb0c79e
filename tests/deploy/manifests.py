"""The rendered files of the repository: plain manifests for users, and the cases of values that tests
compare."""

import yaml

import engine
from engine import ROOT

HERE = ROOT / "tests/deploy"

# Each plain manifest: its values, its namespace, the name (or NAME/KIND) of the objects that it takes (all: None), its
# head.
PLAIN = {
    "deploy/tessera.yaml": (
        "tessera", "tessera", None,
        """\
# Tessera on every GPU node, for `kubectl apply -f`. No webhook, no scheduler extension; the API server is asked for
# events and for callers of the JSON API alone. The plugin reloads its ConfigMap live. To uninstall, delete the pods
# that hold shares, then this, then apply deploy/cleanup.yaml: it removes what lies on the nodes.
#
# Made from deploy/helm/tessera by tests/deploy/update, which a test compares: change the chart.
""",
    ),
    "deploy/tessera-dra.yaml": (
        "dra", "tessera", None,
        """\
# Tessera on every GPU node with Dynamic Resource Allocation, for `kubectl apply -f`, instead of deploy/tessera.yaml:
# all GPUs are sold by claims (docs/dra.md). Kubernetes 1.36. The plugin reloads its ConfigMap live.
#
# Made from deploy/helm/tessera by tests/deploy/update, which a test compares: change the chart.
""",
    ),
    "deploy/cleanup.yaml": (
        "cleanup", "tessera-cleanup", None,
        """\
# Removes what Tessera left on the nodes: the tmpfs with the pages, installed shims, the ledger, CDI specs.
# Apply it after deploy/tessera.yaml is deleted and no container holds a share; delete it when its pods
# are Ready. It keeps the namespace to itself, so that one deletion ends it.
#
# Made from deploy/helm/tessera by tests/deploy/update, which a test compares: change the chart.
""",
    ),
    "deploy/prometheus/prometheus-rule.yaml": (
        "prometheus-rule", "tessera", "tessera/PrometheusRule",
        """\
# rules.yaml as an object of the Prometheus operator, for `kubectl apply -f`.
#
# Made from deploy/helm/tessera by tests/deploy/update, which a test compares: change rules.yaml.
""",
    ),
    "deploy/policies/sandboxed-runtimes.yaml": (
        "admission-policy", "tessera", "tessera-sandboxes",
        """\
# Refuses pods that ask for shares under a sandboxed runtime class. Kubernetes 1.30 and later. Edit the list
# of runtime classes to yours.
#
# Made from deploy/helm/tessera by tests/deploy/update, which a test compares: change the chart.
""",
    ),
    "deploy/policies/volumes.yaml": (
        "admission-policy", "tessera", "tessera-volumes",
        """\
# Refuses pods that ask for shares and mount volumes over what a container is given. Kubernetes 1.30 and later.
#
# Made from deploy/helm/tessera by tests/deploy/update, which a test compares: change the chart.
""",
    ),
}


def named(item, name, kind):
    """Whether an object has this name, and this kind if one is given."""
    return item["metadata"]["name"] == name and kind in ("", item["kind"])


def values(path):
    """A values file."""
    return engine.load(path.read_text()) or {}


def cases():
    """The value sets under tests/deploy/cases, by name."""
    return {path.name.removesuffix(".values.yaml"): path for path in sorted(HERE.glob("cases/*.values.yaml"))}


def value_sets():
    """Every set of values that is tested, by name; the defaults first."""
    sets = {"defaults": {}}
    sets |= {path.stem: values(path) for path in HERE.glob("plain/*.yaml")}
    return sets | {name: values(path) for name, path in cases().items()}


def rendered():
    """What every rendered file of the repository has to be, by path."""
    files = {}
    for name, (case, namespace, only, head) in PLAIN.items():
        documents = engine.render(values(HERE / f"plain/{case}.values.yaml"), namespace=namespace)
        if only:
            name_of, _, kind = only.partition("/")
            documents = [d for d in documents if named(engine.load(d), name_of, kind)]
        files[ROOT / name] = head + "---\n".join(documents)
    for name, path in cases().items():
        files[HERE / f"cases/{name}.yaml"] = "---\n".join(engine.render(values(path)))
    return files
