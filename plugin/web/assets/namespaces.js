// Namespaces: what they asked, used, and paid for in vain.

import { json } from "./api.js";
import { h, s } from "./dom.js";
import * as format from "./format.js";
import { link, podLink, setQuery } from "./router.js";

const WINDOWS = { "1h": 1, "24h": 24, "7d": 168, "30d": 720 };
const AGAIN_MS = 60_000;
const SHOWN = 50;

/** The view of namespaces. */
export class NamespacesView {
  constructor(app) {
    this.app = app;
    this.waste = null;
    this.error = "";
    this.asked = "";
    this.at = -Infinity;
  }

  title() {
    return "Namespaces";
  }

  draw(query) {
    const since = WINDOWS[query.get("since")] ? query.get("since") : "24h";
    if (this.app.model.atUnixMs === 0) return [h("h1", {}, "Namespaces"), h("p", { class: "empty" }, "Waiting for the first answer.")];
    this.need(since);
    return [
      h("h1", {}, "Namespaces"),
      h("h2", {}, "Now"),
      this.now(),
      h("h2", {}, "Asked, used, wasted"),
      h(
        "div",
        { class: "choice", role: "group", "aria-label": "time", key: "choice" },
        Object.keys(WINDOWS).map((one) => h("button", { type: "button", key: one, "aria-pressed": one === since ? "true" : "false", onclick: () => setQuery({ since: one === "24h" ? "" : one }) }, one)),
      ),
      this.error ? h("p", { class: "warning" }, `No figures of waste: ${format.line(this.error)}`) : null,
      this.waste ? this.past() : this.error ? null : h("p", { class: "muted" }, "Asking."),
    ];
  }

  need(since) {
    if (since === this.asked && performance.now() - this.at < AGAIN_MS) return;
    if (since !== this.asked) this.waste = null;
    this.asked = since;
    this.at = performance.now();
    this.controller?.abort();
    this.controller = new AbortController();
    const { signal } = this.controller;
    json("waste", { since_unix_ms: Math.trunc(this.app.model.now()) - WINDOWS[since] * 3_600_000 }, signal).then(
      (waste) => {
        Object.assign(this, { waste, error: "" });
        this.app.draw();
      },
      (error) => {
        if (signal.aborted) return;
        this.error = error.message;
        this.app.draw();
      },
    );
  }

  now() {
    const rows = sums(this.app.model);
    if (rows.length === 0) return h("p", { class: "muted" }, "No tenants that you may see.");
    return table(
      "namespaces now",
      ["namespace", "tenants", "memory used / quota", "shares", "got (10s)", "waiting", "refusals"],
      rows.map((one) => [
        h("a", { href: link([], { namespace: one.namespace }) }, h("bdi", {}, format.line(one.namespace) || "not named yet")),
        format.number(one.tenants),
        `${format.bytes(one.used)} / ${format.bytes(one.limit)}`,
        format.gpus(one.cores),
        format.gpus(one.got),
        format.number(one.waiting),
        format.number(one.refusals),
      ]),
      rows.map((one) => one.namespace),
    );
  }

  past() {
    const { waste } = this;
    const price = waste.price_per_gpu_hour > 0;
    const most = Math.max(1e-9, ...waste.namespaces.map((one) => one.asked_gpu_hours));
    const cost = (value) => `${format.decimal(value, 2)} ${format.line(waste.currency)}`;
    return [
      h("p", { class: "muted" }, `In GPU hours, since ${format.utc(waste.since_unix_ms)} UTC${price ? `; a GPU hour costs ${cost(waste.price_per_gpu_hour)}` : ""}.`),
      waste.namespaces.length === 0
        ? h("p", { class: "muted" }, "Nothing is kept of this time.")
        : table(
            "waste of namespaces",
            ["namespace", "asked | used", "asked", "used", "wasted", price ? "cost of the wasted" : ""].filter(Boolean),
            waste.namespaces.map((one) => {
              const wasted = Math.max(0, one.asked_gpu_hours - one.used_gpu_hours);
              return [
                h("bdi", {}, format.line(one.namespace) || "not named yet"),
                hoursBar(one, most),
                format.decimal(one.asked_gpu_hours),
                format.decimal(one.used_gpu_hours),
                `${format.decimal(wasted)} (${format.percent(Math.round((wasted / Math.max(1e-9, one.asked_gpu_hours)) * 100) * 1000)})`,
                price ? cost(one.cost) : null,
              ].filter((cell) => cell !== null);
            }),
            waste.namespaces.map((one) => one.namespace),
          ),
      waste.namespaces.map((one) => details(one)),
      waste.remarks.map((remark) => h("p", { class: "muted" }, format.line(remark))),
    ];
  }

