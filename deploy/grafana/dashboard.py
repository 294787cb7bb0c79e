"""Makes tessera.json, the dashboard: `tests/deploy/update` writes it, a test compares.

A panel is a line of ROWS. Its kind decides where a click on a series leads: `pod`, `gpu` and `node` to this dashboard
with that pod or node alone; `sum` to Explore, with what lies behind the sum.
"""

import json
from urllib.parse import quote

SOURCE = {"type": "prometheus", "uid": "${datasource}"}
RUNBOOK = "https://tessera.dev/docs/runbook.md"

# What the variables narrow: the series of a plugin or GPU, and those of a pod.
NODE = 'cluster=~"$cluster",node=~"$node"'
POD = NODE + ',namespace=~"$namespace",pod=~"$pod"'

VARIABLES = [
    ("cluster", "Cluster", "label_values(tessera_build_info, cluster)"),
    ("node", "Node", 'label_values(tessera_build_info{cluster=~"$cluster"}, node)'),
    ("namespace", "Namespace", f"label_values(tessera_container_info{{{NODE}}}, namespace)"),
    ("pod", "Pod", f'label_values(tessera_container_info{{{NODE},namespace=~"$namespace"}}, pod)'),
]

OF_GPU = "{{node}} GPU {{gpu}}"
OF_POD = "{{namespace}}/{{pod}} {{container}} GPU {{gpu}}"
ALL = "All"
FREE, HELD, PARKED = ('state="%s"' % state for state in ("free", "held", "parked"))
JOB = 'job=~".*tessera.*"'
ILL, STRANGER = 'state!="healthy"', 'finding="stranger"'
REFUSED, UNREACHABLE, LOST = 'code=~"401|403"', 'outcome="unreachable"', 'outcome=~"failed|dropped"'


def node(metric, *more):
    return f"{metric}{{{','.join([NODE, *more])}}}"


def pod(metric):
    return f"{metric}{{{POD}}}"


def per_second(series):
    return f"rate({series}[$__rate_interval])"


def quantile(q, metric):
    return f"histogram_quantile({q}, sum by (le) ({per_second(node(metric + '_bucket'))}))"


# A plugin that is down has no series of its own. The chart puts its objects' name into `job`.
NOTHING = f"{node('tessera_ready')} == 0 or on (cluster, node) {node('up', JOB)} == 0"
BUSY = f"sum by (cluster, node, uuid) ({per_second(node('tessera_container_gpu_used_seconds_total'))}) > 0.01"
LAST_WORK = (
    "max by (cluster, node, namespace, pod) (max_over_time(timestamp(increase("
    + pod("tessera_container_gpu_used_seconds_total") + "[5m]) > 0)[24h:5m]))"
)
PODS = f"max by (cluster, node, namespace, pod) ({pod('tessera_container_info')})"

