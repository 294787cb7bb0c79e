"""The page writes figures and foreign text as the command line does."""

import subprocess

from browser import page


def formats():
    with page("--nodes", 1) as (one, server):
        table = server("formats")
        assert set(table) == {"bytes", "cores", "percent", "utc", "clock", "ago", "line", "lines", "quoted"}
        for name, cases in table.items():
            wrong = one.evaluate(
                """async ([name, cases]) => {
                    const format = await import('/assets/format.js');
                    return cases.filter((c) => format[name](...c.slice(0, -1)) !== c.at(-1))
                        .map((c) => [...c, format[name](...c.slice(0, -1))]);
                }""",
                [name, cases],
            )
            assert len(cases) > 5 and not wrong, (name, wrong[:5])
        # A shell reads each as one word, and as that word.
        whole = table["quoted"]
        script = "\n".join(f"printf '%s\\0' {word}" for _, word in whole)
        read = subprocess.run(["sh"], input=script.encode(), capture_output=True, check=True).stdout.decode().split("\0")
        assert read == [pod for pod, _ in whole] + [""]
        # What the command line has no words for.
        fits = one.evaluate(
            """async () => {
                const format = await import('/assets/format.js');
                const fit = (count, cores_millis, memory_bytes = 0) => ({ count, cores_millis, memory_bytes });
                return [format.fits({ fits: [fit(1, 500), fit(3, 250)] }), format.fits({ fits: [fit(0, 500)] }),
                    format.fits({ fits: [], no_room: "GPU time" }), format.fits({ fits: [fit(2, 0, 2 ** 30)] }),
                    format.count(1, 'GPU'), format.count(1600, 'GPU'), format.decimal(2.96), format.decimal(1234.5)];
            }"""
        )
        assert fits == ["1 × ½, 3 × ¼", "nothing", "nothing: too little GPU time", "2 × 1 GiB", "1 GPU", "1,600 GPUs", "3.0", "1,234.5"], fits


def events():
    """Server-sent events, however they are cut into pieces."""
    with page("--nodes", 1) as (one, _):
        text = ": hello\\n\\nevent: fleet\\ndata: {\\\"a\\\":1}\\n\\nevent: nodes\\r\\ndata: one\\r\\ndata:two\\r\\n\\r\\nid: 7\\n\\ndata\\n\\n"
        one.evaluate(
            """async (text) => {
                const { Events } = await import('/assets/stream.js');
                const wanted = JSON.stringify([['fleet', '{"a":1}'], ['nodes', 'one\\ntwo'], ['message', '']]);
                for (let size = 1; size <= text.length; size += 1) {
                    const got = [];
                    const events = new Events((name, data) => got.push([name, data]));
                    for (let i = 0; i < text.length; i += size) events.push(text.slice(i, i + size));
                    if (JSON.stringify(got) !== wanted) throw new Error(`${size}: ${JSON.stringify(got)}`);
                }
            }""",
            text.encode().decode("unicode_escape"),
        )
