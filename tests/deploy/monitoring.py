"""Checks of alerts, runbook and dashboard. PROMTOOL names Prometheus' own judge of rules."""

import importlib.util
import itertools
import json
import os
import re
import subprocess
import tempfile
from pathlib import Path

import yaml

import manifests
import engine
from engine import CHART, ROOT, objects
from registry import check

RULES = ROOT / "deploy/prometheus/rules.yaml"
RUNBOOK = ROOT / "docs/runbook.md"
OPERATOR = {"assumeApiVersions": ["monitoring.coreos.com/v1"]}

# What the words in alerts.yaml stand for.
LABELS = {
    "CLUSTER": {"cluster": "prod"},
    "NODE": {"cluster": "prod", "node": "gpu-7", "instance": "10.0.0.7:9464"},
}
LABELS["@"] = LABELS["NODE"] | {"job": "tessera"}
LABELS["GPU"] = LABELS["@"] | {"gpu": "3", "uuid": "GPU-8f2c"}
TENANT = {"namespace": "chat", "pod": "llm-0", "container": "main", "allocation": "a1"}
LABELS["POD"] = LABELS["GPU"] | TENANT
LABELS["SPREAD"] = LABELS["@"] | TENANT


def groups():
    return engine.load(RULES.read_text())["groups"]


def alerts():
    return {rule["alert"]: rule for group in groups() for rule in group["rules"] if "alert" in rule}


def promtool(*arguments, cwd=None):
    tool = os.environ.get("PROMTOOL", "promtool")
    run = subprocess.run([tool, *arguments], capture_output=True, text=True, check=False, cwd=cwd)
    # A line for each alert that is as it should be is empty.
    assert run.returncode == 0, re.sub(r"\n\s*\n", "\n", run.stdout + run.stderr)
    return run.stdout


@check
def rules_pass_promtool():
    """As shipped, and the scrape configuration beside them. Debian's promtool knows no kubernetes_sd_configs."""
    out = promtool("check", "rules", str(RULES))
    assert f"{sum(len(group['rules']) for group in groups())} rules found" in out, out
    config = engine.load((ROOT / "deploy/prometheus/scrape.yaml").read_text())
    (job,) = config["scrape_configs"]
    job["static_configs"] = [{"targets": ["localhost:1"]}]
    assert job.pop("kubernetes_sd_configs") == [{"role": "pod", "namespaces": {"names": ["tessera"]}}]
    with tempfile.TemporaryDirectory() as directory:
        (Path(directory) / "rules.yaml").symlink_to(RULES)
        (Path(directory) / "prometheus.yml").write_text(yaml.safe_dump(config))
        promtool("check", "config", "prometheus.yml", cwd=directory)


def relabelled(rules, labels):
    """What a target's relabelling makes of these labels; None where it is dropped."""
    labels = dict(labels)
    for rule in rules:
        text = ";".join(labels.get(key, "") for key in rule.get("source_labels", rule.get("sourceLabels")))
        action = rule.get("action", "replace")
        if action == "keep" and not re.fullmatch(rule["regex"], text):
            return None
        if action == "replace":
            labels[rule.get("target_label", rule.get("targetLabel"))] = text
    return labels


