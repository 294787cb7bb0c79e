"""Checks that the chart refuses values with which the plugin would not start, or could not work, and says what to do."""

import itertools
import json
import re
import tomllib

import commands
import engine
import manifests
from engine import CHART, ChartError, objects
from registry import check


def refused(values, **options):
    """What the chart says of these values; nothing if it takes them."""
    try:
        engine.template(values, **options)
    except ChartError as error:
        return str(error)
    return None


def of_kind(items, kind):
    return [item for item in items if item["kind"] == kind]


def pod(values, **options):
    """The plugin's pod, of one DaemonSet."""
    (item,) = of_kind(objects(values, **options), "DaemonSet")
    return item["spec"]["template"]["spec"]


@check
def values_that_cannot_work_are_refused():
    """By the schema or by a sentence; what the message must have in it is beside."""
    on_node = lambda config: {"nodeConfigs": {"enabled": True, "configurations": {"l4": config}}}
    for values, said in [
        ({"metrics": {"address": "::1"}}, "metrics/address"),
        ({"metrics": {"address": "localhost"}}, "metrics/address"),
        ({"metrics": {"address": "zz\""}}, "metrics/address"),
        ({"api": {"address": "1.2.3.400"}}, "api/address"),
        ({"metrics": {"port": 9481}}, "give one of them another"),
        ({"config": {"metrics": {"listen": ":1234"}}}, "metrics.port"),
        ({"profiles": {"l4": {"config": {"api": {"listen": ""}}}}}, "profiles.l4.config.api.listen"),
        (on_node({"metrics": {"listen": ":1234"}}), "nodeConfigs.configurations.l4.metrics.listen"),
        (on_node({"cdi": {"directory": "/etc/cdi"}}), "cdi.directory"),
        ({"config": {"api": {"authorisation": "none"}}}, "set api.address: 127.0.0.1"),
        ({"config": {"api": {"tls_cert": "/a"}}}, "set both"),
        ({"config": {"driver": {"root": "/a", "libraries": "/b"}}}, "set one"),
        ({"config": {"labels": {"nfd_file": "/etc/features.d/tessera"}}}, "nodeLabels.nfd"),
        ({"nodeLabels": {"nfd": True}, "config": {"labels": {"nfd_file": "/elsewhere/tessera"}}}, "nodeLabels.directory"),
        ({"events": {"enabled": False}, "config": {"kubernetes": {"events": "auto"}}}, "events.enabled: true"),
        (on_node({"share": {"cores": "50%"}}), "nodeConfigs.configurations.l4.share.cores"),
        ({"console": {"enabled": True}, "api": {"enabled": False}}, "api.enabled: true"),
        ({"serviceAccount": {"create": False}}, "serviceAccount.name"),
        ({"podLabels": {"app.kubernetes.io/name": "other"}}, "invalid propertyName"),
        ({"updateStrategy": {"rollingUpdate": {"maxUnavailable": 0}}}, "maxUnavailable"),
        ({"updateStrategy": {"rollingUpdate": {"maxUnavailable": "10x"}}}, "maxUnavailable"),
        ({"fullnameOverride": "null"}, "fullnameOverride"),
        ({"networkPolicy": {"apiServerPorts": []}}, "apiServerPorts"),
    ]:
        text = refused(values)
        assert text and said in text, (values, text)
    for values in [
        {"metrics": {"address": "127.0.0.1"}, "hostNetwork": True}, {"metrics": {"address": "[::1]"}},
        {"config": {"api": {"authorisation": "none"}}, "api": {"address": "127.0.0.1"}},
        {"updateStrategy": {"rollingUpdate": {"maxUnavailable": "10%"}}}, on_node({"share": {"cores": "25%"}}),
        {"nodeLabels": {"nfd": True, "directory": "/nfd"}, "config": {"labels": {"nfd_file": "/nfd/gpus"}}},
        {"metrics": {"enabled": False, "port": 9481}}, {"podLabels": {"app": "gpu"}},
    ]:
        assert refused(values) is None, (values, refused(values))


