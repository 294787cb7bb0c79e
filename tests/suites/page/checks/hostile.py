"""Names that nobody may have change nothing."""

import copy
import json

from browser import gpu_address, gpus, page, pod_address, tenants

# Elements that the page itself makes.
OWN = set(
    "html head meta title link script style body a header div main nav span button h1 h2 h3 dl dt dd form label input select "
    "option ul li p small strong bdi svg g title rect line path text table thead tbody tr th td section figure "
    "figcaption pre code kbd output details summary dialog noscript".split()
)


def harmless(one):
    strange = one.evaluate(
        "(own) => [...document.querySelectorAll('*')].map((e) => e.localName).filter((name) => !own.includes(name))", sorted(OWN)
    )
    assert not strange, strange
    assert one.evaluate("() => window.pwned === undefined")
    assert one.page.locator("script").count() == 1
    handlers = one.evaluate(
        "() => [...document.querySelectorAll('*')].flatMap((e) => [...e.attributes]).map((a) => a.name).filter((name) => name.startsWith('on') || name === 'srcdoc')"
    )
    assert not handlers, handlers
    acts = one.evaluate(
        "() => /[\\u0000-\\u0008\\u000b-\\u001f\\u007f-\\u009f\\u200b-\\u200f\\u202a-\\u202e\\u2066-\\u2069]/.test(document.body.innerText + document.title)"
    )
    assert not acts, "what acts is written as \\u and digits"
    # No name makes the page wider than the window.
    assert one.evaluate("() => document.documentElement.scrollWidth <= innerWidth")


def visit(width):
    with page("--nodes", 2, "--gpus", 2, "--tenants", 5, "--hostile", width=width) as (one, server):
        model = server("fleet")
        one.page.wait_for_selector("#rows .row")
        harmless(one)
        for entry, card in gpus(model):
            one.go(gpu_address(entry["node"], card))
            one.page.wait_for_selector(".chart .band", state="attached")
            harmless(one)
        for node, tenant in tenants(model):
            one.go(pod_address(tenant))
            one.until_text("Times are in UTC.")
            one.until_text("confidence")
            # The one that was asked for.
            one.until_text(tenant["id"][:8])
            one.page.wait_for_selector(".chart .band", state="attached")
            harmless(one)
        one.go("#/namespaces")
        one.until_text("GPU hour costs")
        one.evaluate("() => document.querySelectorAll('details').forEach((d) => d.open = true)")
        harmless(one)
        for word in ("<script>", "__proto__", "constructor", "node:", "\\", "(", "\u202e"):
            one.go("#/")
            one.page.fill("#filter", word)
            one.until("() => location.hash.includes('q=')")
            harmless(one)
            one.page.fill("#filter", "")
        for address in ("#/gpu", "#/gpu/%/%", "#/pod", "#/pod/%E0%A4%A/x", "#/allocation/<b>", "#/<script>", "#main", "#/?since=__proto__"):
            one.go(address)
            one.until("() => document.querySelector('h1') !== null")
            harmless(one)
        one.expected = ("404", "400")


def hostile():
    visit(1280)


def hostile_narrow():
    visit(400)


def lies():
    """What a node may make of a history: each is a name and a function that changes an answer."""
    def every_point(change):
        return lambda answer: [change(point) for tenant in answer["tenants"] for point in tenant["points"]]

    def many(answer):
        first = answer["tenants"][0]
        first = {**first, "points": first["points"][-2:]}
        answer["tenants"] += [{**first, "id": f"{n:032x}", "pod": f"copy-{n}"} for n in range(2000)]

    for at in (2**63 - 1, -(2**63), 0, 2**53, None):
        yield f"now {at}", lambda answer, at=at: answer.update(at_unix_ms=at)
        yield f"points at {at}", every_point(lambda point, at=at: point["at_unix_ms"] % 20_000 and point.update(at_unix_ms=at))
        yield f"events at {at}", lambda answer, at=at: [event.update(at_unix_ms=at) for event in answer["events"][1:]]
    for step in (0, -10, 7, 2**32 - 1, None):
        yield f"step {step}", lambda answer, step=step: answer.update(step_seconds=step)
    # Python writes Infinity, which is no JSON: 1e999 is what a browser reads as that.
    for figure in (1e308, -1e308, "1e999", "-1e999", None, 2**64 - 1):
        for names in (("seconds", "memory_used_bytes"), ("got_seconds", "waited_seconds", "memory_limit_bytes", "refusals")):
            yield f"{names} {figure}", every_point(lambda point, names=names, figure=figure: point.update(dict.fromkeys(names, figure)))
    yield "2000 tenants", many


def hostile_history():
    """A node's history hangs no tab, and writes no chart of a time that nobody asked for."""
    with page("--nodes", 1, "--gpus", 1, "--no-trouble") as (one, server):
        entry, card = gpus(server("fleet"))[0]
        honest = server("history", entry["node"], card["uuid"], server("fleet")["at_unix_ms"] - 3_600_000, 10)
        lie = None

        def change(route):
            answer = copy.deepcopy(honest)
            lie(answer)
            text = json.dumps(answer).replace('"1e999"', "1e999").replace('"-1e999"', "-1e999")
            route.fulfill(content_type="application/json", body=text)

        one.page.route("**/api/v1/history*", change)
        for name, lie in lies():
            one.go("#/")
            one.page.wait_for_selector("#rows")
            one.go(gpu_address(entry["node"], card))
            one.page.wait_for_selector(".chart .band", state="attached")
            text = one.text()
            assert "NaN" not in text and "Infinity" not in text and "undefined" not in text, (name, text)
            drawn = one.evaluate(
                """() => ({
                    all: document.querySelectorAll('*').length,
                    paths: [...document.querySelectorAll('path')].reduce((sum, path) => sum + path.getAttribute('d').length, 0),
                    broken: [...document.querySelectorAll('svg *')].some((e) => [...e.attributes].some((a) => /NaN|Infinity/.test(a.value))),
                    ticks: Math.max(...[...document.querySelectorAll('.chart')].map((chart) => chart.querySelectorAll('.tick').length)),
                    length: document.querySelector('.readout input').max - document.querySelector('.readout input').min,
                })"""
            )
            assert drawn["all"] < 4000 and drawn["paths"] < 20_000_000 and not drawn["broken"], (name, drawn)
            assert drawn["ticks"] <= 3 + 1280 // 90 + 1 and 3_000_000 < drawn["length"] < 4_000_000, (name, drawn)
        # A million points are those of the window's buckets.
        kept = one.evaluate(
            """async () => {
                const { within } = await import('/assets/history.js');
                const points = Array.from({ length: 1_000_000 }, (_, i) => ({ at_unix_ms: i * 7, seconds: 10 }));
                const answer = within({ step_seconds: 10, at_unix_ms: 0, tenants: [{ points }] }, 3_000_000, 6_600_000, 10);
                return answer.tenants[0].points.map((point) => point.at_unix_ms);
            }"""
        )
        assert kept == list(range(2_990_000, 6_600_001, 10_000)), (len(kept), kept[:3], kept[-3:])
        # The axis keeps its bound by itself.
        worst = one.evaluate(
            """async () => {
                const { Axis } = await import('/assets/chart.js');
                const ends = [0, 1, -1, 1.8e12, 2 ** 53, 2 ** 63, -(2 ** 63), 1e308];
                const counts = ends.flatMap((since) => ends.map((until) => new Axis({ since, until, stepMs: 10_000, width: 1280 }).ticks().length));
                return Math.max(...counts);
            }"""
        )
        assert worst <= 1280 // 90 + 1, worst
