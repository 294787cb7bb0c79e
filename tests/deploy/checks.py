"""Checks of what lies in deploy/. `checks.py NAME` runs one, `checks.py update` writes the rendered files."""

import json
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

import admitted  # noqa: F401: registers its checks
import commands
import engine
import image  # noqa: F401: registers its checks
import manifests
import monitoring  # noqa: F401: registers its checks
import release  # noqa: F401: registers its checks
import schema
import sense  # noqa: F401: registers its checks
import variants  # noqa: F401: registers its checks
from engine import ROOT, ChartError, objects
from manifests import value_sets
from registry import CHECKS, check


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
        "dra/maxSurge": {"dra": {"maxSurge": 2}},
        "expression": {"dra": {"deviceClasses": {"more": [{"name": "a"}]}}},
        "extendedResourceName": {"dra": {"deviceClasses": {"mig": {"extendedResourceName": "gpu"}}}},
        "dra/memory_step": {"config": {"dra": {"memory_step": "64MB"}}},
        "dra.enabled": {"config": {"dra": {"enabled": True}}},
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
        if path and not node.get("description"):
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
                # Whoever asks the API shows a token.
                is_api = rule["ports"] == [{"port": "api"}]
                assert is_api or rule.get("from") or asked.get("from") == [], (name, rule)
    everyone = of_kind(objects({"networkPolicy": {"from": []}}), "NetworkPolicy")[0]
    assert everyone["spec"]["ingress"] == [{"ports": [{"port": "metrics"}]}, {"ports": [{"port": "api"}]}], everyone
    few = of_kind(objects({"networkPolicy": {"apiFrom": [{"podSelector": {}}]}}), "NetworkPolicy")[0]
    assert few["spec"]["ingress"][1]["from"] == [{"podSelector": {}}], few


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
            for text in [text for key, text in config["data"].items() if key.endswith(".toml")]:
                commands.accepted(text)


