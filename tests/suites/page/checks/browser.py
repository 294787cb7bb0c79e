"""The server over a made-up fleet, and Chromium before it."""

import contextlib
import json
import os
import shutil
import subprocess
import tempfile
import urllib.parse

from playwright.sync_api import sync_playwright

# Nothing of a browser's own that goes to the network.
ARGUMENTS = [
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run",
    "--disable-background-networking", "--disable-component-update", "--disable-sync",
]
# A condition is waited for so long; nothing is fast because of it.
PATIENCE_MS = 120_000


def chromium():
    for name in (os.environ.get("CHROMIUM") or "chromium chromium-browser google-chrome").split():
        if found := shutil.which(name):
            return found
    raise SystemExit("no Chromium: install the package chromium")


class Server:
    """`tessera-page-server`, by its commands."""

    def __init__(self, *options):
        self.process = subprocess.Popen(
            [os.environ["PAGE_SERVER"], *map(str, options)],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        )
        self.url = self.process.stdout.readline().strip()
        assert self.url.startswith("http://"), "the server says why above"

    def __call__(self, *words):
        self.process.stdin.write(" ".join(map(str, words)) + "\n")
        self.process.stdin.flush()
        return json.loads(self.process.stdout.readline())

    def close(self):
        self.process.stdin.close()
        self.process.wait()


class Page:
    """A page, with whatever happened on it that should not."""

    def __init__(self, context, server):
        self.server = server
        self.amiss = []
        self.expected = ()
        self.requests = []
        self.page = context.new_page()
        self.page.set_default_timeout(PATIENCE_MS)
        self.page.on("console", lambda said: said.type in ("error", "warning") and self.amiss.append(said.text))
        self.page.on("pageerror", lambda error: self.amiss.append(f"{error} {error.stack}"))
        self.page.on("dialog", lambda dialog: (self.amiss.append(f"dialog {dialog.message}"), dialog.dismiss()))
        self.page.on("request", lambda request: self.requests.append(request.url))
        self.page.add_init_script(
            "addEventListener('securitypolicyviolation', (e) => console.error(`policy: ${e.violatedDirective} ${e.blockedURI}`));"
        )

    def __getattr__(self, name):
        return getattr(self.page, name)

    def open(self, address="#/"):
        self.page.goto(self.server.url + address)
        self.ready()

    def ready(self):
        self.page.wait_for_selector('#main[aria-busy="false"]')

    def go(self, address):
        self.page.evaluate("(address) => { location.hash = address }", address)

    def until(self, what, *arguments):
        """Waits for an expression of JavaScript to be true."""
        self.page.wait_for_function(what, arg=arguments[0] if arguments else None, timeout=PATIENCE_MS)

    def until_text(self, text, where="body"):
        self.until("([text, where]) => (document.querySelector(where)?.innerText ?? '').includes(text)", [text, where])

    def text(self, where="main"):
        return self.page.inner_text(where)

    def check(self):
        """Nothing was amiss, and nothing but this server was asked."""
        amiss = [text for text in self.amiss if not any(part in text for part in self.expected)]
        assert not amiss, amiss
        foreign = [url for url in self.requests if not url.startswith(self.server.url)]
        assert not foreign, foreign


@contextlib.contextmanager
def page(*options, width=1280, height=900, scheme="light", address="#/", opened=True):
    """One page before a server with these options; at its end nothing may have been amiss."""
    server = Server(*options)
    try:
        with sync_playwright() as playwright, tempfile.TemporaryDirectory() as data:
            context = playwright.chromium.launch_persistent_context(
                data, executable_path=chromium(), args=ARGUMENTS, headless=True,
                viewport={"width": width, "height": height}, color_scheme=scheme,
            )
            try:
                one = Page(context, server)
                if opened:
                    one.open(address)
                yield one, server
                one.check()
            finally:
                context.close()
    finally:
        server.close()


def tenants(fleet):
    return [(entry["node"], tenant) for entry in fleet["nodes"] for tenant in (entry["view"] or {}).get("tenants", [])]


def gpus(fleet):
    return [(entry, gpu) for entry in fleet["nodes"] for gpu in entry["view"]["gpus"]]


def in_order(fleet):
    """GPUs as the fleet shows them: nodes with trouble first."""
    def is_well(entry):
        return entry["answers"] and all(gpu["state"] == "healthy" and not gpu["cordon"] for gpu in entry["view"]["gpus"])

    return gpus({"nodes": sorted(fleet["nodes"], key=is_well)})


def gpu_address(node, gpu):
    return f"#/gpu/{quote(node)}/{quote(gpu['uuid'])}"


def pod_address(tenant):
    return f"#/pod/{quote(tenant['namespace'])}/{quote(tenant['pod'])}"


def quote(text):
    return urllib.parse.quote(text, safe="!'()*-._~")