def quantities():
    """Keys of amounts that the plugin bounds, by its own schema, each with amounts near the bound in all notations."""
    tables = json.loads((CHART / "values.schema.json").read_text())["definitions"]["config"]["properties"]
    for table, keys in tables.items():
        for key, known in keys.get("properties", {}).items():
            least = known.get("exclusiveMinimum", 0) + 1
            if least == 1:
                continue
            amounts = [1, 5, least - 1, least, least + 1, 2 * least, 10**8, 10**9, 2**30]
            values = [*amounts, *([] if "multipleOf" in known else [least - 0.5]), *map(str, amounts), f"{least - 1}.5", f"+{least}", f"{least}000m", f"{least}000m1"]
            kib, mib = least // 2**10, least / 2**20
            values += [f"{kib - 1}Ki", f"{kib - 1}.9999Ki", f"{kib}Ki", f"{kib + 1}Ki", f"{mib - 0.5}Mi", f"{mib:g}Mi", f"{mib + 1:g}Mi"]
            values += ["5k", "0.5M", "1M", "5M", "100M", "1G", "0.001Gi", "0.5Gi", "1.5Gi", "1Ti", "1e3", "1e9", "4194304e0", "1E7", "3e-2", "1536Ki", "9999999n", "7u"]
            yield table, key, values


@check
def chart_and_plugin_agree_between_keys():
    """What `tessera config check` (TESSERA) says of pairs of keys, the chart says before anything is installed."""
    cases = []
    for table, short, long, lengths in [
        ("compute", "quantum_min", "quantum", ["1ms", "+2ms", "5ms", "6ms", "1s"]),
        ("compute", "quantum", "quantum_max", ["4ms", "5ms", "20ms", "21ms", "1s"]),
        ("compute", "drain_min", "drain_max", ["1ms", "20ms", "200ms", "201ms", "1s"]),
        ("health", "recovery", "recovery_max", ["100ms", "5m", "300s", "1h", "61m", "2h"]),
        ("history", "keep_10s", "keep_5m", ["1h", "24h", "25h", "168h"]),
        ("history", "keep_5m", "keep_1h", ["168h", "840h", "841h"]),
    ]:
        for a, b in itertools.product([None, *lengths], repeat=2):
            cases.append({table: {key: value for key, value in ((short, a), (long, b)) if value}})
    for cores, replicas in itertools.product(["auto", "25%", "25.1%", "250m", "251m", "100 %", 0.25, 0.3, 1], [None, 1, 4, 5]):
        cases.append({"share": {"cores": cores} | ({"replicas": replicas} if replicas else {})})
    for table, key, bounds in quantities():
        for value in bounds:
            cases.append({table: {key: value}})
    for step, share, enabled in itertools.product([None, "64Mi", "4Gi", "8Gi"], [None, "auto", "1Gi", "4Gi", "63999999"], [False, True]):
        cases.append({
            "dra": {"gpus": ["none"]} | ({"memory_step": step} if step else {}) | {"enabled": enabled},
            "share": {"memory": share} if share else {},
        })
    for memory, overhead in itertools.product([None, "auto", "1Gi", "1.5Gi", 2**30], [None, "auto", 0, "1Gi", "1025Mi", "2G"]):
        cases.append({
            "share": {"memory": memory} if memory else {}, "gpus": {} if overhead is None else {"context_overhead": overhead},
        })
    for config in cases:
        values = {"config": {table: {key: value for key, value in keys.items() if (table, key) != ("dra", "enabled")} for table, keys in config.items()}}
        said, judged = refused(values | {"dra": {"enabled": config.get("dra", {}).get("enabled", False)}}), None
        if said and "values don't meet" in said:
            continue  # the schema's, about one key
        try:
            commands.accepted("".join(f"[{table}]\n" + "".join(f"{key} = {json.dumps(value)}\n" for key, value in keys.items()) for table, keys in config.items()))
        except AssertionError as error:
            judged = str(error)
        assert (said is None) == (judged is None), (config, said, judged)
    for address in ["", "127.0.0.1", "[::1]", "[::]", "0.0.0.0", "10.0.0.255"]:
        (config,) = of_kind(objects({"metrics": {"address": address}, "api": {"address": address}}), "ConfigMap")
        commands.accepted(config["data"]["config.toml"])