  close() {
    this.controller?.abort();
  }
}

function sums(model) {
  const all = new Map();
  for (const { tenant } of model.tenants()) {
    let one = all.get(tenant.namespace);
    if (!one) {
      one = { namespace: tenant.namespace, tenants: 0, used: 0, limit: 0, cores: 0, got: 0, waiting: 0, refusals: 0 };
      all.set(tenant.namespace, one);
    }
    one.tenants += 1;
    for (const use of tenant.gpus) {
      one.used += use.memory_used_bytes;
      one.limit += use.memory_limit_bytes;
      one.cores += use.cores_millis;
    }
    one.got += tenant.compute?.got_10s_millis ?? 0;
    one.waiting += tenant.compute?.waiting_us !== null && tenant.compute?.waiting_us !== undefined ? 1 : 0;
    one.refusals += tenant.refusals;
  }
  return [...all.values()].sort((a, b) => b.limit - a.limit || (a.namespace < b.namespace ? -1 : 1));
}

function hoursBar(one, most) {
  const num = (value) => String(Math.round((value / most) * 1000) / 10);
  const label = `${format.decimal(one.used_gpu_hours)} used of ${format.decimal(one.asked_gpu_hours)} asked`;
  return s(
    "svg",
    { class: "bar small c0", viewBox: "0 0 100 20", preserveAspectRatio: "none", role: "img", "aria-label": label },
    s("rect", { class: "quota", x: 0, y: 0, width: num(one.asked_gpu_hours), height: 20 }),
    s("rect", { class: "used", x: 0, y: 0, width: num(one.used_gpu_hours), height: 20 }),
  );
}

function details(one) {
  const shown = one.tenants.slice(0, SHOWN);
  const name = format.line(one.namespace) || "not named yet";
  return h(
    "details",
    { key: `details ${one.namespace}` },
    h("summary", {}, h("bdi", {}, name), `: ${format.count(one.tenants.length, "tenant")}`),
    table(
      `waste of ${name}`,
      ["pod", "quota", "peak", "share", "wanted", "idle", "wasted", "confidence"],
      shown.map((tenant) => [
        tenant.pod ? h("a", { href: podLink("", { ...tenant, namespace: one.namespace }) }, h("bdi", {}, format.line(tenant.pod))) : "-",
        format.bytes(tenant.memory_limit_bytes),
        format.bytes(tenant.memory_peak_bytes),
        format.cores(tenant.cores_millis),
        format.cores(tenant.wanted_millis),
        tenant.idle_seconds === null || tenant.idle_seconds === undefined ? "-" : `${format.seconds(tenant.idle_seconds)}${tenant.idle ? " !" : ""}`,
        format.decimal(tenant.wasted_gpu_hours),
        format.line(tenant.confidence),
      ]),
      shown.map((tenant, i) => `${tenant.pod} ${i}`),
    ),
    one.tenants.length > shown.length ? h("p", { class: "muted" }, `And ${format.number(one.tenants.length - shown.length)} more: \`kubectl tessera waste --namespace ${name}\` lists all.`) : null,
  );
}

function table(label, head, rows, keys) {
  return h(
    "div",
    { class: "scroll", tabindex: 0, role: "region", "aria-label": label, key: label },
    h(
      "table",
      {},
      h("thead", {}, h("tr", {}, head.map((name) => h("th", { scope: "col" }, name)))),
      h("tbody", {}, rows.map((cells, i) => h("tr", { key: `r ${keys[i]}` }, cells.map((cell, j) => (j === 0 ? h("th", { scope: "row", class: "name" }, cell) : h("td", { class: typeof cell === "string" ? "figure" : "barcell" }, cell)))))),
    ),
  );
}
