"""Checks of what lies in deploy/. `checks.py NAME` runs one, `checks.py update` writes the rendered files."""

import json
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

import yaml

import engine
import manifests
import schema
from engine import CHART, ROOT, ChartError, objects

CHECKS = {}


def check(function):
    """Names a check as its function, with dashes."""
    CHECKS[function.__name__.replace("_", "-")] = function
    return function


def value_sets():
    """Every set of values that is tested, by name; the defaults first."""
    sets = {"defaults": {}}
    sets |= {path.stem: manifests.values(path) for path in manifests.HERE.glob("plain/*.yaml")}
    return sets | {name: manifests.values(path) for name, path in manifests.cases().items()}


def of_kind(items, kind):
    return [item for item in items if item["kind"] == kind]


def pod_specs(items):
    return [item["spec"]["template"]["spec"] for item in of_kind(items, "DaemonSet")]


@check
def rendered_files():
    """The plain manifests and the cases are what the chart makes."""
    for path, text in manifests.rendered().items():
        assert path.is_file() and path.read_text() == text, (
            f"{path.relative_to(ROOT)} is not what the chart makes: run tests/deploy/update and look at the difference"
        )
    assert schema.FILE.read_text() == schema.make(), (
        "values.schema.json does not fit values.yaml or `tessera config schema`: run tests/deploy/update"
    )


@check
def lint():
    """Helm's own linter has nothing to say."""
    for name, values in value_sets().items():
        assert engine.lint(values) == [], (name, engine.lint(values))


@check
def schema_is_strict():
    """Values that are not in values.yaml, or make no sense, are refused, and the key is named."""
    bad = {
        "replicaz": {"config": {"share": {"replicaz": 4}}},
        "imag": {"imag": {"tag": "1"}},
        "pullPolicy": {"image": {"pullPolicy": "Sometimes"}},
        "digest": {"image": {"digest": "sha256:12"}},
        "port": {"metrics": {"port": "http"}},
        "enabled": {"events": {"enabled": "yes"}},
        "replicas": {"profiles": {"l4": {"replicas": 2}}},
        "l4_": {"profiles": {"l4_": {}}},
        "maxSurge": {"updateStrategy": {"rollingUpdate": {"maxSurge": 1}}},
        "xid": {"config": {"health": {"xid": {"79": "panic"}}}},
        "share/replicas": {"config": {"share": {"replicas": "four"}}},
        "share/cores": {"config": {"share": {"cores": "400%"}}},
        "share/placement": {"config": {"share": {"placement": "best"}}},
        "gpus/reserve": {"config": {"gpus": {"reserve": "12MB"}}},
        "ledger/release_after": {"config": {"ledger": {"release_after": "5"}}},
        "layout/0/shares/0": {"config": {"layout": [{"gpus": ["0"], "shares": [{"count": 1}]}]}},
        "default/config/share/replicas": {"profiles": {"default": {"config": {"share": {"replicas": 1000}}}}},
        "kubeletRoot": {"kubeletRoot": "var/lib/kubelet"},
        "runtimeClassNames": {"admissionPolicy": {"runtimeClassNames": ["it's"]}},
    }
    for key, values in bad.items():
        try:
            engine.render(values)
        except ChartError as error:
            assert key in str(error), (key, str(error))
        else:
            raise AssertionError(f"accepted: {values}")
    for values in value_sets().values():
        engine.render(values)


@check
def every_value_is_documented():
    """In values.yaml by a comment, and in the schema by a description; no object takes unknown keys."""

    bare = []

    def walk(node, path):
        if path and "description" not in node:
            bare.append(path)
        for key, item in node.get("properties", {}).items():
            assert "additionalProperties" in node, f"{path} takes anything"
            walk(item, f"{path}.{key}" if path else key)

    whole = json.loads(schema.make())
    walk(whole, "")
    walk(whole["definitions"]["config"], "")
    assert not bare, f"values.yaml: no comment above {bare}"