@check
def every_scrape_names_the_node():
    """The plain Prometheus' and both of the operator's; the plain one picks the plugin's port and nothing else."""
    (spec,) = [item["spec"]["template"] for item in objects({}) if item["kind"] == "DaemonSet"]
    (plugin,) = spec["spec"]["containers"]
    (job,) = engine.load((ROOT / "deploy/prometheus/scrape.yaml").read_text())["scrape_configs"]
    assert job["honor_labels"] is True
    found = {}
    for port in [*plugin["ports"], {"name": "other"}]:
        meta = {"__meta_kubernetes_pod_node_name": "gpu-7", "__meta_kubernetes_pod_container_port_name": port["name"]}
        meta["__meta_kubernetes_pod_label_app_kubernetes_io_name"] = spec["metadata"]["labels"]["app.kubernetes.io/name"]
        found[port["name"]] = (relabelled(job["relabel_configs"], meta) or {}).get("node")
    assert found.pop("metrics") == "gpu-7" and not any(found.values()), found
    for kind, key in [("ServiceMonitor", "endpoints"), ("PodMonitor", "podMetricsEndpoints")]:
        values = OPERATOR | {"metrics": {"podMonitor": {"enabled": kind == "PodMonitor"}}}
        (monitor,) = [item for item in objects(values) if item["kind"] == kind]
        (endpoint,) = monitor["spec"][key]
        assert endpoint["honorLabels"] is True
        assert relabelled(endpoint["relabelings"], {"__meta_kubernetes_pod_node_name": "gpu-7"})["node"] == "gpu-7", kind


@check
def down_targets_are_found_by_their_job():
    """Whatever the objects are named, and whichever of the operator's objects finds the plugin."""
    (job,) = engine.load((ROOT / "deploy/prometheus/scrape.yaml").read_text())["scrape_configs"]
    matcher = lambda expression: re.search(r'job=~"([^"]*)"', expression)[1]
    assert re.fullmatch(matcher(alerts()["TesseraPluginDown"]["expr"]), job["job_name"])
    for release, values in [("tessera", {}), ("gpu", {}), ("x", {"fullnameOverride": "shares"}), ("x", {"nameOverride": "shares"})]:
        values = OPERATOR | values | {"metrics": {"grafanaDashboard": {"enabled": True}}}
        items = objects(values, release=release)
        # The operator names the job so.
        (service,) = [item["metadata"]["name"] for item in items if item["kind"] == "Service"]
        pods = objects(values | {"metrics": {"podMonitor": {"enabled": True}}}, release=release)
        (monitor,) = [item["metadata"] for item in pods if item["kind"] == "PodMonitor"]
        jobs = [service, f"{monitor['namespace']}/{monitor['name']}"]
        (rule,) = [item for item in items if item["kind"] == "PrometheusRule"]
        down = [r["expr"] for group in rule["spec"]["groups"] for r in group["rules"] if r.get("alert") == "TesseraPluginDown"]
        (dashboard,) = [i["data"]["tessera.json"] for i in items if i["kind"] == "ConfigMap" and "tessera.json" in i["data"]]
        shown = [expr for _, expr in expressions(json.loads(dashboard)) if "up{" in expr]
        for expression in down + shown:
            assert all(re.fullmatch(matcher(expression), job) for job in jobs), (expression, jobs)
            assert not re.fullmatch(matcher(expression), "node-exporter"), expression
        assert down and shown


def series(written):
    """Series of alerts.yaml as promtool takes them."""
    out = []
    for name, values in written.items():
        metric, _, labels = name.rstrip("}").partition("{")
        texts = []
        for part in filter(None, (part.strip() for part in labels.split(","))):
            texts += [f'{k}="{v}"' for k, v in LABELS[part].items()] if part in LABELS else [part.replace("'", '"')]
        out.append({"series": f"{metric}{{{','.join(texts)}}}", "values": values})
    return out


def labels(written):
    found = {}
    for part in written:
        key, _, value = part.partition("=")
        found |= LABELS.get(part) or {key: value.strip("'")}
    return found


def filled(text, values):
    """An annotation with its labels in it."""
    text = re.sub(r"{{ or \$labels\.(\w+) \$labels\.(\w+) }}", lambda m: values.get(m[1]) or values.get(m[2], ""), text)
    return re.sub(r"{{ \$labels\.(\w+) }}", lambda m: values.get(m[1], ""), text)


def firing_alert(name, case, given):
    """The alert as promtool expects it; a set of series may have labels of its own."""
    rule, its = alerts()[name], labels(given.get("labels", case["labels"]))
    annotations = {key: filled(text, its) for key, text in rule["annotations"].items()}
    return {"exp_labels": its | rule["labels"], "exp_annotations": annotations | {"summary": case["summary"]}}