@check
def configuration_is_carried_over_exactly():
    """Strings with quotes, numbers, booleans, lists, tables in lists."""
    import tomllib

    config = {
        "share": {"replicas": 3, "memory": "12Gi", "cores": 0.25},
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
    # Whatever discovery says, a node can be kept free of the plugin, for a driver's upgrade or a GPU's reset.
    nodes += [(labels | {"tessera.dev/gpu.present": "false"}, []) for labels, _ in nodes]
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


def own_roles(items):
    """The plugin's own."""
    return [role for role in of_kind(items, "ClusterRole") if not role["metadata"]["name"].endswith("-viewer")]


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
    # The API server only where events or the JSON API are wanted, and then two verbs on events, and reviews.
    quiet = {"events": {"enabled": False}, "api": {"enabled": False}}
    assert not kinds(quiet) & {"ClusterRole", "ClusterRoleBinding", "Role", "RoleBinding"}
    rules = lambda values: [rule for role in own_roles(objects(values)) for rule in role["rules"]]
    events = [{"apiGroups": [""], "resources": ["events"], "verbs": ["create", "patch"]}]
    reviews = [
        {"apiGroups": ["authentication.k8s.io"], "resources": ["tokenreviews"], "verbs": ["create"]},
        {"apiGroups": ["authorization.k8s.io"], "resources": ["subjectaccessreviews"], "verbs": ["create"]},
    ]
    assert rules({"api": {"enabled": False}}) == events
    assert rules({"events": {"enabled": False}}) == reviews
    # The viewer has what a reader of all namespaces has, nothing runs as it, and it can be left out.
    (viewer,) = [binding for binding in of_kind(objects({}), "ClusterRoleBinding") if binding["subjects"][0]["name"] == "tessera-viewer"]
    (role,) = [role for role in of_kind(objects({}), "ClusterRole") if role["metadata"]["name"] == viewer["roleRef"]["name"]]
    assert role["rules"] == [{"apiGroups": [""], "resources": ["pods"], "verbs": ["get"]}]
    assert all(spec["serviceAccountName"] != "tessera-viewer" for spec in pod_specs(objects({"console": {"enabled": True}})))
    assert "tessera-viewer" not in json.dumps(objects({"api": {"viewer": False}}))
    # Readers reach the pods of the plugin, and nobody does unless named.
    assert not of_kind(objects({}), "Role")
    group = {"kind": "Group", "name": "developers", "apiGroup": "rbac.authorization.k8s.io"}
    readers = objects({"api": {"readers": [group]}})
    (role,), (binding,) = of_kind(readers, "Role"), of_kind(readers, "RoleBinding")
    assert [(rule["resources"], rule["verbs"]) for rule in role["rules"]] == [(["pods"], ["get", "list"]), (["pods/proxy"], ["get"])]
    assert binding["subjects"] == [group] and binding["metadata"]["namespace"] == role["metadata"]["namespace"] == "tessera"


@check
def least_privilege():
    """One privileged container at most, which ends; the plugin has nothing; a token only for the API server."""
    for name, values in value_sets().items():
        defaults = {"events": True, "dra": False, "api": True}
        token = any(values.get(key, {}).get("enabled", default) for key, default in defaults.items())
        for spec in pod_specs(objects(values)):
            assert spec["automountServiceAccountToken"] is (token and not values.get("cleanup", {}).get("enabled", False)), name
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


def classes(items):
    return {item["metadata"]["name"]: item for item in of_kind(items, "DeviceClass")}


@check
def dra_has_its_rights_sockets_and_classes():
    """And nothing of them is there without it. What one node's plugin may write is its own."""
    off = objects({"assumeApiVersions": ["resource.k8s.io/v1"]})
    assert not of_kind(off, "DeviceClass")
    without = {"events", "tokenreviews", "subjectaccessreviews"}
    assert all(set(rule["resources"]) <= without for role in own_roles(off) for rule in role["rules"])
    assert "plugins_registry" not in json.dumps(off)
    items = objects({"dra": {"enabled": True}, "api": {"enabled": False}})
    (role,) = of_kind(items, "ClusterRole")
    verbs = {(rule["resources"][0], verb) for rule in role["rules"] for verb in rule["verbs"]}
    slices = {("resourceslices", verb) for verb in ("list", "watch", "create", "update", "delete")}
    status = {("resourceclaims/status", "patch")} | {("resourceclaims/driver", f"associated-node:{v}") for v in ("update", "patch")}
    others = {("resourceclaims", "get"), ("nodes", "get"), ("events", "create"), ("events", "patch")}
    assert verbs == slices | status | others, verbs
    (driver,) = [rule for rule in role["rules"] if rule["resources"] == ["resourceclaims/driver"]]
    assert driver["resourceNames"] == ["gpu.tessera.dev"], driver
    (binding,) = of_kind(items, "ClusterRoleBinding")
    assert binding["subjects"] == [{"kind": "ServiceAccount", "name": "tessera", "namespace": "tessera"}], binding
    (spec,) = pod_specs(items)
    (plugin,) = spec["containers"]
    variables = {v["name"]: v.get("valueFrom", {}).get("fieldRef", {}).get("fieldPath") for v in plugin["env"]}
    assert (variables["NODE_NAME"], variables["POD_UID"]) == ("spec.nodeName", "metadata.uid")
    mounts = {m["name"]: m["mountPath"] for m in plugin["volumeMounts"]}
    assert mounts["plugins-registry"] == "/var/lib/kubelet/plugins_registry"
    assert mounts["dra"] == "/var/lib/kubelet/plugins/gpu.tessera.dev"
    (policy,) = of_kind(items, "NetworkPolicy")
    assert policy["spec"]["egress"], "the API server is out of reach"
    # One beside the other while it is updated, unless that is not wanted.
    strategy = lambda values: of_kind(objects({"dra": {"enabled": True} | values}), "DaemonSet")[0]["spec"]["updateStrategy"]
    assert strategy({}) == {"type": "RollingUpdate", "rollingUpdate": {"maxSurge": 1, "maxUnavailable": 0}}
    assert strategy({"maxSurge": 0})["rollingUpdate"] == {"maxUnavailable": 1}


@check
def device_classes_select_what_they_say():
    """By their CEL, on devices as the driver publishes them."""
    import celpy

    made = classes(objects(manifests.values(manifests.HERE / "cases/dra.values.yaml")))
    assert {name: item["spec"].get("extendedResourceName") for name, item in made.items()} == {
        "gpu.tessera.dev": "tessera.dev/gpu", "mig.gpu.tessera.dev": "tessera.dev/mig", "h100.gpu.tessera.dev": "tessera.dev/h100",
    }
    (strict,) = made["h100.gpu.tessera.dev"]["spec"]["config"]
    assert strict["opaque"] == {
        "driver": "gpu.tessera.dev", "parameters": {"apiVersion": "gpu.tessera.dev/v1", "kind": "ShareConfig", "compute": "strict"},
    }
    device = lambda driver="gpu.tessera.dev", **attributes: {"driver": driver, "attributes": {"gpu.tessera.dev": attributes}}
    l4, h100 = device(productName="NVIDIA L4"), device(productName="NVIDIA H100 80GB HBM3")
    mig = device(productName="NVIDIA A100-SXM4-80GB", profile="1g.10gb")
    other = device("gpu.nvidia.com", productName="NVIDIA H100 PCIe", profile="1g.10gb")
    want = {"gpu.tessera.dev": [l4, h100, mig], "mig.gpu.tessera.dev": [mig], "h100.gpu.tessera.dev": [h100]}
    environment = celpy.Environment()
    for name, item in made.items():
        (selector,) = item["spec"]["selectors"]
        program = environment.program(environment.compile(selector["cel"]["expression"]))
        chosen = [d for d in (l4, h100, mig, other) if program.evaluate({"device": celpy.json_to_cel(d)})]
        assert chosen == want[name], (name, chosen)


@check
def slices_of_other_nodes_are_refused_by_the_policy():
    import celpy

    policies = [p for p in of_kind(objects({"dra": {"enabled": True}}), "ValidatingAdmissionPolicy") if p["metadata"]["name"].endswith("-slices")]
    (spec,) = [p["spec"] for p in policies]
    assert not of_kind(objects({"dra": {"enabled": True, "admissionPolicy": False}}), "ValidatingAdmissionPolicy")
    environment = celpy.Environment()

    def evaluate(expression, **given):
        for optional, plain in OPTIONAL.items():
            expression = expression.replace(optional, plain)
        assert ".?" not in expression and "[?" not in expression, expression
        given = {name: celpy.json_to_cel(value) for name, value in given.items()}
        return environment.program(environment.compile(expression)).evaluate(given)

    key = "authentication.kubernetes.io/node-name"
    own = lambda node, driver="gpu.tessera.dev": {"spec": {"driver": driver} | ({"nodeName": node} if node else {})}
    plugin = "system:serviceaccount:tessera:tessera"
    for admitted, user, extra, operation, slice in [
        (True, plugin, {key: ["n1"]}, "CREATE", own("n1")),
        (True, plugin, {key: ["n1"]}, "DELETE", own("n1")),
        (False, plugin, {key: ["n1"]}, "UPDATE", own("n2")),
        (False, plugin, {key: ["n1"]}, "DELETE", own("n2")),
        (False, plugin, {key: ["n1"]}, "CREATE", own("n1", "gpu.nvidia.com")),
        (False, plugin, {key: ["n1"]}, "CREATE", own(None)),
        (False, plugin, {}, "CREATE", own("n1")),
        (True, "system:node:n2", {}, "DELETE", own("n1")),
    ]:
        given = {"request": {"userInfo": {"username": user, "extra": extra}, "operation": operation}}
        empty = {"spec": {"driver": ""}}
        given |= {"object": empty, "oldObject": slice} if operation == "DELETE" else {"object": slice, "oldObject": empty}
        said = []
        if all(evaluate(c["expression"], **given) for c in spec["matchConditions"]):
            variables = {}
            for variable in spec["variables"]:
                value = evaluate(variable["expression"], variables=variables, **given)
                variables[variable["name"]] = json.loads(json.dumps(value, cls=celpy.CELJSONEncoder))
            for rule in spec["validations"]:
                if not evaluate(rule["expression"], variables=variables):
                    said.append(rule.get("message") or str(evaluate(rule["messageExpression"], variables=variables)))
        assert (said == []) is admitted, (user, extra, operation, slice, said)


@check
def claims_that_would_loosen_a_limit_are_refused_by_the_policy():
    class_of = lambda name, said: {"name": name, "expression": "true", "compute": said}
    more = [class_of("capped", "strict"), class_of("free", "none"), class_of("weighed", "burst")]
    values = {"dra": {"enabled": True, "deviceClasses": {"more": more}}}
    made = of_kind(objects(values), "ValidatingAdmissionPolicy")
    policy = [item for item in made if item["metadata"]["name"].endswith("-claims")]
    exact = lambda name, of: {"name": name, "exactly": {"deviceClassName": of}}
    first = lambda name, **of: {"name": name, "firstAvailable": [{"name": n, "deviceClassName": c} for n, c in of.items()]}
    says = lambda said, *requests, driver="gpu.tessera.dev": {"opaque": {"driver": driver, "parameters": {
        "apiVersion": "gpu.tessera.dev/v1", "kind": "ShareConfig"} | ({"compute": said} if said else {})}} | (
        {"requests": list(requests)} if requests else {})
    silent, capped = exact("a", "gpu.tessera.dev"), exact("b", "capped")
    for admitted, requests, config in [
        (True, [silent], None), (True, [silent], [says(None)]), (True, [silent], [says("burst")]),
        (True, [silent], [says("strict")]), (False, [silent], [says("none")]), (False, [exact("a", "elses")], [says("none")]),
        (True, [capped], [says("strict")]), (False, [capped], [says("burst")]), (False, [capped], [says("none")]),
        (True, [exact("a", "free")], [says("none")]), (False, [exact("a", "weighed")], [says("none")]),
        # The driver names what it does not know.
        (True, [silent], [says("fast")]),
        # Of the requests that it is for, and of its own driver alone.
        (True, [silent, capped], [says("burst", "a")]), (False, [silent, capped], [says("burst", "a", "b")]),
        (False, [silent, capped], [says("strict", "a"), says("burst")]),
        (True, [capped], [says("none", driver="gpu.nvidia.com")]),
        (False, [first("a", big="capped", small="free")], [says("none", "a")]),
        (True, [first("a", big="capped", small="free")], [says("none", "a/small")]),
        (False, [first("a", big="capped", small="free")], [says("burst", "a/big")]),
    ]:
        spec = {"devices": {"requests": requests} | ({"config": config} if config else {})}
        for whole in [spec, {"metadata": {}, "spec": spec}]:
            said = refusal("claims", whole, policy)
            assert (said is None) is admitted, (whole, said)
            assert admitted or "looser than DeviceClass " in said, said


@check
def examples_of_dra_name_what_there_is():
    """Every claim names a class of the chart and capacities and attributes of the driver; pods name their claims."""
    made = set(classes(objects({"dra": {"enabled": True}})))
    files = sorted((ROOT / "deploy/examples/dra").glob("*.yaml"))
    assert len(files) >= 8, files
    known = re.findall(r'put\("([A-Za-z]+)"', (ROOT / "plugin/dra/src/publish/device.rs").read_text())
    assert {"productName", "profile", "cudaComputeCapability"} <= set(known), known
    for file in files:
        documents = [d for d in engine.load_all(file.read_text()) if d]
        own = {d["metadata"]["name"] for d in documents if d["kind"] == "DeviceClass"}
        templates = {d["metadata"]["name"]: d for d in documents if d["kind"] == "ResourceClaimTemplate"}
        claims = {d["metadata"]["name"]: d for d in documents if d["kind"] == "ResourceClaim"}
        specs = [d["spec"]["spec"] for d in templates.values()] + [d["spec"] for d in claims.values()]
        for spec in specs:
            for request in spec["devices"]["requests"]:
                for one in request.get("firstAvailable") or [request["exactly"]]:
                    assert one["deviceClassName"] in made | own, (file, one)
                    assert set(one.get("capacity", {}).get("requests", {})) <= {"memory", "cores"}, (file, one)
                    for selector in one.get("selectors", []):
                        used = re.findall(r'attributes\["gpu\.tessera\.dev"\]\.([A-Za-z]+)', selector["cel"]["expression"])
                        assert used and set(used) <= set(known), (file, used)
        pods = [d["spec"] for d in documents if d["kind"] == "Pod"]
        pods += [d["spec"]["template"]["spec"] for d in documents if d["kind"] in ("Deployment", "Job")]
        assert pods, file
        for pod in pods:
            named = {c["name"]: c for c in pod.get("resourceClaims", [])}
            for claim in named.values():
                assert claim.get("resourceClaimTemplateName") in templates or claim.get("resourceClaimName") in claims, (file, claim)
            for container in pod["containers"]:
                wanted = container["resources"]
                used = wanted.get("claims", [])
                assert used or "tessera.dev/gpu" in wanted["limits"], (file, container)
                for use in used:
                    claim = named[use["name"]]
                    spec = (templates.get(claim.get("resourceClaimTemplateName")) or {"spec": claims.get(claim.get("resourceClaimName"))})["spec"]
                    requests = {r["name"] for r in spec.get("spec", spec)["devices"]["requests"]}
                    assert use.get("request") is None or use["request"] in requests, (file, use)


# What may stand in the manifests for autoscalers: kinds of values by field, as `autoscaling/v2` and KEDA's CRD
# (`keda.sh/v1alpha1`) have them, as far as the examples use them. A list has the kind of its items.
REFERENCE = {"apiVersion": str, "kind": str, "name": str}
BEHAVIOUR = {"stabilizationWindowSeconds": int, "policies": [{"type": {"Pods", "Percent"}, "value": int, "periodSeconds": int}]}
BEHAVIOURS = {"scaleUp": BEHAVIOUR, "scaleDown": BEHAVIOUR}
AUTOSCALERS = {
    "HorizontalPodAutoscaler": {
        "apiVersion": {"autoscaling/v2"}, "kind": str, "metadata": {"name": str},
        "spec": {
            "scaleTargetRef": REFERENCE, "minReplicas": int, "maxReplicas": int, "behavior": BEHAVIOURS,
            "metrics": [{"type": {"Pods"}, "pods": {
                "metric": {"name": str}, "target": {"type": {"AverageValue"}, "averageValue": re.compile("[1-9][0-9]*m?")},
            }}],
        },
    },
    "ScaledObject": {
        "apiVersion": {"keda.sh/v1alpha1"}, "kind": str, "metadata": {"name": str},
        "spec": {
            "scaleTargetRef": {"name": str}, "minReplicaCount": int, "maxReplicaCount": int, "pollingInterval": int,
            "advanced": {"horizontalPodAutoscalerConfig": {"behavior": BEHAVIOURS}},
            # Without these, no answer counts as 0, which takes pods away.
            "fallback": {"failureThreshold": int, "replicas": int, "behavior": {"currentReplicas"}},
            # KEDA's fallback is for averages alone.
            "triggers": [{"type": {"prometheus"}, "metricType": {"AverageValue"}, "metadata": {
                "serverAddress": re.compile("https?://.+"), "query": str, "threshold": re.compile(r"[0-9]*\.?[0-9]+"),
                "ignoreNullValues": {"false"},
            }}],
        },
    },
}


def has_kind(value, kind, place=""):
    """A value is of the given kind, with every field and no other."""
    if isinstance(kind, dict):
        assert isinstance(value, dict) and set(value) == set(kind), (place, value, sorted(kind))
        for key, item in value.items():
            has_kind(item, kind[key], f"{place}.{key}")
    elif isinstance(kind, list):
        assert isinstance(value, list) and value, (place, value)
        for item in value:
            has_kind(item, kind[0], f"{place}[]")
    elif isinstance(kind, set):
        assert value in kind, (place, value, kind)
    elif isinstance(kind, re.Pattern):
        assert isinstance(value, str) and kind.fullmatch(value), (place, value, kind)
    else:
        assert type(value) is kind, (place, value, kind)


@check
def autoscalers_use_metrics_that_there_are():
    """HPA and ScaledObject are as their APIs have them, for a Deployment of the examples, with the adapter's metrics."""
    examples = ROOT / "deploy/examples"
    load = lambda name: engine.load((examples / name).read_text())
    rules = load("autoscale/prometheus-adapter.yaml")["rules"]["custom"]
    for rule in rules:
        assert set(rule) == {"seriesQuery", "resources", "name", "metricsQuery"}, rule
        assert rule["resources"] == {"overrides": {name: {"resource": name} for name in ("namespace", "pod")}}, rule
        assert "<<.LabelMatchers>>" in rule["metricsQuery"] and "<<.GroupBy>>" in rule["metricsQuery"], rule
    made = {rule["name"]["as"] for rule in rules}
    target = next(d for d in engine.load_all((examples / "inference.yaml").read_text()) if d)
    hpa, keda = load("autoscale/hpa.yaml"), load("autoscale/keda.yaml")
    for item in (hpa, keda):
        has_kind(item, AUTOSCALERS[item["kind"]], item["kind"])
        assert item["spec"]["scaleTargetRef"]["name"] == target["metadata"]["name"], item
    assert hpa["spec"]["scaleTargetRef"] == {"apiVersion": target["apiVersion"], "kind": target["kind"], "name": target["metadata"]["name"]}
    used = {metric["pods"]["metric"]["name"] for metric in hpa["spec"]["metrics"]}
    assert used and used <= made, (used, made)
    # Both scale alike.
    thresholds = [int(metric["pods"]["target"]["averageValue"].removesuffix("m")) / 1000 for metric in hpa["spec"]["metrics"]]
    assert thresholds == [float(trigger["metadata"]["threshold"]) for trigger in keda["spec"]["triggers"]], thresholds
    assert hpa["spec"]["behavior"] == keda["spec"]["advanced"]["horizontalPodAutoscalerConfig"]["behavior"]
    assert hpa["spec"]["maxReplicas"] == keda["spec"]["maxReplicaCount"]


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
    assert below(config["paths"].get("kubelet", "/var/lib/kubelet/device-plugins"), "device-plugins")
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
    takes = {key.strip("| `"): (accepts, json.loads(default.strip("`"))) for key, accepts, default, meaning in rows
             if meaning.endswith("*After a restart.* |")}
    assert len(takes) > 9 and "kubernetes.events" not in takes, takes
    for name, (accepts, default) in takes.items():
        table, key = name.split(".")
        # DRA takes what the chart does for it, and is on then.
        more, values = (asked | {"dra": {"enabled": True}}, [False]) if name == "dra.enabled" else (asked, others(accepts, default))
        before = template(live, **more)
        # The chart's own values make these.
        if key == "listen":
            assert template(live, **more, **{table: {"port": 1234}}) != before, name
            continue
        # Neither stands alone, and a token needs TLS of its own kind.
        if key in ("tls_cert", "tls_key"):
            changed = template(live | {table: {"tls_cert": "/a", "tls_key": "/b"}}, **more)
            assert changed != template(live | {table: {"tls_cert": "/a", "tls_key": "/b"} | {key: "/c"}}, **more), name
            continue
        if name == "api.authorisation":
            more = more | {"api": {"address": "127.0.0.1"}}
            before = template(live, **more)
        # Of one of them the chart may have made its own default.
        changed = [template(live | {table: {key: value}}, **more) for value in values]
        assert any(one != before for one in changed), f"{name} takes a restart, and the checksum does not know it"
    # Of a node's label, too.
    labelled = lambda config: template(live, **asked, nodeConfigs={"enabled": True, "configurations": {"l4": config}})
    assert labelled({"ledger": {"fsync": False}}) != labelled({}) == labelled({"ledger": {"release_after": "1m"}})
    # Beside those, in tables that have some.
    for table, key, value in [("ledger", "release_after", "1m"), ("log", "filter", "debug")]:
        assert template(live | {table: {key: value}}, **asked) == base, f"{table}.{key} is taken live"


# This evaluator of CEL has no optional fields: what they would give is given.
OPTIONAL = {
    'object.spec.?runtimeClassName.orValue("")': '(has(object.spec.runtimeClassName) ? object.spec.runtimeClassName : "")',
    "object.spec.?initContainers.orValue([])": "(has(object.spec.initContainers) ? object.spec.initContainers : [])",
    "c.?resources.?limits.orValue({})": "(has(c.resources) ? (has(c.resources.limits) ? c.resources.limits : {}) : {})",
    'request.userInfo.?extra[?"authentication.kubernetes.io/node-name"][0].orValue("")':
        '("authentication.kubernetes.io/node-name" in request.userInfo.extra ? '
        'request.userInfo.extra["authentication.kubernetes.io/node-name"][0] : "")',
    'variables.slice.spec.?nodeName.orValue("")': '(has(variables.slice.spec.nodeName) ? variables.slice.spec.nodeName : "")',
    "c.?resources.?claims.orValue([])": "(has(c.resources) ? (has(c.resources.claims) ? c.resources.claims : []) : [])",
    "c.?volumeMounts.orValue([])": "(has(c.volumeMounts) ? c.volumeMounts : [])",
}


def refusal(name, pod, documents=None):
    """What the policy of deploy/policies/NAME, or the one of these documents, says of a pod's specification, by its
    CEL; nothing if it is admitted."""
    import celpy

    documents = documents or engine.load_all((ROOT / f"deploy/policies/{name}.yaml").read_text())
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
    assumed = {"assumeApiVersions": ["admissionregistration.k8s.io/v1/ValidatingAdmissionPolicy"], "admissionPolicy": {"enabled": True}}
    with_dra = [p for p in objects(assumed | {"dra": {"enabled": True}}) if p["metadata"]["name"].endswith("-volumes")]
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
        # With DRA, a container that names a claim may hold one.
        claiming = {"name": "s", "resources": {"claims": [{"name": "gpu"}]}} | mounts
        assert refusal("volumes", {"containers": [claiming]}) is None, path
        said = refusal("volumes", {"containers": [PLAIN, claiming]}, with_dra)
        assert (said is None) is admitted, path
        # Who holds no share may mount what it likes where it likes.
        assert refusal("volumes", {"containers": [PLAIN | mounts, SHARE]}) is None, path


@check
def dockerfile():
    """Hadolint's rules. Debian's versions are not pinned: its mirrors keep only the newest (DL3008)."""
    tool = Path(sys.executable).with_name("hadolint")
    command = [tool, "--no-color", "--ignore", "DL3008", ROOT / "deploy/Dockerfile"]
    run = subprocess.run(command, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stdout + run.stderr
    stages = {"scratch"}
    for line in (ROOT / "deploy/Dockerfile").read_text().splitlines():
        if line.startswith("FROM "):
            stages.add(line.split()[-1])
        if line.startswith("FROM ") and line.split()[1] not in stages:
            tag = line.split()[1].rpartition(":")[2]
            assert tag not in ("", "latest") and any(c.isdigit() for c in tag), f"not pinned: {line}"


def update():
    """Writes the schema first: rendering judges the values by it."""
    schema.FILE.write_text(schema.make())
    monitoring.DASHBOARD.write_text(monitoring.dashboard())
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