@check
def nothing_on_the_network_can_restart_the_plugin():
    """Startup and liveness are asked inside the container; the metrics port is not everyone's unless that is asked for."""
    for name, values in value_sets().items():
        items = objects(values)
        for spec in pod_specs(items):
            for container in spec["containers"]:
                for probe in ("startupProbe", "livenessProbe"):
                    action = container.get(probe, {"exec": None})
                    assert "exec" in action and not {"httpGet", "tcpSocket", "grpc"} & set(action), (name, probe, action)
        for policy in of_kind(items, "NetworkPolicy"):
            assert policy["spec"]["policyTypes"][0] == "Ingress", (name, policy)
            asked = values.get("networkPolicy", {})
            for rule in policy["spec"].get("ingress", []):
                assert rule.get("from") or asked.get("from") == [], (name, rule)
    everyone = of_kind(objects({"networkPolicy": {"from": []}}), "NetworkPolicy")[0]
    assert everyone["spec"]["ingress"] == [{"ports": [{"port": "metrics"}]}], everyone


@check
def namespace_default_is_refused():
    """Unless asked for."""
    try:
        engine.render({}, namespace="default")
    except ChartError as error:
        assert "--namespace tessera" in str(error), error
    else:
        raise AssertionError("rendered for the namespace default")
    assert engine.render({"allowDefaultNamespace": True}, namespace="default")


@check
def configurations_are_valid():
    """`tessera config check` (TESSERA) accepts every ConfigMap, and it says what the values said."""
    for name, values in value_sets().items():
        for config in of_kind(objects(values), "ConfigMap"):
            text = config["data"].get("config.toml")
            if text is None:
                continue
            with tempfile.NamedTemporaryFile("w", suffix=".toml") as file:
                file.write(text)
                file.flush()
                run = subprocess.run(
                    [os.environ["TESSERA"], "-c", file.name, "config", "check"], capture_output=True, text=True, check=False
                )
            assert run.returncode == 0, f"{name}, {config['metadata']['name']}: {run.stderr}\n{text}"


@check
def configuration_is_carried_over_exactly():
    """Strings with quotes, numbers, booleans, lists, tables in lists."""
    import tomllib

    config = {
        "share": {"replicas": 3, "memory": "12Gi", "cores": 0.5},
        "ledger": {"fsync": False},
        "health": {"xid": {"94": "ignore"}},
        "gpus": {"include": ["NVIDIA <A100> & 'more'", "0"]},
        "driver": {"mounts": [{"host": "/a", "container": "/b c", "read_only": True}], "env": {"A.B": "ü", "C": '12Gi "or" \\ so'}},
        "layout": [{"gpus": ["0"], "shares": [{"resource": "a/b", "count": 2}]}, {"gpus": ["1"], "shares": [{"resource": "a/b"}]}],
    }
    (config_map,) = of_kind(objects({"config": config, "profiles": {"default": None, "x": {}}}), "ConfigMap")
    written = tomllib.loads(config_map["data"]["config.toml"])
    for section, keys in config.items():
        assert written[section] == keys, (section, written[section])
    # A profile's false, 0 and "" win over what the top says.
    top = {"ledger": {"fsync": True}, "cdi": {"gpu_kind": "nvidia.com/gpu"}}
    own = {"ledger": {"fsync": False}, "cdi": {"gpu_kind": ""}}
    values = {"config": top, "profiles": {"default": {"config": own}}}
    written = tomllib.loads(of_kind(objects(values), "ConfigMap")[0]["data"]["config.toml"])
    assert (written["ledger"], written["cdi"]) == (own["ledger"], own["cdi"]), written


def fits(spec, labels):
    """Whether a pod with this specification may be scheduled on a node with these labels."""

    def expression(e):
        value = labels.get(e["key"])
        return {
            "In": lambda: value in e["values"],
            "NotIn": lambda: value not in e["values"],
            "Exists": lambda: value is not None,
        }[e["operator"]]()

    if any(labels.get(key) != value for key, value in spec.get("nodeSelector", {}).items()):
        return False
    affinity = spec.get("affinity", {}).get("nodeAffinity")
    if not affinity:
        return True
    terms = affinity["requiredDuringSchedulingIgnoredDuringExecution"]["nodeSelectorTerms"]
    return any(all(expression(e) for e in term["matchExpressions"]) for term in terms)