@check
def alerts_fire_when_they_should():
    """Each at least once, with the sentence that alerts.yaml has; and not in the cases that it calls quiet."""
    cases = engine.load((manifests.HERE / "alerts.yaml").read_text())
    assert set(cases) == set(alerts()), set(cases) ^ set(alerts())
    tests = []
    for name, case in cases.items():
        assert case["quiet"], f"{name}: when does it not fire?"
        firing = [(dict(given), [firing_alert(name, case, given)]) for given in [case["series"], *case.get("also", [])]]
        for given, expected in firing + [(given, []) for given in case["quiet"]]:
            given.pop("labels", None)
            at = {"eval_time": f"{case['at']}m", "alertname": name, "exp_alerts": expected}
            tests.append({"interval": "1m", "input_series": series(given), "alert_rule_test": [at]})
    # Where nothing names the node, the target's address does.
    bare = {"series": 'tessera_ready{instance="10.0.0.9:9464"}', "values": "0x10"}
    rule = alerts()["TesseraNotReady"]
    fired = {"exp_labels": {"instance": "10.0.0.9:9464"} | rule["labels"], "exp_annotations": rule["annotations"] | {"summary": "Node 10.0.0.9:9464 offers no GPU shares."}}
    at = {"eval_time": "8m", "alertname": "TesseraNotReady", "exp_alerts": [fired]}
    tests.append({"interval": "1m", "input_series": [bare], "alert_rule_test": [at]})
    judge(tests)


# Minutes of the cases below: what happens, happens at BEFORE; a gap of the scrapes is longer than any alert looks back by
# an offset.
BEFORE, GAP, AFTER = 30, 15, 30


def counter_cases(name, counter):
    """What must hold of an alert on a counter, whichever it is: series, and at which minute it fires or does not."""
    other = {key: values for key, values in alert_case(name)["series"].items() if key != counter}
    plugin, started = "tessera_build_info{@}", "process_start_time_seconds{@}"
    target = lambda build, start: {plugin: build, started: start} | {key: "_x0" for key in other}
    old = f"-86400x{BEFORE + GAP + AFTER}"
    there = f"1x{BEFORE + GAP + AFTER}"
    soon, later = BEFORE + 2, BEFORE + 13
    yield "it rises", {counter: f"1x{BEFORE - 1} 2x{AFTER}"} | target(there, old), [(BEFORE - 2, False), (soon, True), (later, False)]
    yield "its series begins above 0", {counter: f"_x{BEFORE} 1x{AFTER}"} | target(there, old), [(soon, True), (later, False)]
    for hole in (f"_x{GAP}", f"stale _x{GAP - 1}"):
        broken = lambda before, after: f"{before}x{BEFORE} {hole} {after}x{AFTER}"
        ends = range(BEFORE + 1, BEFORE + GAP + AFTER)
        yield f"nothing happens, and the scrapes have a gap: {hole}", {counter: broken(1, 1)} | target(broken(1, 1), broken(-86400, -86400)), [(at, False) for at in ends]
        # The container's name is not known for a while, and the plugin is scraped all the time.
        yield f"nothing happens, and the series has a gap: {hole}", {counter: broken(1, 1)} | target(there, old), [(at, False) for at in ends]
        yield f"it rises in a gap: {hole}", {counter: broken(1, 2)} | target(broken(1, 1), broken(-86400, -86400)), [(BEFORE + GAP + 2, True)]
    # A plugin that is restarted begins at 0, and comes to the same value before it is scraped.
    again = 60 * (BEFORE + 2)
    restarted = lambda value: f"{value}x{BEFORE} _x2 {value}x{AFTER}"
    start = f"-86400x{BEFORE} _x2 {again}x{AFTER}"
    yield "first after a restart", {counter: restarted(1)} | target(restarted(1), start), [(BEFORE + 4, True), (BEFORE + 16, False)]
    quiet = f"1x{BEFORE} _x2 0x{AFTER}"
    yield "restarted, and nothing happens", {counter: quiet} | target(restarted(1), start), [(BEFORE + 4, False), (BEFORE + 16, False)]
    # In another pod the target is another one.
    new = lambda value: f"_x{BEFORE} {value}x{AFTER}"
    yield "first of a new plugin", {counter: new(1)} | target(new(1), new(60 * BEFORE)), [(soon, True), (later, False)]


