"""Filters, orders, and the address that keeps them."""

from browser import gpus, page, tenants


def shown(one):
    return set(one.page.locator("#rows a[data-gpu]").evaluate_all("(all) => all.map((a) => a.dataset.gpu)"))


def settle(one, wanted):
    one.until(
        "(wanted) => { const have = [...document.querySelectorAll('#rows a[data-gpu]')].map((a) => a.dataset.gpu);"
        " return have.length === wanted.length && wanted.every((uuid) => have.includes(uuid)) }",
        sorted(wanted),
    )


def filters():
    with page("--nodes", 4, "--gpus", 2, "--tenants", 3, height=3000) as (one, server):
        model = server("fleet")
        everything = {gpu["uuid"] for _, gpu in gpus(model)}
        settle(one, everything)
        _, someone = tenants(model)[0]

        def of(condition):
            return {
                gpu["uuid"] for entry, gpu in gpus(model)
                if any(condition(t) for t in entry["view"]["tenants"] if t["gpus"][0]["gpu_uuid"] == gpu["uuid"])
            }

        one.page.fill("#filter", "node:gpu-002")
        settle(one, {gpu["uuid"] for entry, gpu in gpus(model) if entry["node"] == "gpu-002"})
        one.page.fill("#filter", f"pod:{someone['pod'].upper()}")
        settle(one, of(lambda tenant: tenant["pod"] == someone["pod"]))
        # Others on that GPU are there, and pale.
        assert one.page.locator("#rows .bar g:not(.dim) .quota").count() == 1
        one.page.fill("#filter", f"ns:{someone['namespace']}")
        settle(one, of(lambda tenant: someone["namespace"] in tenant["namespace"]))
        name = gpus(model)[0][1]["name"]
        one.page.fill("#filter", f"model:{name.split()[1]}")
        settle(one, {gpu["uuid"] for _, gpu in gpus(model) if name.split()[1] in gpu["name"]})
        for word in ("unhealthy", "state:healthy", "cordoned"):
            state = word.removeprefix("state:")
            one.page.fill("#filter", word)
            settle(one, {
                gpu["uuid"] for entry, gpu in gpus(model)
                if (gpu["cordon"] if word == "cordoned" else entry["answers"] and gpu["state"] == state)
            })
        one.page.fill("#filter", "no such thing at all")
        one.until_text("No GPU is like that")
        one.page.press("#filter", "Escape")
        settle(one, everything)
        one.page.select_option("select[name=namespace]", someone["namespace"])
        settle(one, of(lambda tenant: tenant["namespace"] == someone["namespace"]))
        assert f"namespace={someone['namespace']}" in one.page.url
        # The address alone brings the same again.
        one.page.reload()
        one.ready()
        settle(one, of(lambda tenant: tenant["namespace"] == someone["namespace"]))
        assert one.page.input_value("select[name=namespace]") == someone["namespace"]
        one.page.select_option("select[name=namespace]", "")
        one.page.select_option("select[name=show]", "trouble")
        settle(one, {
            gpu["uuid"] for entry, gpu in gpus(model)
            if not entry["answers"] or gpu["state"] != "healthy" or gpu["cordon"]
        })
        one.page.select_option("select[name=show]", "")
        one.page.select_option("select[name=sort]", "used")
        order = [gpu["uuid"] for _, gpu in sorted(gpus(model), key=lambda pair: -pair[1]["memory_used_bytes"])]
        one.until(
            "(order) => { const top = (a) => a.closest('[role=row]').getBoundingClientRect().top;"
            " const have = [...document.querySelectorAll('#rows a[data-gpu]')].sort((a, b) => top(a) - top(b));"
            " return JSON.stringify(have.map((a) => a.dataset.gpu)) === JSON.stringify(order) }",
            order,
        )
        # All pods of a shared claim are named, and found.
        shared = one.evaluate(
            """async () => {
                const { parseFilter, tenantMatches, tenantName } = await import('/assets/model.js');
                const other_holders = ['team/chat-0/side', 'team/chat-1/main'];
                const tenant = { id: 'i', namespace: 'team', pod: 'chat-0', other_holders };
                const found = (text) => tenantMatches(tenant, parseFilter(text));
                return [tenantName(tenant), found('pod:chat-1'), found('chat-1'), found('pod:chat-2')];
            }"""
        )
        assert shared == ["team/chat-0, chat-1", True, True, False], shared
