"""Makes values.schema.json: types and descriptions from values.yaml and its comments, `config` from what
`tessera config schema` (TESSERA) says, and below what neither tells."""

import json
import os
import re
import subprocess

import engine
from engine import CHART, ROOT

FILE = CHART / "values.schema.json"

STRINGS = {"type": "object", "additionalProperties": {"type": "string"}}
NAME = "^[a-z0-9]([-a-z0-9]*[a-z0-9])?$"
# A Service's name begins with a letter; some words are no strings in YAML.
WORDS = ["true", "false", "null", "yes", "no", "on", "off", "y", "n"]
OBJECT = {"type": "string", "pattern": "^$|^[a-z]([-a-z0-9]*[a-z0-9])?$", "maxLength": 40, "not": {"enum": WORDS}}
BYTE = "(25[0-5]|2[0-4][0-9]|1[0-9]{2}|[1-9]?[0-9])"
# What the plugin takes before a port; of an address of IPv6 its letters alone.
ADDRESS = {"type": "string", "pattern": rf"^$|^{BYTE}([.]{BYTE}){{3}}$|^\[[0-9A-Fa-f:.]*:[0-9A-Fa-f:.]*\]$"}
PORT = {"type": "integer", "minimum": 1024, "maximum": 65535}
# By which the chart finds its pods.
SELECTED = ["app.kubernetes.io/name", "app.kubernetes.io/instance", "app.kubernetes.io/version", "tessera.dev/profile"]
CLASS = "^[a-z0-9]([-a-z0-9]*[a-z0-9])?([.][a-z0-9]([-a-z0-9]*[a-z0-9])?)*$"
RESOURCE = "^[a-z0-9]([-a-z0-9.]*[a-z0-9])?/[A-Za-z0-9]([-A-Za-z0-9_.]*[A-Za-z0-9])?$"
DIRECTORY = "^/[^ ]*[^/ ]$"


def kubernetes(kind):
    """What the API server judges."""
    return {"type": kind}