@check
def profiles_share_no_node():
    """Each node pool gets the DaemonSet that is meant for it; pods of two would not run on one node."""
    items = objects(manifests.values(manifests.HERE / "cases/pools.values.yaml"))
    by_name = {item["metadata"]["name"]: item for item in of_kind(items, "DaemonSet")}
    assert set(by_name) == {"tessera", "tessera-a100", "tessera-l4"}, set(by_name)
    gpu = {"nvidia.com/gpu.present": "true"}
    nodes = [
        ({}, []),
        (gpu, ["tessera"]),
        ({"feature.node.kubernetes.io/pci-10de.present": "true"}, ["tessera"]),
        (gpu | {"tessera.dev/profile": "a100"}, ["tessera-a100"]),
        ({"tessera.dev/profile": "a100"}, []),
        (gpu | {"tessera.dev/profile": "other"}, ["tessera"]),
        ({"cloud.example.com/accelerator": "nvidia-l4"}, ["tessera-l4"]),
    ]
    for labels, expected in nodes:
        found = [name for name, item in by_name.items() if fits(item["spec"]["template"]["spec"], labels)]
        assert found == expected, (labels, found)
    for item in by_name.values():
        template = item["spec"]["template"]
        (term,) = template["spec"]["affinity"]["podAntiAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"]
        keeps_from = term["labelSelector"]["matchExpressions"][1]["values"]
        own = template["metadata"]["labels"]["tessera.dev/profile"]
        assert sorted([*keeps_from, own]) == ["a100", "default", "l4"], (own, keeps_from)
        # Two DaemonSets must not fight over each other's pods.
        assert item["spec"]["selector"]["matchLabels"]["tessera.dev/profile"] == own
    # Each has a configuration of its own, and mounts that one.
    for name, item in by_name.items():
        (config,) = [v for v in item["spec"]["template"]["spec"]["volumes"] if v["name"] == "config"]
        assert config["configMap"]["name"] == name
    assert "replicas = 2" in next(i for i in of_kind(items, "ConfigMap") if i["metadata"]["name"] == "tessera-l4")["data"]["config.toml"]


@check
def gates():
    """What belongs to an operator is made only where its API is, or is said to be."""
    kinds = lambda values: {item["kind"] for item in objects(values)}
    operator = {"ServiceMonitor", "PodMonitor", "PrometheusRule"}
    all_on = {"metrics": {"podMonitor": {"enabled": True}}, "admissionPolicy": {"enabled": True}}
    assert not kinds(all_on) & (operator | {"ValidatingAdmissionPolicy", "RoleBinding"})
    there = {"assumeApiVersions": ["monitoring.coreos.com/v1"], "metrics": {"enabled": True}}
    assert kinds(there) & operator == {"ServiceMonitor", "PrometheusRule"}
    assert kinds(there | {"metrics": {"enabled": True, "podMonitor": {"enabled": True}}}) & operator == {"PodMonitor", "PrometheusRule"}
    # The API server only where events are wanted, and then two verbs on events.
    assert not kinds({}) & {"ClusterRole", "ClusterRoleBinding", "Role", "RoleBinding"}
    (role,) = of_kind(objects({"events": {"enabled": True}}), "ClusterRole")
    assert role["rules"] == [{"apiGroups": [""], "resources": ["events"], "verbs": ["create", "patch"]}]