# Rows: title, panels. A panel: title, what it says, unit, kind, queries [(expression, legend)], and options:
#   stat: a number; width, height, alert (its section of the runbook), behind (of a sum, for Explore), top: an axis' end
ROWS = [
    ("At a glance", [
        ("Nodes that offer GPU shares", "Nodes whose plugin is registered with kubelet.", "short", "sum",
         [(f"sum({node('tessera_ready')})", ALL)], {"stat": "good", "behind": node("tessera_ready")}),
        ("Nodes that offer nothing", "Their plugin does not answer, or kubelet does not watch it; new pods for them wait.", "short", "sum",
         [(f"count({NOTHING}) or vector(0)", ALL)], {"stat": "bad", "behind": NOTHING, "alert": "TesseraNotReady"}),
        ("GPUs closed to new pods", "Unhealthy, cordoned, or sold by another device plugin, too.", "short", "sum",
         [(f"count({node('tessera_gpu_available')} == 0) or vector(0)", ALL)],
         {"stat": "bad", "behind": node("tessera_gpu_available") + " == 0", "alert": "TesseraGpuUnhealthy"}),
        ("GPU shares free", "Shares that new pods can get.", "short", "sum",
         [(f"sum({node('tessera_gpu_replicas', FREE)})", ALL)],
         {"stat": "plain", "behind": node("tessera_gpu_replicas", FREE), "alert": "TesseraNoFreeShare"}),
        ("GPU shares held", "Shares that pods have.", "short", "sum",
         [(f"sum({node('tessera_gpu_replicas', HELD)})", ALL)],
         {"stat": "plain", "behind": node("tessera_gpu_replicas", HELD)}),
        ("Allocations that are parked", "Allocations whose shares went to a newer pod.", "short", "sum",
         [(f"sum({node('tessera_allocations', PARKED)})", ALL)],
         {"stat": "plain", "behind": node("tessera_allocations", PARKED)}),
        ("Memory requests refused, last hour", "Requests for GPU memory beyond a pod's limit.", "short", "sum",
         [(f"sum(increase({pod('tessera_container_out_of_memory_total')}[1h]))", ALL)],
         {"stat": "bad", "behind": f"increase({pod('tessera_container_out_of_memory_total')}[1h]) > 0", "alert": "TesseraMemoryRefused"}),
        ("Time pods wait for a GPU, 95th percentile", "19 of 20 pods wait for a smaller part of their time.", "percentunit", "sum",
         [(f"quantile(0.95, rate({pod('tessera_container_gate_wait_seconds_total')}[5m]))", ALL)],
         {"stat": "plain", "behind": f"rate({pod('tessera_container_gate_wait_seconds_total')}[5m])", "alert": "TesseraLongGateWaits"}),
    ]),
    ("Over the day", [
        ("GPUs in use", "All GPUs; those with a pod; those that did work for more than a hundredth of the time.", "short", "sum",
         [(f"count({node('tessera_gpu_info')})", "there are"),
          (f"count({node('tessera_gpu_memory_sold_bytes')} > 0) or vector(0)", "have a pod"),
          (f"count({BUSY}) or vector(0)", "did work")], {"behind": BUSY}),
        ("GPU memory: there is, promised, used", "All GPUs together: their memory, the limits of their pods, and what the driver counts.", "bytes", "sum",
         [(f"sum({node('tessera_gpu_memory_total_bytes')})", "there is"),
          (f"sum({node('tessera_gpu_memory_sold_bytes')})", "promised to pods"),
          (f"sum({node('tessera_gpu_memory_used_bytes')})", "used")], {"behind": node("tessera_gpu_memory_used_bytes")}),
        ("GPU shares by state", "Free, held by a pod, or on a GPU that is not healthy.", "short", "sum",
         [(f"sum by (resource, state) ({node('tessera_gpu_replicas')})", "{{resource}} {{state}}")],
         {"behind": node("tessera_gpu_replicas"), "alert": "TesseraNoFreeShare"}),
    ]),
    ("GPUs", [
        ("GPU memory promised to pods", "The limits of a GPU's pods, as a part of its memory.", "percentunit", "gpu",
         [(f"{node('tessera_gpu_memory_sold_bytes')} / {node('tessera_gpu_memory_total_bytes')}", OF_GPU)], {"top": 1, "alert": "TesseraGpuOversold"}),
        ("GPU memory in use", "Of all processes, as the driver counts, as a part of the GPU's memory.", "percentunit", "gpu",
         [(f"{node('tessera_gpu_memory_used_bytes')} / {node('tessera_gpu_memory_total_bytes')}", OF_GPU)], {"top": 1}),
        ("GPU time used by pods", "All pods of a GPU together, as far as it is known; 100 % is a GPU that always works.", "percentunit", "gpu",
         [(f"sum by (cluster, node, gpu, uuid) ({per_second(node('tessera_container_gpu_used_seconds_total'))})", OF_GPU)], {"top": 1}),
        ("GPUs that are not healthy", "1 while a GPU is suspect, unhealthy or recovering.", "short", "gpu",
         [(f"{node('tessera_gpu_health', ILL)} == 1", OF_GPU + " {{state}}")], {"alert": "TesseraGpuUnhealthy"}),
        ("GPU memory of processes without a share", "What they hold beyond the reserve is missing to pods.", "bytes", "gpu",
         [(node("tessera_gpu_memory_outside_bytes"), OF_GPU)], {"alert": "TesseraGpuMemoryTaken"}),
        ("Pods that wait for a GPU now", "Containers that want the GPU at this moment and do not have it.", "short", "gpu",
         [(node("tessera_gpu_lease_waiting"), OF_GPU)], {"alert": "TesseraLongGateWaits"}),
    ]),
    ("Pods", [
        ("GPU memory used, of the limit", "At 100 % the next request for memory is refused.", "percentunit", "pod",
         [(f"{pod('tessera_container_memory_used_bytes')} / {pod('tessera_container_memory_limit_bytes')}", OF_POD)], {"top": 1, "alert": "TesseraMemoryNearLimit"}),
        ("GPU memory: limit, peak, used", "Peak is that of the largest process.", "bytes", "pod",
         [(pod("tessera_container_memory_limit_bytes"), OF_POD + " limit"),
          (pod("tessera_container_memory_peak_bytes"), OF_POD + " peak"),
          (pod("tessera_container_memory_used_bytes"), OF_POD + " used")], {}),
        ("GPU memory requests refused", "By the pod's limit, or by the driver although the limit had room.", "reqps", "pod",
         [(f"{per_second(pod('tessera_container_out_of_memory_total'))} > 0", OF_POD + " by its limit"),
          (f"{per_second(pod('tessera_container_driver_refusals_total'))} > 0", OF_POD + " by the driver")], {"alert": "TesseraMemoryRefused"}),
        ("GPU time that a pod used", "The part of the time in which each container's work ran.", "percentunit", "pod",
         [(per_second(pod("tessera_container_gpu_used_seconds_total")), OF_POD)], {}),
        ("GPU time that a pod used, of its share", "Above 100 %: time that others did not need.", "percentunit", "pod",
         [(f"{per_second(pod('tessera_container_gpu_used_seconds_total'))} / {pod('tessera_container_cores_ratio')}", OF_POD)], {}),
        ("Time that a pod waited for the GPU", "The part of the time in which it wanted the GPU and did not have it.", "percentunit", "pod",
         [(per_second(pod("tessera_container_gate_wait_seconds_total")), OF_POD)], {"top": 1, "alert": "TesseraLongGateWaits"}),
        ("Waiting by node, 95th percentile", "19 of 20 pods of the node wait for a smaller part of their time.", "percentunit", "node",
         [(f"quantile by (cluster, node) (0.95, {per_second(pod('tessera_container_gate_wait_seconds_total'))})", "{{node}}")], {"top": 1}),
        ("Pods without GPU work", "Time since a pod's last GPU work, of at most a day. They hold shares that others could use.", "s", "pod",
         [(f"((time() - {LAST_WORK}) and {PODS}) or 86400 * {PODS}", "{{namespace}}/{{pod}}")], {"bars": True}),
        ("GPU kernels launched", "Kernels and graphs, and those that waited for the pod's turn.", "ops", "pod",
         [(per_second(pod("tessera_container_launches_total")), OF_POD),
          (f"{per_second(pod('tessera_container_delayed_launches_total'))} > 0", OF_POD + " delayed")], {}),
        ("Pods whose quota may not hold", "Findings of the last hour.", "short", "pod",
         [(f"increase({pod('tessera_container_tamperings_total')}[1h]) > 0", OF_POD + " changed its page"),
          (f"increase({pod('tessera_container_unaccounted_memory_findings_total')}[1h]) > 0", OF_POD + " memory outside its account"),
          (f"increase({pod('tessera_container_lease_overlaps_total')}[1h]) > 0", OF_POD + " drained late"),
          (f"increase({pod('tessera_container_self_rationed_total')}[1h]) > 0", OF_POD + " rationed itself")], {"alert": "TesseraBypass"}),
        ("Processes without a share, by node", "Times in an hour that such a process was found on a shared GPU.", "short", "node",
         [(f"sum by (cluster, node) (increase({node('tessera_findings_total', STRANGER)}[1h])) > 0", "{{node}}")], {"alert": "TesseraStranger"}),
        ("Processes that use CUDA", "In each container, now.", "short", "pod", [(pod("tessera_container_processes"), OF_POD)], {}),
    ]),
    ("The plugin", [
        ("Time to give a pod its share", "Kubelet admits no other pod meanwhile. Median and 99th percentile, of all nodes.", "s", "sum",
         [(quantile(0.5, "tessera_allocate_duration_seconds"), "half of them"),
          (quantile(0.99, "tessera_allocate_duration_seconds"), "99 of 100"),
          (quantile(0.99, "tessera_pre_start_duration_seconds"), "before a container's start, 99 of 100")],
         {"behind": per_second(node("tessera_allocate_duration_seconds_count")), "alert": "TesseraAllocateSlow"}),
        ("Shares given to pods, a minute", "Kubelet's calls by outcome: ok, refused by the request, or failed.", "short", "sum",
         [(f"60 * sum by (outcome) ({per_second(node('tessera_allocate_duration_seconds_count'))})", "{{outcome}}")],
         {"behind": node("tessera_allocate_duration_seconds_count"), "alert": "TesseraAllocateFails"}),
        ("Time to pass a GPU to the next pod", "The arbiter's part of a hand-over: median and 99th percentile.", "s", "sum",
         [(quantile(0.5, "tessera_arbiter_turn_duration_seconds"), "half of them"),
          (quantile(0.99, "tessera_arbiter_turn_duration_seconds"), "99 of 100")],
         {"behind": per_second(node("tessera_arbiter_turn_duration_seconds_count")), "alert": "TesseraArbiterDown"}),
        ("Memory of the plugin", "Resident memory, with the plugin's version.", "bytes", "node",
         [(f"{node('process_resident_memory_bytes')} * on (cluster, instance, job) group_left (version) tessera_build_info", "{{node}} {{version}}")], {}),
        ("CPU of the plugin", "Of one core.", "percentunit", "node",
         [(f"{per_second(node('process_cpu_seconds_total'))} * on (cluster, instance, job) group_left (version) tessera_build_info", "{{node}} {{version}}")], {}),
        ("Warnings and refused configurations", "Warnings as `tessera status` shows them; 1 where the newest configuration was refused.", "short", "node",
         [(node("tessera_warnings"), "{{node}} warnings"),
          (f"1 - {node('tessera_config_last_reload_successful')} > 0", "{{node}} configuration refused")], {"alert": "TesseraReloadRefused"}),
    ]),
    ("API, history and events", [
        ("Requests to the API, by status", "Answers of the JSON API over TCP a second, by their HTTP status.", "reqps", "sum",
         [(f"sum by (code) ({per_second(node('tessera_api_requests_total'))})", "{{code}}")],
         {"behind": per_second(node("tessera_api_requests_total")), "alert": "TesseraApiUnavailable"}),
        ("Callers that the API refused", "Requests without a valid token (401) or without the right to see what they ask for (403).", "reqps", "node",
         [(f"sum by (cluster, node, code) ({per_second(node('tessera_api_requests_total', REFUSED))}) > 0", "{{node}} {{code}}")], {}),
        ("API server reviews that failed", "Questions about a reader's token or access that the API server did not answer or does not allow.", "reqps", "node",
         [(f"sum by (cluster, node, review) ({per_second(node('tessera_api_reviews_total', UNREACHABLE))}) > 0", "{{node}} {{review}}")],
         {"alert": "TesseraApiUnavailable"}),
        ("Nodes whose API does not listen", "1 while the JSON API should be served over TCP and is not.", "short", "node",
         [(f"1 - {node('tessera_api_listening')} > 0", "{{node}}")], {"alert": "TesseraApiDown"}),
        ("Nodes that write no history", "1 while the last write of the history failed.", "short", "node",
         [(f"1 - {node('tessera_history_writing')} > 0", "{{node}}")], {"alert": "TesseraHistoryNotWritten"}),
        ("Kubernetes events that were lost", "Events given up, and requests that the API server did not accept, a second.", "ops", "node",
         [(f"sum by (cluster, node, outcome) ({per_second(node('tessera_kubernetes_events_total', LOST))}) > 0", "{{node}} {{outcome}}")],
         {"alert": "TesseraEventsFail"}),
    ]),
]

