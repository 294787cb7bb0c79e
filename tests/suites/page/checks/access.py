"""axe-core finds nothing, on every view, light and wide, dark and narrow."""

from axe_playwright_python.sync_playwright import Axe
from browser import gpu_address, gpus, page, pod_address, tenants


def judge(one, where):
    # Against the policy of the page itself: axe is handed to the browser, not to the document.
    results = Axe().run(one.page)
    violations = [
        (found["id"], found["help"], [node["target"] for node in found["nodes"]][:5], found["nodes"][0].get("failureSummary", ""))
        for found in results.response["violations"]
    ]
    assert not violations, (where, violations)


def visit(width, scheme):
    with page("--nodes", 5, "--gpus", 2, width=width, scheme=scheme) as (one, server):
        model = server("fleet")
        judge(one, "fleet")
        entry, card = next((e, g) for e, g in gpus(model) if g["state"] == "unhealthy")
        one.go(gpu_address(entry["node"], card))
        one.page.wait_for_selector(".chart .band", state="attached")
        judge(one, "gpu")
        _, tenant = next((n, t) for n, t in tenants(model) if t["refusals"] > 0)
        one.go(pod_address(tenant))
        one.until_text("To change it:")
        one.until_text("Times are in UTC.")
        one.page.wait_for_selector(".chart .band", state="attached")
        judge(one, "pod")
        one.go("#/namespaces")
        one.until_text("GPU hour costs")
        one.evaluate("() => document.querySelectorAll('details').forEach((d) => d.open = true)")
        judge(one, "namespaces")
        one.page.keyboard.press("?")
        one.page.wait_for_selector("dialog[open]")
        judge(one, "help")
        one.page.keyboard.press("Escape")
        # Nothing is cut off, and nobody has to scroll sideways but in tables.
        assert one.evaluate("() => document.documentElement.scrollWidth <= innerWidth")


def access_light():
    visit(1280, "light")


def access_narrow_dark():
    visit(400, "dark")