@check
def events_that_are_off_are_off_for_the_plugin_too():
    """It would try and warn where the right is taken away alone."""
    for more in ({}, {"dra": {"enabled": True}}, {"profiles": {"l4": {}}}):
        maps = of_kind(objects({"events": {"enabled": False}} | more), "ConfigMap")
        assert maps and all('events = "off"' in item["data"]["config.toml"] for item in maps), more
    assert all("events" not in item["data"]["config.toml"] for item in of_kind(objects({}), "ConfigMap"))


@check
def readiness_is_asked_where_the_plugin_listens():
    """Kubelet asks at the pod's address; an update needs the old pod's ports where they are the node's."""
    probe = lambda values: pod(values)["containers"][0]["readinessProbe"]
    assert probe({})["httpGet"]["path"] == "/readyz"
    for address in ("127.0.0.1", "[::1]", "10.0.0.1"):
        assert probe({"metrics": {"address": address}})["exec"]["command"] == ["tessera", "status", "--ready"], address
    for values in ({"dra": {"enabled": True}}, {}):
        (item,) = of_kind(objects(values | {"hostNetwork": True}), "DaemonSet")
        assert "maxSurge" not in json.dumps(item["spec"]["updateStrategy"]), item["spec"]["updateStrategy"]


@check
def cdi_specs_are_mounted_and_cleaned_where_the_configuration_has_them():
    at = {"config": {"cdi": {"directory": "/etc/cdi"}}}
    spec = pod(at)
    (mount,) = [m["mountPath"] for m in spec["containers"][0]["volumeMounts"] if m["name"] == "cdi"]
    (volume,) = [v["hostPath"]["path"] for v in spec["volumes"] if v["name"] == "cdi"]
    assert mount == volume == "/etc/cdi"
    clean = pod(at | {"profiles": {"l4": {"config": {"cdi": {"directory": "/run/cdi"}}}}, "cleanup": {"enabled": True}})
    (cleaner,) = clean["initContainers"]
    for path in ("/etc/cdi", "/run/cdi"):
        assert f"{path}/tessera.dev-share_*" in cleaner["command"][-1], cleaner["command"]
        assert path in {m["mountPath"] for m in cleaner["volumeMounts"]}
        assert path in {v["hostPath"]["path"] for v in clean["volumes"]}


@check
def the_api_server_is_reached_at_its_ports():
    ports = lambda values: [p["port"] for p in of_kind(objects(values), "NetworkPolicy")[0]["spec"]["egress"][0]["ports"]]
    assert ports({}) == [443, 6443, 53, 53]
    assert ports({"networkPolicy": {"apiServerPorts": [16443]}}) == [16443, 53, 53]


def leaves(node, path=""):
    """Each value with its path; keys of the names that differ are left out."""
    if isinstance(node, dict):
        for key, value in node.items():
            yield from leaves(value, f"{path}.{key}")
    elif isinstance(node, list):
        for number, value in enumerate(node):
            yield from leaves(value, f"{path}[{number}]")
    else:
        yield path, node


@check
def names_that_look_like_numbers_stay_strings():
    """Wherever a name of the user's goes."""
    def values(name):
        return {
            "serviceAccount": {"name": name}, "priorityClassName": name, "runtimeClassName": name, "api": {"readers": [{"kind": "Group", "name": name}]},
            "profiles": {"default": {}, name: {"existingConfigMap": name}}, "nodeSelector": {"a": name}, "podLabels": {"a": name},
            "imagePullSecrets": [{"name": name}], "console": {"enabled": True, "tlsSecret": name}, "image": {"tag": name},
            "dra": {"enabled": True, "deviceClasses": {"shares": {"name": name}}},
            "assumeApiVersions": ["monitoring.coreos.com/v1", "security.openshift.io/v1", "resource.k8s.io/v1"],
            "metrics": {"prometheusRule": {"enabled": False}},
        }

    plain = [dict(leaves(item)) for item in objects(values("abc"), release="abc", namespace="abc")]
    for name in ("123", "1e3", "true", "null", "0x1f", "1_000"):
        if not re.fullmatch("[a-z0-9]+", name):
            continue
        odd = [dict(leaves(item)) for item in objects(values(name), release=name, namespace=name)]
        kinds = lambda items: sorted((path, type(value).__name__) for item in items for path, value in item.items())
        assert kinds(odd) == kinds(plain), (name, set(kinds(odd)) ^ set(kinds(plain)))


