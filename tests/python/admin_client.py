"""Steers a node over the admin socket: `admin_client.py SOCKET POD GIBIBYTES`. docs/steering.md names it."""

import http.client
import json
import socket
import sys

path, pod, gibibytes = sys.argv[1:]


def ask(method, route, body=None):
    connection = http.client.HTTPConnection("localhost", timeout=10)
    connection.sock = socket.socket(socket.AF_UNIX)
    connection.sock.connect(path)
    connection.request(method, "/api/v1" + route, body and json.dumps(body))
    response = connection.getresponse()
    answer = json.load(response)
    if response.status != 200:
        sys.exit(f"{response.status}: {answer['error']}")
    return answer


for allocation in ask("GET", "/status")["allocations"]:
    for gpu in allocation["gpus"]:
        name = (allocation["holder"] or {}).get("pod") or allocation["id"]
        print(name, gpu["gpu_uuid"], gpu["memory_limit_bytes"])
request = {
    "target": {"name": pod},
    "memory_limit_bytes": int(gibibytes) << 30,
    "reason": "asked for by a program",
}
for gpu in ask("POST", "/quota/set", request)["gpus"]:
    before, after = (gpu[when]["memory_limit_bytes"] for when in ("before", "after"))
    print(gpu["gpu_uuid"], before, "->", after)
