"""What a release may vary: configurations by a node's label, a ConfigMap of one's own, security contexts; and the icon."""

import base64
import re

import engine
from engine import CHART, ChartError, objects
from registry import check


@check
def icon_is_the_files():
    icon = engine.load((CHART / "Chart.yaml").read_text())["icon"]
    assert icon == "data:image/svg+xml;base64," + base64.b64encode((CHART / "icon.svg").read_bytes()).decode()


@check
def node_configs_are_chosen_by_label():
    """Every configuration is a file beside the default one, and the plugin may follow its node's label. Not otherwise."""
    (off,) = [i for i in objects({}) if i["kind"] == "DaemonSet"]
    assert off["spec"]["template"]["spec"]["containers"][0]["command"] == ["tessera", "serve"]
    named = {"l4": {"share": {"replicas": 2}}, "a100": {"share": None}}
    values = {"events": {"enabled": False}, "api": {"enabled": False}, "nodeConfigs": {"enabled": True, "configurations": named}}
    items = objects(values)
    (config,) = [i for i in items if i["kind"] == "ConfigMap"]
    assert set(config["data"]) == {"config.toml", "l4.toml", "a100.toml"}
    assert "replicas = 2" in config["data"]["l4.toml"] and "[share]" not in config["data"]["a100.toml"]
    (spec,) = [i["spec"]["template"]["spec"] for i in items if i["kind"] == "DaemonSet"]
    (plugin,) = spec["containers"]
    assert plugin["command"] == ["tessera", "serve", "--config-label", "tessera.dev/config"]
    assert spec["automountServiceAccountToken"] is True and "NODE_NAME" in {v["name"] for v in plugin["env"]}
    (role,) = [i for i in items if i["kind"] == "ClusterRole"]
    assert role["rules"] == [{"apiGroups": [""], "resources": ["nodes"], "verbs": ["get", "watch"]}], role
    (policy,) = [i for i in items if i["kind"] == "NetworkPolicy"]
    assert policy["spec"]["egress"]
    for bad, said in [
        ({"config": {}}, "config"), ({"../x": {}}, "x"), ({"l4": {"driver": {"root": "/run"}}}, "driver"),
        ({"l4": {"share": {"replicas": 0}}}, "replicas"),
    ]:
        try:
            objects({"nodeConfigs": {"enabled": True, "configurations": bad}})
        except ChartError as error:
            assert said in str(error), error
        else:
            raise AssertionError(f"accepted: {bad}")


@check
def a_config_map_of_ones_own_is_mounted():
    """None is made then; a profile may have another."""
    values = {"existingConfigMap": "ours", "profiles": {"default": {}, "l4": {"existingConfigMap": "theirs"}, "a100": {"existingConfigMap": None}}}
    items = objects(values)
    assert [i["metadata"]["name"] for i in items if i["kind"] == "ConfigMap"] == ["tessera-a100"]
    mounted = {}
    for item in items:
        if item["kind"] == "DaemonSet":
            (volume,) = [v for v in item["spec"]["template"]["spec"]["volumes"] if v["name"] == "config"]
            mounted[item["metadata"]["name"]] = volume["configMap"]["name"]
    assert mounted == {"tessera": "ours", "tessera-l4": "theirs", "tessera-a100": "tessera-a100"}, mounted


@check
def security_contexts_are_laid_over_the_charts():
    """Key by key: what is not said stays as narrow as it was."""
    values = {"podSecurityContext": {"fsGroup": 7}, "securityContext": {"seccompProfile": {"type": "Unconfined"}, "privileged": False}}
    values |= {"terminationGracePeriodSeconds": 45, "seLinuxOptions": {"type": "spc_t"}}
    (item,) = [i for i in objects(values) if i["kind"] == "DaemonSet"]
    spec = item["spec"]["template"]["spec"]
    context = spec["containers"][0]["securityContext"]
    assert (context["runAsUser"], context["readOnlyRootFilesystem"], context["capabilities"]) == (0, True, {"drop": ["ALL"]}), context
    assert (context["seccompProfile"], context["privileged"]) == ({"type": "Unconfined"}, False), context
    assert context["seLinuxOptions"] == {"type": "spc_t"}, context
    assert (spec["securityContext"], spec["terminationGracePeriodSeconds"]) == ({"fsGroup": 7}, 45), spec
    assert not re.search(r"(?m)^ {6}securityContext:", (CHART.parents[1] / "tessera.yaml").read_text())