# Where values.yaml's default does not tell what is allowed: by path.
ALLOWED = {
    "assumeApiVersions": {"type": "array", "items": {"type": "string"}},
    "nameOverride": OBJECT,
    "fullnameOverride": OBJECT,
    "image.repository": {"type": "string", "pattern": "^[^ :@]+(:[0-9]+/[^ :@]+)?$"},
    "image.tag": {"type": "string", "pattern": "^$|^[A-Za-z0-9_][A-Za-z0-9_.-]{0,127}$"},
    "image.digest": {"type": "string", "pattern": "^$|^sha256:[0-9a-f]{64}$"},
    "image.pullPolicy": {"enum": ["Always", "IfNotPresent", "Never"]},
    "imagePullSecrets": {
        "type": "array",
        "items": {
            "type": "object", "required": ["name"], "additionalProperties": False,
            "properties": {"name": {"type": "string", "description": "Of a Secret."}},
        },
    },
    "existingConfigMap": {"type": "string", "pattern": f"^$|{CLASS}", "maxLength": 253},
    "nodeConfigs.label": {"type": "string", "pattern": f"^([-a-z0-9.]+/)?[A-Za-z0-9]([-A-Za-z0-9_.]{{0,61}}[A-Za-z0-9])?$"},
    "nodeConfigs.configurations": {
        "type": "object",
        # A label's value and a ConfigMap's key; `config` is the file of the nodes without.
        "propertyNames": {"pattern": "^[A-Za-z0-9]([-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?$", "not": {"const": "config"}},
        "additionalProperties": {"$ref": "#/definitions/config"},
    },
    "podSecurityContext": kubernetes("object"),
    "securityContext": kubernetes("object"),
    "terminationGracePeriodSeconds": {"type": "integer", "minimum": 1, "maximum": 3600},
    "nodeSelector": STRINGS,
    "gpuNodeLabels": {"type": "array", "items": {"type": "string", "minLength": 1}},
    "affinity": kubernetes("object"),
    "tolerations": {"type": "array", "items": kubernetes("object")},
    "updateStrategy.type": {"enum": ["RollingUpdate", "OnDelete"]},
    "updateStrategy.rollingUpdate.maxUnavailable": {"type": ["integer", "string"], "minimum": 1, "pattern": "^(100|[1-9][0-9]?)%$"},
    "podAnnotations": STRINGS,
    "podLabels": STRINGS | {"propertyNames": {"not": {"enum": SELECTED}}},
    "extraEnv": {"type": "array", "items": kubernetes("object")},
    "extraVolumes": {"type": "array", "items": kubernetes("object")},
    "extraVolumeMounts": {"type": "array", "items": kubernetes("object")},
    "resources.requests": {"type": "object", "additionalProperties": {"type": ["string", "number"]}},
    "resources.limits": {"type": "object", "additionalProperties": {"type": ["string", "number"]}},
    "kubeletRoot": {"type": "string", "pattern": DIRECTORY},
    "stateDir": {"type": "string", "pattern": DIRECTORY},
    "nodeLabels.directory": {"type": "string", "pattern": DIRECTORY},
    "seLinuxOptions": {
        "type": "object", "additionalProperties": False,
        "properties": {
            key: {"type": "string", "description": f"SELinux {key}."} for key in ["user", "role", "type", "level"]
        },
    },
    "serviceAccount.name": {"type": "string", "pattern": f"^$|{CLASS}", "maxLength": 253},
    "serviceAccount.annotations": STRINGS,
    "metrics.address": ADDRESS,
    "metrics.port": PORT,
    "metrics.service.annotations": STRINGS,
    "metrics.serviceMonitor.labels": STRINGS,
    "metrics.serviceMonitor.interval": {"type": "string", "pattern": "^[0-9]+(ms|s|m)$"},
    "metrics.podMonitor.labels": STRINGS,
    "metrics.podMonitor.interval": {"type": "string", "pattern": "^[0-9]+(ms|s|m)$"},
    "metrics.prometheusRule.labels": STRINGS,
    "metrics.prometheusRule.runbook": {"type": "string", "pattern": "^https?://[^ \"#]+$"},
    "metrics.grafanaDashboard.labels": STRINGS,
    "api.address": ADDRESS,
    "api.port": PORT,
    "api.readers": {"type": "array", "items": kubernetes("object")},
    "console.port": PORT,
    "console.tlsSecret": {"type": "string", "pattern": f"^$|{CLASS}", "maxLength": 253},
    "console.resources.requests": {"type": "object", "additionalProperties": {"type": ["string", "number"]}},
    "console.resources.limits": {"type": "object", "additionalProperties": {"type": ["string", "number"]}},
    "dra.maxSurge": {"enum": [0, 1]},
    "dra.deviceClasses.shares.name": {"type": "string", "pattern": f"^$|{CLASS}", "maxLength": 63},
    "dra.deviceClasses.shares.extendedResourceName": {"type": "string", "pattern": f"^$|{RESOURCE}"},
    "dra.deviceClasses.mig.name": {"type": "string", "pattern": f"^$|{CLASS}", "maxLength": 63},
    "dra.deviceClasses.mig.extendedResourceName": {"type": "string", "pattern": f"^$|{RESOURCE}"},
    "dra.deviceClasses.more": {
        "type": "array",
        "items": {
            "type": "object", "required": ["name", "expression"], "additionalProperties": False,
            "properties": {
                "name": {"type": "string", "pattern": CLASS, "maxLength": 63, "description": "Of the class."},
                "expression": {"type": "string", "minLength": 1, "description": "CEL: which of the driver's devices."},
                "extendedResourceName": {"type": "string", "pattern": RESOURCE, "description": "What pods ask for in limits."},
                "compute": {"enum": ["burst", "strict", "none"], "description": "What its shares of time mean."},
            },
        },
    },
    "networkPolicy.from": {"type": "array", "items": kubernetes("object")},
    "networkPolicy.apiFrom": {"type": "array", "items": kubernetes("object")},
    "networkPolicy.apiServerPorts": {
        "type": "array", "minItems": 1, "items": {"type": "integer", "minimum": 1, "maximum": 65535},
    },
    "admissionPolicy.runtimeClassNames": {"type": "array", "minItems": 1, "items": {"type": "string", "pattern": NAME}},
}
# What an entry of `profiles` may say of its own.
OF_PROFILES = [
    "config", "existingConfigMap", "image", "nodeSelector", "gpuNodeLabels", "affinity", "tolerations", "runtimeClassName",
    "priorityClassName", "updateStrategy", "podAnnotations", "podLabels", "visibleDevices", "extraEnv",
    "extraVolumes", "extraVolumeMounts", "resources",
]


