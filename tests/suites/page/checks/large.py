"""200 nodes with 8 GPUs and 10 tenants each."""

from browser import gpus, in_order, page
from views import written


def large():
    with page("--nodes", 200, "--gpus", 8, "--tenants", 10, "--interval-ms", 200) as (one, server):
        model = server("fleet")
        assert len(gpus(model)) == 1600
        one.page.wait_for_selector("#rows .row")
        # What is in sight is in the document, and little more.
        assert one.evaluate("() => document.querySelectorAll('*').length") < 4000
        one.page.keyboard.press("End")
        last = in_order(model)[-1][1]["uuid"]
        one.until("(uuid) => document.activeElement?.dataset?.gpu === uuid", last)
        server("tick", 60_000)
        one.until_text(f"refusals\n{written(one, 'number', server('refusals'))}", ".totals")
        # The focus survived it.
        one.until("(uuid) => document.activeElement?.dataset?.gpu === uuid", last)
        one.page.fill("#filter", "node:gpu-150")
        one.until("() => document.querySelectorAll('#rows .row').length === 8")
        one.page.select_option("select[name=sort]", "waiting")
        one.until("() => document.querySelectorAll('#rows .node').length === 0")
