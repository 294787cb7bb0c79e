"""What changes is shown; what is silent says so."""

import json
import urllib.parse

from access import judge
from browser import gpu_address, gpus, page
from views import written


def live():
    with page("--nodes", 2, "--gpus", 2, "--no-trouble", "--interval-ms", 50) as (one, server):
        row = one.page.locator("#rows a[data-gpu]").first
        row.focus()
        before = row.element_handle()
        server("tick", 120_000)
        for entry, gpu in gpus(server("fleet")):
            one.until_text(written(one, "bytes", gpu["memory_used_bytes"]), "#rows")
        # The same elements, changed: focus and reading place stay.
        assert before.evaluate("(a) => a.isConnected && document.activeElement === a")
        entry, card = gpus(server("fleet"))[0]
        one.go(gpu_address(entry["node"], card))
        one.until_text("Tenants")
        server("tick", 240_000)
        card = gpus(server("fleet"))[0][1]
        one.until_text(written(one, "bytes", card["memory_used_bytes"]), ".facts")


def many():
    """From twenty nodes on only changes are sent."""
    with page("--nodes", 30, "--gpus", 1, "--interval-ms", 50) as (one, server):
        # A sum to the last digit, and another each minute.
        before = server("refusals")
        one.until_text(f"refusals\n{written(one, 'number', before)}", ".totals")
        server("tick", 60_000)
        after = server("refusals")
        assert after > before
        one.until_text(f"refusals\n{written(one, 'number', after)}", ".totals")


def node_away():
    with page("--nodes", 3, "--gpus", 2, "--no-trouble", "--interval-ms", 50) as (one, server):
        assert "does not answer" not in one.text()
        server("away", "gpu-002")
        one.until_text("gpu-002", "#rows .node.away")
        text = one.text("#rows .node.away")
        assert "does not answer (last answer" in text and "kubectl get node" in text, text
        assert one.page.locator("#rows .row.away").count() == 2
        assert "3 (1 does not answer)" in one.text(".totals")
        entry, card = gpus(server("fleet"))[2]
        one.go(gpu_address(entry["node"], card))
        one.until_text("What you see is its last answer")
        server("back", "gpu-002")
        one.until("() => !document.body.innerText.includes('last answer')")
        one.go("#/")
        one.page.wait_for_selector("#rows .row")
        assert one.page.locator(".away").count() == 0


def stream_lost():
    with page("--nodes", 2, "--gpus", 1, "--no-trouble", "--interval-ms", 50) as (one, server):
        one.until_text("live", "#live")
        one.expected = ("ERR_", "Failed to load resource")
        server("stop")
        one.until_text("No live data since", "#banner")
        assert "Trying again" in one.text("#banner")
        one.until_text("not live", "#live")
        # What was known stays in sight.
        assert one.page.locator("#rows .row").count() == 2
        server("tick", 60_000)
        server("start")
        one.until("() => document.querySelector('#banner').innerText === ''")
        for _, gpu in gpus(server("fleet")):
            one.until_text(written(one, "bytes", gpu["memory_used_bytes"]), "#rows")