def comments():
    """The comment above each key of values.yaml, by path."""
    found, above, path = {}, [], []
    for line in (CHART / "values.yaml").read_text().splitlines():
        text = line.strip()
        key = re.match(r"^( *)([A-Za-z][A-Za-z0-9]*):", line)
        if text == "#":
            above.append("  ")  # what follows is an example
        elif text.startswith("# "):
            above.append(text[2:])
        elif key:
            path = path[: len(key[1]) // 2] + [key[2]]
            if above:
                found[".".join(path)] = re.split(r"\s{2,}", " ".join(above))[0]
            above = []
        else:
            above = []
    return found


def configuration():
    """The schema of `config`, where null stands for a value that is not set."""
    tessera = os.environ.get("TESSERA", ROOT / "target/debug/tessera")
    run = subprocess.run([tessera, "config", "schema"], capture_output=True, text=True, check=True)
    schema = json.loads(run.stdout)
    del schema["$schema"]
    return orphan(schema)


def of(value, path, described):
    """The schema of what stands at `path` with this default."""
    if path == "config":
        schema = {"$ref": "#/definitions/config"}
    elif path in ALLOWED:
        schema = dict(ALLOWED[path])
    elif isinstance(value, bool):
        schema = {"type": "boolean"}
    elif isinstance(value, str):
        schema = {"type": "string"}
    elif isinstance(value, dict):
        properties = {key: of(item, f"{path}.{key}" if path else key, described) for key, item in value.items()}
        schema = {"type": "object", "additionalProperties": False, "properties": properties}
    else:
        raise ValueError(f"values.yaml: say in tests/deploy/schema.py what {path} may be")
    if path in described:
        schema["description"] = described[path]
    return schema


def orphan(schema):
    """The same for a profile, where null takes the value away."""
    schema = dict(schema)
    if "enum" in schema:
        schema["enum"] = [*schema["enum"], None]
    if "type" in schema:
        kinds = schema["type"] if isinstance(schema["type"], list) else [schema["type"]]
        schema["type"] = [*kinds, "null"]
    if "properties" in schema:
        schema["properties"] = {key: orphan(item) for key, item in schema["properties"].items()}
    return schema


def make():
    """The text of values.schema.json."""
    values = engine.load((CHART / "values.yaml").read_text())
    profiles = values.pop("profiles")
    described = comments()
    schema = of(values, "", described)
    profile = {key: orphan(schema["properties"][key]) for key in OF_PROFILES}
    schema["properties"]["profiles"] = {
        "type": "object",
        "description": described["profiles"],
        "minProperties": len(profiles),
        # A label's value.
        "propertyNames": {"pattern": NAME, "maxLength": 20},
        "additionalProperties": {"type": ["object", "null"], "additionalProperties": False, "properties": profile},
    }
    # Helm puts these into every chart's values.
    schema["properties"]["global"] = {"type": "object", "description": "Helm's; not used."}
    head = {
        "$schema": "http://json-schema.org/draft-07/schema#",
        "title": "Values of the chart tessera",
        "$comment": "Made by tests/deploy/update from values.yaml and `tessera config schema`.",
        "definitions": {"config": configuration()},
    }
    return lay(head | schema) + "\n"


def lay(node, indent=0):
    """JSON with what has no further objects in it on one line, where that has room."""
    text = json.dumps(node, ensure_ascii=False)
    if not isinstance(node, dict) or len(text) < 100 and not any(isinstance(item, dict) for item in node.values()):
        return text
    inner = " " * (indent + 1)
    lines = [f"{inner}{json.dumps(key)}: {lay(item, indent + 1)}" for key, item in node.items()]
    return "{\n" + ",\n".join(lines) + "\n" + " " * indent + "}"