@check
def least_privilege():
    """One privileged container at most, which ends; the plugin has nothing; a token only for events."""
    for name, values in value_sets().items():
        events = values.get("events", {}).get("enabled", False)
        for spec in pod_specs(objects(values)):
            assert spec["automountServiceAccountToken"] is (events and not values.get("cleanup", {}).get("enabled", False)), name
            privileged = [
                c["name"] for c in spec.get("initContainers", []) + spec["containers"]
                if c["securityContext"].get("privileged")
            ]
            assert privileged in (["prepare-host"], ["clean"], []), (name, privileged)
            for container in spec["containers"]:
                context = container["securityContext"]
                assert context["capabilities"] == {"drop": ["ALL"]} and context["allowPrivilegeEscalation"] is False
            for container in spec["containers"]:
                if container["name"] == "tessera":
                    assert container["securityContext"]["readOnlyRootFilesystem"] is True
                    read_only = {m["name"] for m in container["volumeMounts"] if m.get("readOnly")}
                    assert {"config", "pod-resources"} <= read_only, read_only
        for set_ in of_kind(objects(values), "DaemonSet"):
            # The API server refuses annotations of containers that are not there.
            template = set_["spec"]["template"]
            there = {c["name"] for c in template["spec"].get("initContainers", []) + template["spec"]["containers"]}
            for key in template["metadata"].get("annotations", {}):
                prefix, _, container = key.partition("/")
                assert "apparmor" not in prefix or container in there, (name, key)
    (bare,) = pod_specs(objects({"hostPID": False, "prepareHost": {"enabled": False}}))
    assert "hostPID" not in bare and "initContainers" not in bare


@check
def app_armor_is_a_field_where_there_is_one():
    """Kubernetes has it since 1.30; before that, each container has an annotation. Never both."""
    fields = {
        "unconfined": {"type": "Unconfined"},
        "runtime/default": {"type": "RuntimeDefault"},
        "localhost/tessera": {"type": "Localhost", "localhostProfile": "tessera"},
    }
    since = ["admissionregistration.k8s.io/v1/ValidatingAdmissionPolicy"]
    for profile, field in fields.items():
        for assumed in ([], since):
            values = {"appArmorProfile": profile, "assumeApiVersions": assumed}
            (set_,) = of_kind(objects(values), "DaemonSet")
            template = set_["spec"]["template"]
            found = template["spec"].get("securityContext", {}).get("appArmorProfile")
            annotations = template["metadata"].get("annotations", {})
            annotated = {key: value for key, value in annotations.items() if "apparmor" in key}
            assert found == field or not assumed, (profile, found)
            if found is None:
                assert set(annotated.values()) == {profile} and len(annotated) == 2, annotated
            else:
                assert found == field and not annotated, (found, annotated)
    (bare,) = of_kind(objects({"assumeApiVersions": since}), "DaemonSet")
    assert "securityContext" not in bare["spec"]["template"]["spec"]


@check
def host_paths_are_mounted_where_the_configuration_has_them():
    """Below another kubelet root, too, and the driver's directories."""
    import tomllib

    values = {
        "kubeletRoot": "/data/kubelet", "stateDir": "/data/tessera", "nodeLabels": {"nfd": True},
        "config": {"driver": {"root": "/run/nvidia/driver"}},
    }
    items = objects(values)
    config = tomllib.loads(of_kind(items, "ConfigMap")[0]["data"]["config.toml"])
    (spec,) = pod_specs(items)
    host = {v["name"]: v["hostPath"]["path"] for v in spec["volumes"] if "hostPath" in v}
    (plugin,) = spec["containers"]
    mounted = {m["name"]: m["mountPath"] for m in plugin["volumeMounts"]}
    for name, path in host.items():
        assert mounted[name] == path, (name, path, mounted)
    below = lambda path, name: Path(path).is_relative_to(host[name])
    assert below(config["paths"]["pages"], "plugin-dir")
    assert below(config["paths"]["kubelet"], "device-plugins")
    assert below(config["paths"]["pod_resources"], "pod-resources")
    assert below(config["paths"]["shim"], "state") and below(config["paths"]["ledger"], "state")
    assert below(config["labels"]["nfd_file"], "nfd")
    assert below(config["driver"]["root"], "driver-0")


def others(accepts, default):
    """Values that a key accepts beside its default, by what the reference says of it."""
    choices = [json.loads(c) if c in ("true", "false") else c for c in re.findall(r"`([^`]+)`", accepts)]
    if accepts.startswith("absolute path"):
        return ["/elsewhere"]
    if accepts.startswith("quantity"):
        return ["1Gi"]
    if accepts.startswith("`:PORT`"):
        return [":1234"]
    return [choice for choice in choices if choice != default]


