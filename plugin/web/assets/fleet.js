// The fleet: a row for each GPU. Only rows in sight are in the document.

import { bar, health } from "./bars.js";
import { h } from "./dom.js";
import * as format from "./format.js";
import { matches, ORDERS, parseFilter, tenantMatches } from "./model.js";
import { gpuLink, link, setQuery } from "./router.js";

const HEAD_PX = 40;
const MARGIN_PX = 400;
const narrow = matchMedia("(max-width: 760px)");

/** The height of a GPU's row, as style.css has it. */
const rowPx = () => (narrow.matches ? 96 : 46);

/** What `show` leaves. */
const SHOWN = {
  trouble: { title: "with trouble", keep: (row) => row.trouble > 0 },
  sick: { title: "not healthy", keep: (row) => row.gpu.state !== "healthy" },
  cordoned: { title: "cordoned", keep: (row) => row.gpu.cordon !== "" },
  away: { title: "without an answer", keep: (row) => !row.entry.answers },
  waiting: { title: "with waiting", keep: (row) => row.waiting > 0 },
  free: { title: "with room", keep: (row) => row.freeMillis > 0 },
};

/** Rows that a filter leaves, and their heads where they are in the order of nodes. */
export function list(model, query) {
  const filter = parseFilter(query.get("q") ?? "");
  const namespace = query.get("namespace") ?? "";
  const name = query.get("model") ?? "";
  const only = query.get("show") ?? "";
  const order = ORDERS[query.get("sort")] ?? ORDERS.node;
  const asks = filter.length > 0 || namespace !== "" || name !== "" || only !== "";
  const keep = (row) =>
    (filter.length === 0 || matches(row, filter)) &&
    (namespace === "" || row.tenants.some(({ tenant }) => tenant.namespace === namespace)) &&
    (name === "" || row.gpu.name === name) &&
    (SHOWN[only]?.keep(row) ?? true);
  const bright = (tenant) => (namespace === "" || tenant.namespace === namespace) && tenantMatches(tenant, filter);
  const items = [];
  if (order === ORDERS.node) {
    const nodes = [...model.nodes.values()].sort((a, b) => b.trouble - a.trouble);
    for (const node of nodes) {
      const gpus = node.gpus.filter(keep);
      const empty = node.gpus.length === 0 && nodeMatches(node, filter, asks, only);
      if (gpus.length === 0 && !empty) continue;
      items.push({ kind: "node", key: node.entry.node, node });
      for (const row of gpus) items.push({ kind: "gpu", key: row.key, row });
    }
  } else {
    const rows = model.gpus().filter(keep);
    rows.sort((a, b) => order.by(a) - order.by(b));
    for (const row of rows) items.push({ kind: "gpu", key: row.key, row, alone: true });
  }
  return { items, bright, asks };
}

/** A node without GPUs in its view: it never answered, or has none. */
function nodeMatches(node, filter, asks, only) {
  if (!asks) return true;
  const name = node.entry.node.toLowerCase();
  return ["", "trouble", "away"].includes(only) && filter.every(({ field, word }) => (field === "" || field === "node") && name.includes(word));
}

/** The fleet's view. */
export class FleetView {
  constructor(app) {
    this.app = app;
    this.active = "";
    this.element = null;
  }

  title() {
    return "Fleet";
  }

  draw(query) {
    const { model } = this.app;
    if (model.atUnixMs === 0) return [h("h1", { class: "hidden" }, "Fleet"), h("p", { class: "empty" }, emptyText(model, false))];
    this.list(query);
    const { items } = this.listed;
    const rows = items.filter((item) => item.kind === "gpu");
    return [
      h("h1", { class: "hidden" }, "Fleet"),
      totalsLine(model),
      this.filters(query),
      legend(this.app, model),
      h("p", { class: "count", role: "status" }, this.listed.asks ? `${format.count(rows.length, "GPU")} of ${format.number(model.totals().gpus)}` : ""),
      rows.length === 0 && items.length === 0 ? h("p", { class: "empty" }, emptyText(model, this.listed.asks)) : this.grid(items),
    ];
  }