def alert_case(name):
    return engine.load((manifests.HERE / "alerts.yaml").read_text())[name]


@check
def alerts_on_counters_miss_nothing_and_repeat_nothing():
    """The first event of a series, of a plugin and after a restart fires; an old one stays quiet when scrapes have a gap."""
    tests, found = [], []
    for name, rule in alerts().items():
        if not re.search(r"_(total|count)\b", rule["expr"]) or "rate(" in rule["expr"]:
            continue
        found.append(name)
        case = alert_case(name)
        (counter,) = [key for key in case["series"] if re.sub("{.*", "", key) in rule["expr"] and "'ok'" not in key]
        fired = firing_alert(name, case, {})
        for what, given, when in counter_cases(name, counter):
            given = {key: values for key, values in given.items() if values != "_x0"}
            checks = [{"eval_time": f"{at}m", "alertname": name, "exp_alerts": [fired] if fires else []} for at, fires in when]
            tests.append({"name": f"{name}: {what}", "interval": "1m", "input_series": series(given), "alert_rule_test": checks})
    assert len(found) >= 10, found
    judge(tests)


def judge(tests):
    """Asks promtool, each alert by itself: it evaluates every rule of a file for every test, at every minute."""
    with tempfile.TemporaryDirectory() as directory:
        write = lambda name, content: (Path(directory) / name).write_text(yaml.dump(content, Dumper=yaml.CSafeDumper, width=1000))
        of_alert = lambda test: test["alert_rule_test"][0]["alertname"]
        files = []
        for name, its in itertools.groupby(sorted(tests, key=of_alert), of_alert):
            rules = [group | {"rules": [rule for rule in group["rules"] if "record" in rule or rule["alert"] == name]} for group in groups()]
            write(f"{name}.rules.yaml", {"groups": rules})
            write(f"{name}.yaml", {"rule_files": [f"{name}.rules.yaml"], "evaluation_interval": "1m", "tests": list(its)})
            files.append(f"{name}.yaml")
        promtool("test", "rules", *files, cwd=directory)


@check
def every_alert_has_its_runbook():
    """A section each, in the alerts' order, with what it means, how to check and what to do; and no other section."""
    base = runbook_base()
    sections = re.split(r"(?m)^### ", RUNBOOK.read_text())[1:]
    titles = [section.splitlines()[0].strip() for section in sections]
    assert titles == list(alerts()), f"the runbook has {titles}, the rules have {list(alerts())}"
    for title, section in zip(titles, sections):
        for word in ("**Means**", "**Check**", "**Do**"):
            assert word in section, f"docs/runbook.md, {title}: no {word}"
    for name, rule in alerts().items():
        assert rule["annotations"]["runbook_url"] == f"{base}#{name.lower()}", name
        summary, description = (rule["annotations"][key] for key in ("summary", "description"))
        # The pod's address says nothing at night.
        assert "{{ $labels.instance }}" not in summary + description, name
        assert summary.endswith(".") and len(filled(summary, LABELS["POD"])) < 120, (name, summary)
        assert rule["labels"]["severity"] in ("critical", "warning", "info"), name
        if re.search(r"tessera_(container|gpu|ready|arbiter|config|ledger|allocate|findings|dra)", rule["expr"]) and "by (cluster, resource)" not in rule["expr"]:
            assert "{{ or $labels.node $labels.instance }}" in summary, f"{name} does not name the node"