@check
def a_change_of_the_configuration_restarts_only_on_request():
    """And only for what the plugin does not take live, as `tessera config reference` (TESSERA) tells."""
    template = lambda config, **more: of_kind(objects({"config": config} | more), "DaemonSet")[0]["spec"]["template"]
    live, other = ({"share": {"replicas": n}, "kubernetes": {"events": e}} for n, e in [(4, "auto"), (5, "off")])
    assert template(live) == template(other)
    asked = {"restartOnConfigChange": True}
    base = template(live, **asked)
    assert base != template(live) and base == template(other, **asked)
    reference = subprocess.run([os.environ["TESSERA"], "config", "reference"], capture_output=True, text=True, check=True)
    rows = [[cell.strip() for cell in line.split(" | ")] for line in reference.stdout.splitlines() if line.startswith("| `")]
    takes = {key.strip("| `"): (accepts, json.loads(default.strip("`"))) for key, accepts, default, when, *_ in rows
             if when == "after a restart"}
    assert len(takes) > 9 and "kubernetes.events" not in takes, takes
    for name, (accepts, default) in takes.items():
        table, key = name.split(".")
        # Of one of them the chart may have made its own default.
        changed = [template(live | {table: {key: value}}, **asked) for value in others(accepts, default)]
        assert any(one != base for one in changed), f"{name} takes a restart, and the checksum does not know it"
    # Beside those, in tables that have some.
    for table, key, value in [("ledger", "release_after", "1m"), ("log", "filter", "debug")]:
        assert template(live | {table: {key: value}}, **asked) == base, f"{table}.{key} is taken live"


# This evaluator of CEL has no optional fields: what they would give is given.
OPTIONAL = {
    'object.spec.?runtimeClassName.orValue("")': '(has(object.spec.runtimeClassName) ? object.spec.runtimeClassName : "")',
    "object.spec.?initContainers.orValue([])": "(has(object.spec.initContainers) ? object.spec.initContainers : [])",
    "c.?resources.?limits.orValue({})": "(has(c.resources) ? (has(c.resources.limits) ? c.resources.limits : {}) : {})",
    "c.?volumeMounts.orValue([])": "(has(c.volumeMounts) ? c.volumeMounts : [])",
}


def refusal(name, pod):
    """What the policy of deploy/policies/NAME says of a pod's specification, by its CEL; nothing if it is admitted."""
    import celpy

    documents = yaml.safe_load_all((ROOT / f"deploy/policies/{name}.yaml").read_text())
    spec = next(d for d in documents if d["kind"] == "ValidatingAdmissionPolicy")["spec"]
    environment = celpy.Environment()

    def evaluate(expression, **variables):
        for optional, plain in OPTIONAL.items():
            expression = expression.replace(optional, plain)
        assert ".?" not in expression, expression
        program = environment.program(environment.compile(expression))
        return program.evaluate({name: celpy.json_to_cel(value) for name, value in variables.items()})

    given = {"object": {"spec": pod}}
    if not all(evaluate(condition["expression"], **given) for condition in spec.get("matchConditions", [])):
        return None
    variables = {}
    for variable in spec["variables"]:
        value = evaluate(variable["expression"], variables=variables, **given)
        variables[variable["name"]] = json.loads(json.dumps(value, cls=celpy.CELJSONEncoder))
    (validation,) = spec["validations"]
    if evaluate(validation["expression"], variables=variables, **given):
        return None
    return str(evaluate(validation["messageExpression"], variables=variables, **given))


PLAIN = {"name": "c"}
SHARE = {"name": "s", "resources": {"limits": {"cpu": "1", "tessera.dev/gpu": "1"}}}


@check
def sandboxed_pods_are_refused_by_the_policy():
    large = {"name": "s", "resources": {"limits": {"tessera.dev/gpu-large": "1"}}}
    other = {"name": "s", "resources": {"limits": {"nvidia.com/gpu": "1"}, "requests": {}}}
    pods = [
        (True, {"containers": [SHARE]}),
        (True, {"containers": [SHARE], "runtimeClassName": "nvidia"}),
        (False, {"containers": [SHARE], "runtimeClassName": "gvisor"}),
        (False, {"containers": [PLAIN, large], "runtimeClassName": "kata-qemu"}),
        (False, {"containers": [PLAIN], "initContainers": [SHARE], "runtimeClassName": "kata"}),
        (True, {"containers": [PLAIN, other], "runtimeClassName": "kata"}),
        (True, {"containers": [PLAIN], "runtimeClassName": "gvisor"}),
    ]
    for admitted, pod in pods:
        said = refusal("sandboxed-runtimes", pod)
        assert (said is None) is admitted, pod
        assert admitted or pod["runtimeClassName"] in said, said