  /** What is listed and where it lies; again only where something changed. */
  list(query) {
    const { model } = this.app;
    const of = `${model.revision} ${narrow.matches} ${query}`;
    if (of === this.listedOf) return;
    this.listedOf = of;
    this.listed = list(model, query);
    const { items } = this.listed;
    let at = 0;
    const tops = items.map((item) => {
      const top = at;
      at += item.kind === "node" ? HEAD_PX : rowPx();
      return top;
    });
    this.tops = tops;
    this.height = at;
  }

  grid(items) {
    // Before the first layout everything that could be in sight is drawn.
    const from = this.element?.isConnected ? -this.element.getBoundingClientRect().top : 0;
    const low = from - MARGIN_PX;
    const high = from + innerHeight + MARGIN_PX;
    const shown = [];
    let first = lowerBound(this.tops, low - HEAD_PX - rowPx());
    for (let i = first; i < items.length && this.tops[i] < high; i += 1) shown.push(i);
    const active = items.findIndex((item) => item.key === this.active && item.kind === "gpu");
    // The row with the focus stays, so that the focus does.
    if (active >= 0 && !shown.includes(active)) shown.push(active);
    this.firstGpu = items.findIndex((item) => item.kind === "gpu");
    return h(
      "div",
      { class: "grid", role: "table", "aria-label": "GPUs", "aria-rowcount": items.length + 1, key: "grid" },
      h(
        "div",
        { class: "row header", role: "row", "aria-rowindex": 1, key: "header" },
        ["GPU", "health", "memory", "used / sold / total", "shares sold", "waiting", "fits next"].map((name, i) =>
          h("span", { role: "columnheader", class: `cell cell${i}` }, name),
        ),
      ),
      h(
        "div",
        { class: "body", role: "rowgroup", key: "body", id: "rows", style: { height: `${this.height}px` } },
        shown.map((i) => {
          const item = items[i];
          const props = { key: `${item.kind} ${item.key}`, "aria-rowindex": i + 2, style: { transform: `translateY(${this.tops[i]}px)` } };
          return item.kind === "node" ? this.head(item.node, props) : this.row(item, props);
        }),
      ),
    );
  }

  /** After the document has been changed. */
  drawn(root) {
    this.element = root.querySelector("#rows");
  }

  head({ entry, gpus, totals }, props) {
    const away = !entry.answers;
    const since = entry.answered_unix_ms > 0 ? `does not answer (last answer ${format.ago(entry.answered_unix_ms, this.app.model.now())} ago)` : "has not answered yet";
    const plugin = entry.view?.plugin;
    const amiss = away ? "" : plugin?.config_error || (plugin?.amiss ?? []).join("; ");
    return h(
      "div",
      { ...props, class: `node${away ? " away" : ""}`, role: "row" },
      h(
        "span",
        { role: "cell" },
        h("strong", {}, h("bdi", {}, format.line(entry.node))),
        away
          ? h("span", { class: "warning", title: `${format.utc(entry.answered_unix_ms)} UTC: ${format.line(entry.error)}` }, `${since}: ${format.line(entry.error)}`)
          : h("span", { class: "muted" }, `${format.count(gpus.length, "GPU")}, ${format.count(totals.tenants, "tenant")}`),
        amiss ? h("span", { class: "warning" }, format.line(amiss)) : null,
      ),
    );
  }