# What the scrape adds to every series.
OF_TARGETS = {"cluster", "node", "instance", "job"}


def documented():
    """The labels of each metric of docs/metrics.md's table, with those of a histogram's series."""
    table = (ROOT / "docs/metrics.md").read_text().partition("<!-- table -->")[2]
    # Prometheus' own.
    known = {"up": OF_TARGETS}
    for name, histogram, names in re.findall(r"(?m)^\| `(\w+)`( \(histogram\))? \| ([^|]*) \|", table):
        own = set(re.findall(r"`(\w+)`", names)) | OF_TARGETS
        if "a container's" in names:
            own |= {"namespace", "pod", "container", "gpu", "uuid", "allocation"}
        known |= {f"{name}_sum": own, f"{name}_count": own, f"{name}_bucket": own | {"le"}} if histogram else {name: own}
    return known


def queries():
    """Each query of rules and dashboard, by where it stands, with the labels that are shown of it. A recorded series is what
    it is recorded from."""
    recorded = {rule["record"]: rule["expr"] for group in groups() for rule in group["rules"] if "record" in rule}
    for group in groups():
        for rule in group["rules"]:
            texts = " ".join([*rule.get("annotations", {}).values(), *rule.get("labels", {}).values()])
            yield rule.get("alert") or rule["record"], rule["expr"], re.findall(r"\$labels\.(\w+)", texts), recorded
    for panel in shown(json.loads(DASHBOARD.read_text())):
        for target in panel["targets"]:
            yield panel["title"], target["expr"], re.findall(r"{{(\w+)}}", target["legendFormat"]), recorded


@check
def metrics_of_alerts_and_dashboard_are_documented():
    """docs/metrics.md has each metric under its name, with each label by which it is selected, grouped, matched or shown."""
    known = documented()
    for where, expression, visible, recorded in queries():
        for name, source in recorded.items():
            expression = re.sub(rf"{name}\b", lambda _: f"({source})", expression)
        plain = re.sub(r'"[^"]*"', '""', expression)
        named = re.findall(r"\b((?:tessera|process)_\w+|up\b)(?:\{([^}]*)\})?", plain)
        assert named, f"{where} asks for no metric: {expression}"
        for name, selector in named:
            assert name in known, f"{where}: docs/metrics.md has no {name}"
            for label in re.findall(r"(\w+) *(?:=~|!~|!=|=)", selector):
                assert label in known[name], f"{where}: by docs/metrics.md, {name} has no label {label}"
        some = set().union(*(known[name] for name, _ in named))
        grouped = re.findall(r"\b(?:by|without|on|ignoring|group_left|group_right) *\(([^)]*)\)", plain)
        for label in [*re.findall(r"\w+", " ".join(grouped)), *visible]:
            assert label in some, f"{where}: by docs/metrics.md, none of its metrics has the label {label}"


def runbook_base():
    """Where the rules say that the runbook is."""
    (base,) = {rule["annotations"]["runbook_url"].partition("#")[0] for rule in alerts().values()}
    assert base.endswith("/runbook.md"), base
    return base


@check
def alerts_and_dashboard_are_those_of_the_repository():
    """The chart carries links, so that there is one of each; another runbook goes into every alert."""
    for name, source in [("rules.yaml", "deploy/prometheus/rules.yaml"), ("dashboard.json", "deploy/grafana/tessera.json")]:
        assert (CHART / "files" / name).resolve() == ROOT / source, name
    items = objects(OPERATOR | {"metrics": {"grafanaDashboard": {"enabled": True}}})
    (rule,) = [item for item in items if item["kind"] == "PrometheusRule"]
    assert rule["spec"]["groups"] == groups()
    (alone,) = engine.load_all((ROOT / "deploy/prometheus/prometheus-rule.yaml").read_text())
    assert alone["kind"] == "PrometheusRule" and alone["spec"]["groups"] == groups()
    (dashboard,) = [i for i in items if i["kind"] == "ConfigMap" and "tessera.json" in i["data"]]
    assert json.loads(dashboard["data"]["tessera.json"]) == json.loads((ROOT / "deploy/grafana/tessera.json").read_text())
    own = objects(OPERATOR | {"metrics": {"prometheusRule": {"runbook": "https://wiki.example.com/gpu/runbook.md"}}})
    (rule,) = [item for item in own if item["kind"] == "PrometheusRule"]
    for group in rule["spec"]["groups"]:
        for alert in group["rules"]:
            if "alert" in alert:
                assert alert["annotations"]["runbook_url"] == f"https://wiki.example.com/gpu/runbook.md#{alert['alert'].lower()}"