def clocks():
    """A server whose clock is a year off: lengths of time are by its clock."""
    with page("--nodes", 5, "--gpus", 1, "--interval-ms", 50) as (one, server):
        model = server("fleet")
        away = next(entry for entry in model["nodes"] if not entry["answers"])
        seconds = (model["at_unix_ms"] - away["answered_unix_ms"]) // 1000
        text = one.text(".node.away")
        assert any(f"last answer {minutes}m" in text for minutes in (seconds // 60, seconds // 60 + 1)), (text, seconds)
        # Wherever that clock is set, ages follow it; only answers that arrive out of order leave it alone.
        wrong = one.evaluate(
            """async () => {
                const { Model } = await import('/assets/model.js');
                const [hour, day] = [3_600_000, 86_400_000];
                const wrong = [];
                for (const big of [true, false]) {
                    const model = new Model();
                    let at = Date.now();
                    for (const step of [0, 5 * hour, -5 * hour, -1000, 1000, -300 * day, -61_000, 600 * day, -2 * hour]) {
                        at += step;
                        if (big) model.takeFleet({ at_unix_ms: at, nodes: [] });
                        else model.takeNodes([{ node: 'a', answers: true, answered_unix_ms: at }, { node: 'b', answers: true, answered_unix_ms: at - 4000 }]);
                        if (Math.abs(model.now() - at) > 30_000) wrong.push([big, step, model.now() - at]);
                    }
                }
                const tenant = (waited_us) => ({ id: 'a', generation: 1, compute: { waited_us } });
                const { rates } = new Model();
                rates.take(tenant(0), 5 * hour);
                rates.take(tenant(500_000), 1000);
                rates.take(tenant(1_500_000), 3000);
                if (rates.waits(tenant(0)) !== 500) wrong.push(rates.waits(tenant(0)));
                return wrong;
            }"""
        )
        assert not wrong, wrong


def token():
    """Where the server wants a token, the page asks for one, and keeps it in this tab alone."""
    with page("--nodes", 1, opened=False) as (one, server):
        one.expected = ("401",)
        seen = []

        def guard(route):
            given = route.request.headers.get("authorization")
            seen.append(given)
            if given == "Bearer sesame":
                return route.continue_()
            return route.fulfill(status=401, content_type="application/json", body='{"error": "a token is <b>missing</b>", "code": 401}')

        one.page.route("**/api/**", guard)
        one.page.goto(server.url)
        dialog = one.page.locator("dialog[open]")
        dialog.wait_for()
        text = dialog.inner_text()
        assert "a token is <b>missing</b>" in text and "kubectl create token" in text, text
        one.page.fill("#token", "wrong")
        one.page.keyboard.press("Enter")
        one.until("() => document.querySelector('dialog[open] #token')?.value === ''")
        one.page.fill("#token", "sesame")
        one.page.keyboard.press("Enter")
        one.ready()
        one.page.wait_for_selector("#rows .row")
        assert "Bearer sesame" in seen
        assert one.evaluate("() => [localStorage.length, document.cookie, Object.keys(sessionStorage).length]") == [0, "", 1]
        one.page.click("text=drop token")
        one.page.locator("dialog[open]").wait_for()
        assert one.evaluate("() => sessionStorage.length") == 0


def namespace():
    """A reader whose namespace has no tenants yet names it, and sees no fleet of zeros before."""
    with page("--nodes", 2, "--gpus", 1, opened=False) as (one, server):
        one.expected = ("403",)
        asked = []
        text = "ann may not get pods in any namespace with <b>tenants</b> here; name your own with ?namespace=NAME"

        def guard(route):
            given = urllib.parse.parse_qs(urllib.parse.urlsplit(route.request.url).query).get("namespace", [""])[0]
            asked.append(given)
            if given == "of & ann":
                return route.continue_()
            return route.fulfill(status=403, content_type="application/json", body=json.dumps({"error": text, "code": 403}))

        one.page.route("**/api/**", guard)
        for view in ("#/", "#/namespaces", "#/pod/a/b", "#/gpu/gpu-001/GPU-none"):
            one.page.goto(server.url + view)
            one.until_text(text, "#banner")
            one.until_text("Waiting for the first answer")
            assert one.page.locator(".totals, table, .filters select").count() == 0, view
            # Nothing but the stream asks while everything would be refused.
            assert all("/stream" in url for url in one.requests if "/api/" in url), one.requests
        one.go("#/")
        one.page.fill("#namespace", "not-mine")
        one.page.keyboard.press("Enter")
        one.until_text("namespace not-mine: drop", "#top")
        one.until_text(text, "#banner")
        one.page.fill("#namespace", " of & ann ")
        judge(one, "namespace")
        one.page.keyboard.press("Enter")
        one.ready()
        one.page.wait_for_selector("#rows .row")
        one.until("() => document.querySelector('#banner').innerText === ''")
        # Its own tenants are none; those of others are totals.
        tenants = sum(len(entry["view"]["tenants"]) for entry in server("fleet")["nodes"])
        assert f"tenants\n{tenants}\n" in one.text(".totals"), one.text(".totals")
        asked.clear()
        one.go("#/namespaces")
        one.until_text("No tenants that you may see.")
        one.until("() => !document.body.innerText.includes('Asking.')")
        assert asked and set(asked) == {"of & ann"}, asked
        one.page.click("text=of & ann: drop")
        one.until_text(text, "#banner")
        assert one.evaluate("() => [localStorage.length, sessionStorage.length]") == [0, 0]


def empty():
    """A fleet without GPUs names the command that runs where the page is read: on the node, or anywhere."""
    with page("--nodes", 1, opened=False) as (one, server):
        name = ""

        def stream(route):
            fleet = json.dumps({"name": name, "at_unix_ms": 1, "nodes": []})
            route.fulfill(content_type="text/event-stream", body=f"event: fleet\ndata: {fleet}\n\n")

        one.page.route("**/api/v1/stream*", stream)
        for name, command in (("", "On a node, `tessera status` says why."), ("production", "GPU. `kubectl tessera status` says why.")):
            one.page.goto(server.url)
            one.until_text(command, "main")