  row(item, props) {
    const { row } = item;
    const { gpu, entry } = row;
    const away = !entry.answers;
    const target = gpuLink(entry.node, gpu.uuid);
    const name = item.alone ? `${format.line(entry.node)} · GPU ${gpu.index}` : `GPU ${gpu.index}`;
    const open = (event, href) => {
      event.stopPropagation();
      location.hash = href;
    };
    return h(
      "div",
      { ...props, class: `row${away ? " away" : ""}${gpu.cordon ? " cordoned" : ""}`, role: "row", onclick: (event) => event.target.closest("a") || open(event, target) },
      h(
        "span",
        { role: "cell", class: "cell cell0" },
        h(
          "a",
          { href: target, onfocus: () => (this.active = item.key), "data-gpu": gpu.uuid, "data-active": item.key === this.active ? "true" : null, "aria-label": `${name}, ${format.line(entry.node)}` },
          h("bdi", {}, name),
        ),
        h("small", { title: format.line(gpu.name) }, format.model(gpu.name)),
      ),
      h(
        "span",
        { role: "cell", class: "cell cell1" },
        health(gpu.state, away),
        gpu.cordon ? h("small", { class: "cordon", title: format.line(gpu.cordon) }, "⊘ cordoned") : null,
        gpu.state_reason && !away ? h("small", { title: format.line(gpu.state_reason) }, format.line(gpu.state_reason)) : null,
      ),
      h("span", { role: "cell", class: "cell cell2" }, bar(row, { colour: (tenant) => this.app.colours.of(tenant.namespace), bright: this.listed.bright, open })),
      h("span", { role: "cell", class: "cell cell3" }, `${format.bytes(gpu.memory_used_bytes)} / ${format.bytes(gpu.memory_limits_bytes)} / ${format.bytes(gpu.memory_total_bytes)}`),
      h("span", { role: "cell", class: "cell cell4", "data-word": "sold" }, format.cores(gpu.cores_millis)),
      h("span", { role: "cell", class: "cell cell5", "data-word": "waiting" }, gpu.lease ? format.number(gpu.lease.waiting) : "-"),
      h("span", { role: "cell", class: "cell cell6", "data-word": "fits next", title: fitsTitle(gpu) }, format.fits(gpu)),
    );
  }

  filters(query) {
    const { model } = this.app;
    const option = (value, text, chosen) => h("option", { value, selected: value === chosen }, text);
    const select = (name, label, options) =>
      h(
        "label",
        { key: name },
        label,
        h(
          "select",
          { name, value: query.get(name) ?? "", onchange: (event) => setQuery({ [name]: event.target.value }) },
          options.map(([value, text]) => option(value, text, query.get(name) ?? "")),
        ),
      );
    return h(
      "form",
      { class: "filters", role: "search", key: "filters", onsubmit: (event) => event.preventDefault() },
      h(
        "label",
        { class: "wide", key: "q" },
        "filter",
        h("input", {
          type: "search", name: "q", id: "filter", value: query.get("q") ?? "", placeholder: "node, namespace, pod, model", maxlength: 400,
          autocomplete: "off", spellcheck: "false", oninput: (event) => setQuery({ q: event.target.value }),
        }),
      ),
      select("namespace", "namespace", [["", "all"], ...[...this.app.colours.names.keys()].map((name) => [name, format.line(name) || "not named yet"])]),
      select("model", "model", [["", "all"], ...model.models().map((name) => [name, format.model(name)])]),
      select("show", "show", [["", "all GPUs"], ...Object.entries(SHOWN).map(([value, { title }]) => [value, title])]),
      select("sort", "sort", Object.entries(ORDERS).map(([value, { title }]) => [value === "node" ? "" : value, title])),
    );
  }

  /** Arrows go from GPU to GPU. */
  key(event) {
    const step = { ArrowDown: 1, ArrowUp: -1, j: 1, k: -1, PageDown: 10, PageUp: -10 }[event.key];
    const rows = (this.listed?.items ?? []).filter((item) => item.kind === "gpu");
    if (rows.length === 0 || (step === undefined && event.key !== "Home" && event.key !== "End")) return false;
    const at = rows.findIndex((item) => item.key === this.active);
    let next = at < 0 ? 0 : at + (step ?? 0);
    if (event.key === "Home") next = 0;
    if (event.key === "End") next = rows.length - 1;
    this.focus(rows[Math.min(Math.max(next, 0), rows.length - 1)]);
    return true;
  }