@check
def values_of_an_older_chart_are_met_with_advice():
    """`helm upgrade --reuse-values` lacks what this chart has and the one before had not."""
    for key in engine.load((CHART / "values.yaml").read_text()):
        said = refused({key: None})
        assert said and f"`{key}`" in said and "--reset-then-reuse-values" in said, (key, said)


@check
def releases_share_no_pods():
    """Of what two releases make in one namespace, no selector takes the other's pods."""
    for values in ({"console": {"enabled": True}}, {"cleanup": {"enabled": True}}):
        for item in objects(values, release="one"):
            if item["kind"] in ("DaemonSet", "Deployment"):
                selector, labels = item["spec"]["selector"]["matchLabels"], item["spec"]["template"]["metadata"]["labels"]
                assert selector["app.kubernetes.io/instance"] == "one", item["metadata"]["name"]
                assert selector.items() <= labels.items()


@check
def notes_name_what_there_is():
    """What Helm says after an installation names each DaemonSet, each resource that is sold, and no other; claims where
    there are some."""
    profiles = {"default": None, "x": {}}
    layout = [{"gpus": ["*"], "shares": [{"resource": "tessera.dev/gpu-small", "count": 2}]}]
    cases = {path.stem: manifests.values(path) for path in manifests.cases().values()} | {
        "defaults": {}, "no default": {"profiles": profiles}, "own map": {"existingConfigMap": "mine"},
        "layout of all": {"config": {"layout": layout}}, "claims": {"dra": {"enabled": True}},
        "some claims": {"dra": {"enabled": True}, "config": {"dra": {"gpus": ["0"]}}},
        "own name": {"config": {"resource": {"name": "example.com/gpu"}}},
    }
    for name, values in cases.items():
        said, items = engine.notes(values), objects(values)
        assert not re.search(r"map\[|<nil>|%!|\n\n\n", said), (name, said)
        sets = {item["metadata"]["name"] for item in of_kind(items, "DaemonSet")}
        assert set(re.findall(r"daemonset/([\w-]+)", said)) == sets, (name, said)
        sold, claims = set(), False
        for item in of_kind(items, "DaemonSet"):
            (own,) = [v["configMap"]["name"] for v in item["spec"]["template"]["spec"]["volumes"] if "configMap" in v] or [None]
            texts = [text for i in of_kind(items, "ConfigMap") if i["metadata"]["name"] == own for text in i["data"].values()]
            for config in map(tomllib.loads, texts):
                layouts = config.get("layout", [])
                dra = config.get("dra", {})
                by_claims = dra.get("gpus", ["*"]) if dra.get("enabled") else []
                claims = claims or bool(by_claims)
                if "*" in by_claims:
                    continue
                sold |= {share["resource"] for each in layouts for share in each["shares"]}
                if not any("*" in each["gpus"] for each in layouts):
                    sold.add(config.get("resource", {}).get("name", "tessera.dev/gpu"))
        columns = set(re.findall(r"[:,]([\w./-]+):\.status\.allocatable", said))
        assert columns == sold, (name, columns, sold, said)
        assert ("kubectl get resourceslices" in said) is claims, (name, said)
        offered = re.findall(r"\d+ of ([\w./-]+)", said)
        assert set(offered) == sold, (name, offered, sold)
        assert (re.search(r"share with `resources: {limits: {([\w./-]+): 1}}`", said) is None) is (not sold), (name, said)
    assert "all GPUs, by claims" in engine.notes({"dra": {"enabled": True}})
    assert "what its ConfigMap mine says" in engine.notes({"existingConfigMap": "mine"})
