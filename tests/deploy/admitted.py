"""Checks that a cluster takes what the chart makes: its names under every release name that Helm allows, its pods in a
namespace with a ResourceQuota, its directories where kubelet has them."""

import random
import re
import tomllib

from engine import objects
from manifests import value_sets
from registry import check

# Apimachinery's validation of names and labels.
LABEL = re.compile("[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?")
SUBDOMAIN = re.compile(f"(?=.{{1,253}}$){LABEL.pattern}([.]{LABEL.pattern})*")
SERVICE = re.compile("[a-z]([-a-z0-9]{0,61}[a-z0-9])?")
VALUE = re.compile("([A-Za-z0-9]([-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?)?")
PORT = re.compile("(?=.{1,15}$)[a-z0-9]+(-[a-z0-9]+)*")
# RBAC's objects are named by any segment of a path.
SEGMENT = re.compile("(?!^[.]{1,2}$)[^/%]+")
# What Helm takes as a release's name, which is at most 53 characters long.
RELEASE = re.compile("[a-z0-9]([-a-z0-9]*[a-z0-9])?([.][a-z0-9]([-a-z0-9]*[a-z0-9])?)*")

# Kubelet has it compiled in (`pluginapi.DevicePluginPath`), whatever its --root-dir.
DEVICE_PLUGINS = "/var/lib/kubelet/device-plugins"


def pod_specs(items):
    return [item["spec"]["template"]["spec"] for item in items if item["kind"] in ("DaemonSet", "Deployment", "Job")]


def labels(node, place=""):
    """Every value of a label or of a selector by labels, with its place."""
    if isinstance(node, dict):
        for key, value in node.items():
            if key in ("labels", "matchLabels", "nodeSelector"):
                yield from ((f"{place}.{key}.{name}", text) for name, text in value.items())
            elif key == "selector" and all(isinstance(text, str) for text in value.values()):
                yield from ((f"{place}.{key}.{name}", text) for name, text in value.items())
            else:
                yield from labels(value, f"{place}.{key}")
    elif isinstance(node, list):
        for number, value in enumerate(node):
            yield from labels(value, f"{place}[{number}]")


def refused_names(items):
    """What the API server would refuse of these objects, and the labels and ports in them."""
    for item in items:
        kind, name = item["kind"], item["metadata"]["name"]
        segment = kind in ("ClusterRole", "ClusterRoleBinding", "Role", "RoleBinding")
        rule = SEGMENT if segment else SERVICE if kind == "Service" else SUBDOMAIN
        if not isinstance(name, str) or not rule.fullmatch(name):
            yield f"{kind} {name}"
        yield from (f"{kind} {name}: {place}={text}" for place, text in labels(item) if not VALUE.fullmatch(text))
    for spec in pod_specs(items):
        containers = spec.get("initContainers", []) + spec["containers"]
        named = [c["name"] for c in containers] + [v["name"] for v in spec.get("volumes", [])]
        yield from (f"in a pod: {name}" for name in named if not LABEL.fullmatch(name))
        ports = [port["name"] for container in containers for port in container.get("ports", [])]
        yield from (f"port {name}" for name in ports if not PORT.fullmatch(name))


def releases():
    """Names that Helm takes: those at the edges, then some by chance, the same each time."""
    edges = ["1", "a", "9gpu", "gpu.prod", "1.2.3", "1tessera", "my.tessera", "tessera.1", "a-b", "0x1f", "true", "1e3"]
    edges += ["a" * 53, "7" * 53, "a" + "-" * 51 + "b", "a." * 26 + "a", "x" * 39 + "." + "y" * 13, "x" * 39 + "-" + "y" * 13]
    edges += ["x" * 31 + "." + "y" * 21, "x" * 37 + "--a.b", "tessera" + "-" * 33 + "a", "tessera" * 7]
    draw = random.Random(1)
    while len(edges) < 60:
        name = "".join(draw.choice("ab19-..") for _ in range(draw.choice([3, 12, 38, 39, 40, 41, 42, 53])))
        if RELEASE.fullmatch(name) and name not in edges:
            edges.append(name)
    assert all(RELEASE.fullmatch(name) and len(name) <= 53 for name in edges), edges
    return edges