  /** The focus where it was. */
  resume() {
    this.element?.querySelector('a[data-active="true"]')?.focus({ preventScroll: true });
  }

  focus(item) {
    this.active = item.key;
    const top = this.tops[this.listed.items.indexOf(item)];
    const page = this.element.getBoundingClientRect().top + scrollY;
    const header = document.querySelector("#top").offsetHeight + HEAD_PX;
    if (page + top - scrollY < header) scrollTo({ top: page + top - header - HEAD_PX });
    else if (page + top + rowPx() > scrollY + innerHeight) scrollTo({ top: page + top + rowPx() - innerHeight + 8 });
    this.app.drawNow();
    this.element.querySelector(`a[data-gpu="${CSS.escape(item.row.gpu.uuid)}"]`)?.focus({ preventScroll: true });
  }
}

/** What fits, by the names to ask for. */
function fitsTitle(gpu) {
  const some = gpu.fits.filter((fit) => fit.count > 0);
  return some.map((fit) => `${fit.count} × ${format.line(fit.resource_name) || "claim"}: ${format.bytes(fit.memory_bytes)}, ${format.cores(fit.cores_millis)}`).join("\n");
}

function lowerBound(list, value) {
  let low = 0;
  let high = list.length;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (list[middle] < value) low = middle + 1;
    else high = middle;
  }
  return low;
}

function emptyText(model, asks) {
  if (asks) return "No GPU is like that. Escape drops the filter.";
  if (model.atUnixMs === 0) return "Waiting for the first answer.";
  // A console has a name; what runs on a node alone is no use to its readers.
  return model.name === "" ? "No node offers a GPU. On a node, `tessera status` says why." : "No node offers a GPU. `kubectl tessera status` says why.";
}

function totalsLine(model) {
  const all = model.totals();
  const withTrouble = (n, ...kinds) => {
    const some = kinds.filter(([count]) => count > 0);
    const links = some.map(([count, word, show], i) => [i > 0 ? ", " : " (", h("a", { href: link([], { show }) }, `${format.number(count)} ${word}`)]);
    return [format.number(n), links, some.length > 0 ? ")" : null];
  };
  const facts = [
    ["nodes", withTrouble(all.nodes, [all.away, all.away === 1 ? "does not answer" : "do not answer", "away"])],
    ["GPUs", withTrouble(all.gpus, [all.sick, "not healthy", "sick"], [all.cordoned, "cordoned", "cordoned"])],
    ["tenants", format.number(all.tenants)],
    ["memory used / sold / total", `${format.bytes(all.usedBytes)} / ${format.bytes(all.soldBytes)} / ${format.bytes(all.totalBytes)}`],
    ["shares sold", all.gpus > 0 ? format.cores(Math.round(all.soldMillis / all.gpus)) : "-"],
    ["waiting", format.number(all.waiting)],
    ["refusals", format.number(all.refusals)],
  ];
  return h("dl", { class: "totals", key: "totals" }, facts.map(([name, text]) => h("div", { key: name }, h("dt", {}, name), h("dd", {}, text))));
}

function legend(app, model) {
  const names = [...app.colours.names.keys()];
  if (names.length === 0) return null;
  const shown = names.slice(0, 12);
  return h(
    "ul",
    { class: "legend", "aria-label": "colours of the bars", key: "legend" },
    shown.map((name) => h("li", { key: `n ${name}`, class: `c${app.colours.of(name)}` }, h("span", { class: "swatch", "aria-hidden": "true" }), h("bdi", {}, format.line(name) || "not named yet"))),
    names.length > shown.length ? h("li", { key: "more" }, `and ${names.length - shown.length} more`) : null,
    [["quota", "quota, not used"], ["overhead", "overhead"], ["outside", "outside tenants"], ["reserve", "reserve"], ["free", "free"]].map(([kind, text]) =>
      h("li", { key: `k ${kind}` }, h("span", { class: `swatch ${kind}`, "aria-hidden": "true" }), text),
    ),
  );
}
