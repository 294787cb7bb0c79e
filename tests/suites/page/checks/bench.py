"""What the page costs with a large fleet, measured in Chromium; prints JSON. PAGE_SERVER names the server's program.

`first_paint_ms`: from the navigation to the frame in which rows of GPUs are painted, one figure for each load.
`refresh_ms`: from the moment in which every node changes to the frame that shows the sum of all nodes' new figures.
`rss_bytes`: the most that was resident in the server, with one page open.
"""

import json
import sys
import time

from browser import Server, page
from views import written

LOADS = 7
REFRESHES = 10

OBSERVE = """
(() => {
    const look = () => {
        if (document.querySelector('#rows a[data-gpu]') === null) return requestAnimationFrame(look);
        // The frame after that in which they are laid out is on the screen.
        requestAnimationFrame(() => requestAnimationFrame(() => { window.painted = performance.now(); }));
    };
    requestAnimationFrame(look);
})();
"""


def main(nodes, cards, each):
    options = ("--nodes", nodes, "--gpus", cards, "--tenants", each, "--interval-ms", 250)
    # A second server of the same fleet says what to expect: asking the first would cost it time and memory.
    twin = Server(*options)
    with page(*options, opened=False) as (one, server):
        one.page.add_init_script(OBSERVE)
        paints = []
        for _ in range(LOADS):
            one.page.goto("about:blank")
            one.page.goto(server.url)
            one.until("() => window.painted !== undefined")
            paints.append(one.evaluate("() => window.painted"))
        one.requests = [url for url in one.requests if url != "about:blank"]
        refreshes = []
        for _ in range(REFRESHES):
            twin("tick", 60_000)
            wanted = written(one, "number", twin("refusals"))
            shown = "(wanted) => [...document.querySelectorAll('.totals dd')].at(-1).innerText === wanted"
            assert not one.evaluate(shown, wanted), "a minute changes the sum"
            begun = time.monotonic()
            server("tick", 60_000)
            one.page.wait_for_function(shown, arg=wanted, polling="raf")
            refreshes.append(1000 * (time.monotonic() - begun))
        print(json.dumps({
            "first_paint_ms": paints,
            "refresh_ms": refreshes,
            "rss_bytes": server("rss"),
        }))
    twin.close()


main(*map(int, sys.argv[1:4]))