# The cluster stays as it is chosen: where there is one, its series may have no label for it.
HERE = "/d/tessera/tessera?${datasource:queryparam}&${cluster:queryparam}&${__url_time_range}"
LINKS = {
    "node": [("Only node ${__field.labels.node}", HERE + "&var-node=${__field.labels.node}")],
    "pod": [("Only pod ${__field.labels.pod}", HERE + "&var-namespace=${__field.labels.namespace}&var-pod=${__field.labels.pod}")],
}
LINKS["gpu"] = LINKS["node"]
LINKS["pod"] = LINKS["pod"] + LINKS["node"]


def explore(query):
    """Explore with this query, in the dashboard's time. Grafana fills its variables in, so these stay as they are."""
    pane = {"datasource": "${datasource}", "queries": [{"refId": "A", "expr": query}], "range": {"from": "${__from}", "to": "${__to}"}}
    return "/explore?orgId=1&left=" + quote(json.dumps(pane), safe="${}")


COLOURS = {
    "good": [("red", None), ("green", 1)],
    "bad": [("green", None), ("red", 1)],
    "plain": [("blue", None)],
}


def panel(title, says, unit, kind, queries, options):
    links = [{"title": title, "url": url} for title, url in LINKS.get(kind, [])]
    if kind == "sum":
        links = [{"title": "What is behind it, in Explore", "url": explore(options["behind"])}]
    own = [{"title": "Explore", "url": explore(options.get("behind", queries[0][0])), "targetBlank": True}]
    if "alert" in options:
        own.append({"title": f"Runbook: {options['alert']}", "url": f"{RUNBOOK}#{options['alert'].lower()}", "targetBlank": True})
    defaults = {"unit": unit, "links": links}
    reduce = {"calcs": ["lastNotNull"], "fields": "", "values": False}
    if "stat" in options or "bars" in options:
        steps = COLOURS[options.get("stat", "plain")]
        defaults["thresholds"] = {"mode": "absolute", "steps": [{"color": color, "value": value} for color, value in steps]}
    if "stat" in options:
        look = {"reduceOptions": reduce, "colorMode": "value", "graphMode": "area", "textMode": "value", "orientation": "auto"}
        shape = "stat"
    elif "bars" in options:
        defaults |= {"min": 0, "max": 86400}
        look = {"reduceOptions": reduce, "displayMode": "basic", "orientation": "horizontal", "showUnfilled": True}
        shape = "bargauge"
    else:
        defaults["custom"] = {"fillOpacity": 10, "lineWidth": 1, "showPoints": "never", "stacking": {"mode": "none", "group": "A"}}
        defaults["min"] = 0
        if "top" in options:
            defaults["max"] = options["top"]
        look = {"legend": {"displayMode": "table", "placement": "bottom", "calcs": ["lastNotNull", "max"]}, "tooltip": {"mode": "multi", "sort": "desc"}}
        shape = "timeseries"
    targets = [
        {"refId": chr(ord("A") + i), "datasource": SOURCE, "expr": expr, "legendFormat": legend}
        | ({"instant": True, "range": False} if shape == "bargauge" else {})
        for i, (expr, legend) in enumerate(queries)
    ]
    return {
        "type": shape, "title": title, "description": says, "datasource": SOURCE, "targets": targets, "links": own,
        "fieldConfig": {"defaults": defaults, "overrides": []}, "options": look,
    }