@check
def volumes_over_what_a_container_is_given_are_refused_by_the_policy():
    paths = [
        (True, "/data"), (True, "/usr/local"), (True, "/etc"), (True, "/usr/local/tessera-data"),
        (True, "/etc/ld.so.preload.d"), (True, "/opt/usr/local/tessera"), (True, "/.hidden"), (True, "/a..b"),
        (False, "/usr/local/tessera"), (False, "/usr/local/tessera/"), (False, "//usr/local//tessera/pages/usage"),
        (False, "usr/local/tessera"), (False, "/etc/ld.so.preload"), (False, "/etc//ld.so.preload/"),
        (False, "/usr/./local/tessera"), (False, "/data/../usr/local/tessera"), (False, "/etc/ld.so.preload/."),
    ]
    for admitted, path in paths:
        mounts = {"volumeMounts": [{"name": "d", "mountPath": "/x"}, {"name": "v", "mountPath": path}]}
        for pod in [{"containers": [PLAIN, SHARE | mounts]}, {"containers": [PLAIN], "initContainers": [SHARE | mounts]}]:
            said = refusal("volumes", pod)
            assert (said is None) is admitted, path
            assert admitted or f"at {path}: " in said, said
        # Who holds no share may mount what it likes where it likes.
        assert refusal("volumes", {"containers": [PLAIN | mounts, SHARE]}) is None, path


@check
def dockerfile():
    """Hadolint's rules. Debian's versions are not pinned: its mirrors keep only the newest (DL3008)."""
    tool = Path(sys.executable).with_name("hadolint")
    command = [tool, "--no-color", "--ignore", "DL3008", ROOT / "deploy/Dockerfile"]
    run = subprocess.run(command, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stdout + run.stderr
    for line in (ROOT / "deploy/Dockerfile").read_text().splitlines():
        if line.startswith("FROM ") and line.split()[1] != "scratch":
            tag = line.split()[1].rpartition(":")[2]
            assert tag not in ("", "latest") and any(c.isdigit() for c in tag), f"not pinned: {line}"


@check
def alerts_and_dashboard_are_those_of_the_repository():
    """The chart carries links, so that there is one of each."""
    for name, source in [("prometheus-rule.yaml", "deploy/prometheus/rules.yaml"), ("dashboard.json", "deploy/grafana/tessera.json")]:
        assert (CHART / "files" / name).resolve() == ROOT / source, name
    values = {"assumeApiVersions": ["monitoring.coreos.com/v1"], "metrics": {"grafanaDashboard": {"enabled": True}}}
    items = objects(values)
    (rule,) = of_kind(items, "PrometheusRule")
    assert rule["spec"] == yaml.safe_load((ROOT / "deploy/prometheus/rules.yaml").read_text())["spec"]
    (dashboard,) = [i for i in of_kind(items, "ConfigMap") if "tessera.json" in i["data"]]
    assert json.loads(dashboard["data"]["tessera.json"]) == json.loads((ROOT / "deploy/grafana/tessera.json").read_text())


def update():
    """Writes the schema first: rendering judges the values by it."""
    schema.FILE.write_text(schema.make())
    for path, text in manifests.rendered().items():
        path.parent.mkdir(parents=True, exist_ok=True)
        if not path.is_file() or path.read_text() != text:
            path.write_text(text)
            print(path.relative_to(ROOT))


if __name__ == "__main__":
    (name,) = sys.argv[1:]
    if name == "update":
        update()
    elif name == "list":
        print("\n".join(CHECKS))
    else:
        try:
            CHECKS[name]()
        except (AssertionError, ChartError) as error:
            sys.exit(f"{name}: {error}")
        print("done")
