"""Names that nobody may have change nothing."""

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