def panels():
    made, y = [], 0
    for row, entries in ROWS:
        made.append({"type": "row", "title": row, "collapsed": False, "panels": [], "gridPos": {"h": 1, "w": 24, "x": 0, "y": y}})
        y += 1
        x = height = 0
        for entry in entries:
            one = panel(*entry)
            w, h = (6, 4) if one["type"] == "stat" else (8, 8)
            if x + w > 24:
                x, y = 0, y + height
            made.append(one | {"gridPos": {"h": h, "w": w, "x": x, "y": y}})
            x, height = x + w, h
        y += height
    return [one | {"id": number} for number, one in enumerate(made, 1)]


def variables():
    source = {"name": "datasource", "label": "Data source", "type": "datasource", "query": "prometheus", "current": {}}
    return [source] + [
        {
            "name": name, "label": label, "type": "query", "datasource": SOURCE, "query": query, "definition": query, "refresh": 2,
            "includeAll": True, "multi": True, "allValue": ".*", "current": {"text": "All", "value": "$__all"}, "sort": 1,
        }
        for name, label, query in VARIABLES
    ]


def make():
    """The text of tessera.json."""
    return json.dumps({
        "uid": "tessera", "title": "Tessera",
        "description": "GPU sharing by Tessera: nodes, GPUs, pods, the plugin. docs/metrics.md has every metric, docs/runbook.md every alert.",
        "tags": ["gpu", "kubernetes", "tessera"], "schemaVersion": 39, "version": 1, "editable": True, "refresh": "30s",
        "time": {"from": "now-24h", "to": "now"}, "timezone": "", "graphTooltip": 1,
        "templating": {"list": variables()}, "annotations": {"list": []},
        "links": [{"title": "Runbook", "type": "link", "url": RUNBOOK, "targetBlank": True, "icon": "doc"}],
        "panels": panels(),
    }, indent=1) + "\n"
