"""Everything by keyboard alone."""

from browser import in_order, page


def focused(one):
    return one.evaluate("() => document.activeElement?.dataset?.gpu ?? document.activeElement?.id ?? ''")


def keyboard():
    with page("--nodes", 12, "--gpus", 4, height=600) as (one, server):
        rows = in_order(server("fleet"))
        uuids = [gpu["uuid"] for _, gpu in rows]
        press = one.page.keyboard.press
        press("?")
        one.page.wait_for_selector("dialog[open] >> text=Keys")
        press("Escape")
        one.until("() => !document.querySelector('dialog[open]')")
        for uuid in uuids[:3]:
            press("ArrowDown")
            assert focused(one) == uuid
        press("ArrowUp")
        assert focused(one) == uuids[1]
        # To rows that are not in the document yet.
        press("End")
        one.until("(uuid) => document.activeElement?.dataset?.gpu === uuid", uuids[-1])
        in_sight = "() => { const box = document.activeElement.getBoundingClientRect(); return box.top >= 0 && box.bottom <= innerHeight }"
        one.until(in_sight)
        press("Home")
        assert focused(one) == uuids[0]
        press("PageDown")
        assert focused(one) == uuids[10]
        one.until(in_sight)
        press("Enter")
        one.until("(uuid) => location.hash.includes(uuid)", uuids[10])
        one.until_text("Tenants")
        # A pod by Tab and Enter.
        for _ in range(60):
            press("Tab")
            if one.evaluate("() => (document.activeElement.getAttribute('href') ?? '').startsWith('#/pod/')"):
                break
        press("Enter")
        one.until("() => location.hash.startsWith('#/pod/')")
        one.until_text("Advice")
        press("Escape")
        # Back, with the focus where it was.
        one.until("(uuid) => document.activeElement?.dataset?.gpu === uuid", uuids[10])
        press("/")
        assert focused(one) == "filter"
        one.page.keyboard.type("node:gpu-011")
        one.until("() => location.hash.includes('gpu-011')")
        press("ArrowDown")
        assert focused(one) == next(gpu["uuid"] for entry, gpu in rows if entry["node"] == "gpu-011")
        press("Escape")
        one.until("() => !location.hash.includes('q=')")
        press("n")
        one.until("() => location.hash === '#/namespaces'")
        one.until_text("Asked, used, wasted")
        press("/")
        assert focused(one) == "filter"
        # The first stop of Tab leads past the header.
        one.page.reload()
        one.ready()
        press("Tab")
        press("Enter")
        assert focused(one) == "main"