@check
def every_release_name_makes_names_that_kubernetes_takes():
    """And two of them share no object of the cluster, as long as Kubernetes would take both names as they are."""
    everything = value_sets()["everything"] | {"fullnameOverride": "", "metrics": {}, "dra": {"enabled": True}, "profiles": {"default": {}, "a" * 20: {}}}
    sets = [everything, {"cleanup": {"enabled": True}}, {"nameOverride": "n" * 40, "console": {"enabled": True}}]
    made = {}
    for release in releases():
        for values in sets:
            items = objects(values, release=release)
            assert not (refused := list(refused_names(items))), (release, refused)
        names = {(item["kind"], item["metadata"]["name"]) for item in objects({}, release=release) if item["kind"] == "ClusterRole"}
        for name in names if len(release) <= 32 else ():
            assert name not in made, (name, release, made[name])
            made[name] = release
    # Who has one of the names that were always taken keeps it: objects that are renamed are made anew.
    for release, name in [("tessera", "tessera"), ("gpu", "gpu-tessera"), ("my-tessera", "my-tessera"), ("a" * 53, "a" * 40)]:
        (item,) = [item for item in objects({}, release=release) if item["kind"] == "DaemonSet"]
        assert item["metadata"]["name"] == name, (release, item["metadata"]["name"])


@check
def every_container_names_its_resources():
    """A ResourceQuota lets no pod in of which one container, those that prepare and clean the host among them, does not
    say what the quota counts."""
    for name, values in (value_sets() | {"all parts": {"console": {"enabled": True}}}).items():
        for spec in pod_specs(objects(values)):
            for container in spec.get("initContainers", []) + spec["containers"]:
                resources = container.get("resources", {})
                counted = [resources.get("requests", {}).get("cpu"), *(resources.get(kind, {}).get("memory") for kind in ("requests", "limits"))]
                assert all(counted), (name, container["name"], resources)
    # Of one value, so that whoever meets a quota of something else says it once for the pod.
    limits = {"cpu": 1, "memory": "96Mi", "ephemeral-storage": "1Gi"}
    for values in ({}, {"cleanup": {"enabled": True}}):
        for spec in pod_specs(objects(values | {"resources": {"limits": limits}})):
            for container in spec.get("initContainers", []) + spec["containers"]:
                assert container["resources"]["limits"] == limits, container


@check
def kubelet_is_met_below_any_root():
    """Its directory for device plugins stays where it is when --root-dir moves all others."""
    sets = {f"{name} below {root}": values | {"kubeletRoot": root} for name, values in value_sets().items()
            for root in ("/var/lib/k0s/kubelet", "/data/kubelet")}
    for name, values in (value_sets() | sets).items():
        root = values.get("kubeletRoot", "/var/lib/kubelet")
        items = objects(values)
        configs = [tomllib.loads(text) for item in items if item["kind"] == "ConfigMap" for key, text in item["data"].items() if key.endswith(".toml")]
        for paths in (config.get("paths", {}) for config in configs):
            assert paths.get("kubelet", DEVICE_PLUGINS) == DEVICE_PLUGINS, (name, paths)
            own = {"pod_resources": "pod-resources/kubelet.sock", "plugins_registry": "plugins_registry", "dra": "plugins/gpu.tessera.dev"}
            for key, below in own.items():
                assert paths.get(key, f"/var/lib/kubelet/{below}") == f"{root}/{below}", (name, key, paths)
        for spec in pod_specs(items):
            host = {v["name"]: v["hostPath"]["path"] for v in spec.get("volumes", []) if "hostPath" in v}
            assert host.pop("device-plugins", DEVICE_PLUGINS) == DEVICE_PLUGINS, (name, host)
            moved = {key: path for key, path in host.items() if key in ("pod-resources", "plugin-dir", "plugins-registry", "dra")}
            assert all(path.startswith(f"{root}/") for path in moved.values()), (name, moved)
    # A kubelet that was built with another directory: the configuration says it, and the mount follows.
    (spec,) = pod_specs(objects({"config": {"paths": {"kubelet": "/snap/kubelet/device-plugins"}}}))
    mounted = [m["mountPath"] for m in spec["containers"][0]["volumeMounts"] if m["name"] == "device-plugins"]
    host = [v["hostPath"]["path"] for v in spec["volumes"] if v["name"] == "device-plugins"]
    assert mounted == host == ["/snap/kubelet/device-plugins"], (mounted, host)