DASHBOARD = ROOT / "deploy/grafana/tessera.json"


def dashboard():
    """What deploy/grafana/dashboard.py makes."""
    spec = importlib.util.spec_from_file_location("dashboard", DASHBOARD.with_name("dashboard.py"))
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.make()


def shown(made):
    return [panel for panel in made["panels"] if panel["type"] != "row"]


def expressions(made):
    """Every query of the dashboard with values for Grafana's variables, by the panel's title."""
    for panel in shown(made):
        for target in panel["targets"]:
            yield panel["title"], target["expr"].replace("$__rate_interval", "5m")


@check
def dashboard_is_readable():
    """Each panel says what it shows, in which unit, and leads on; the variables narrow it."""
    made = json.loads(DASHBOARD.read_text())
    assert DASHBOARD.read_text() == dashboard(), "tessera.json is not what dashboard.py makes: run tests/deploy/update"
    variables = {v["name"]: v for v in made["templating"]["list"]}
    assert list(variables) == ["datasource", "cluster", "node", "namespace", "pod"], list(variables)
    titles = [panel["title"] for panel in shown(made)]
    assert len(set(titles)) == len(titles) >= 30, titles
    alerts_ = {name.lower() for name in alerts()}
    for panel in shown(made):
        title, defaults = panel["title"], panel["fieldConfig"]["defaults"]
        assert 2 < len(title.split()) and len(title) <= 45 and "_" not in title, title
        assert panel["description"].endswith(".") and defaults["unit"], title
        assert panel["links"] and defaults["links"], f"{title} leads nowhere"
        for link in panel["links"] + defaults["links"]:
            base, _, anchor = link["url"].partition("#")
            assert base.startswith(("/explore?", "/d/tessera/")) or (base == runbook_base() and anchor in alerts_), (title, link)
            for name in re.findall(r"var-(\w+)=|\$\{(\w+):queryparam\}", link["url"]):
                assert "".join(name) in variables, (title, link)
            for label in re.findall(r"__field\.labels\.(\w+)", link["url"]):
                for target in panel["targets"]:
                    grouped = re.match(r"\w+ by \(([^)]*)\)", target["expr"])
                    assert not grouped or label in grouped[1], f"{title} has no label {label} to follow"
    for title, expression in expressions(made):
        # The variables narrow everything; the pod's where there is a pod.
        for name, selector in re.findall(r"\b((?:tessera|process)_\w+)\{([^}]*)\}", expression):
            wanted = ["cluster", "node"] + ["namespace", "pod"] * (name.startswith("tessera_container") and "namespace" in selector)
            assert all(f'{label}=~"${label}"' in selector for label in wanted), (title, selector)


@check
def dashboard_passes_promtool():
    """Its queries are PromQL."""
    made = json.loads(DASHBOARD.read_text())
    rules = [{"record": f"panel:{number}", "expr": expr} for number, (_, expr) in enumerate(expressions(made))]
    with tempfile.TemporaryDirectory() as directory:
        (Path(directory) / "rules.yaml").write_text(yaml.safe_dump({"groups": [{"name": "dashboard", "rules": rules}]}, width=10000))
        out = promtool("check", "rules", "rules.yaml", cwd=directory)
    assert f"{len(rules)} rules found" in out, out
