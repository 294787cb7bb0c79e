// The bar of a GPU's memory: one part for each tenant, then what no tenant has.

import { h, s } from "./dom.js";
import * as format from "./format.js";
import { tenantName } from "./model.js";
import { podLink } from "./router.js";

const WIDTH = 1000;

/** Colours of namespaces: the same in each row. */
export class Colours {
  constructor() {
    this.names = new Map();
  }

  /** Gives every name a colour, in their order. */
  learn(sorted) {
    if (sorted.length === this.names.size && sorted.every((name) => this.names.has(name))) return;
    this.names = new Map(sorted.map((name, i) => [name, i % 10]));
  }

  of(name) {
    return this.names.get(name) ?? 8;
  }
}

/** What a GPU's memory is cut into, from left to right, with widths that sum to the whole at most. */
export function parts(row) {
  const { gpu } = row;
  const list = [];
  for (const { tenant, use } of row.tenants) {
    const used = use.memory_used_bytes;
    list.push({ kind: "tenant", tenant, use, bytes: use.memory_limit_bytes, used: Math.min(used, use.memory_limit_bytes) });
  }
  if (row.others) {
    const { others } = row;
    list.push({ kind: "others", bytes: others.memory_limit_bytes, used: others.memory_charged_bytes, others });
  }
  if (gpu.memory_outside_bytes > 0) list.push({ kind: "outside", bytes: gpu.memory_outside_bytes });
  const taken = list.reduce((total, part) => total + part.bytes, 0);
  const reserve = Math.min(gpu.memory_reserve_bytes, Math.max(0, gpu.memory_total_bytes - taken));
  const free = Math.max(0, gpu.memory_total_bytes - taken - reserve);
  if (free > 0) list.push({ kind: "free", bytes: free });
  if (reserve > 0) list.push({ kind: "reserve", bytes: reserve });
  return list;
}

/** A part in words. */
export function partText(part) {
  switch (part.kind) {
    case "tenant": {
      const overhead = part.use.memory_overhead_bytes > 0 ? `, of it ${format.bytes(part.use.memory_overhead_bytes)} overhead` : "";
      return `${tenantName(part.tenant)}: ${format.bytes(part.used)} of ${format.bytes(part.bytes)}${overhead}`;
    }
    case "others":
      return `${format.count(part.others.tenants, "tenant")} of other namespaces: ${format.bytes(part.used)} of ${format.bytes(part.bytes)}`;
    case "outside":
      return `outside tenants: ${format.bytes(part.bytes)}`;
    case "reserve":
      return `reserve, never sold: ${format.bytes(part.bytes)}`;
    default:
      return `free: ${format.bytes(part.bytes)}`;
  }
}

/** A bar; `colour(tenant)` is an index, `bright(tenant)` says whether a filter means it. */
export function bar(row, { colour, bright = () => true, open = null }) {
  const { gpu } = row;
  const scale = WIDTH / Math.max(1, gpu.memory_total_bytes, parts(row).reduce((total, part) => total + part.bytes, 0));
  let x = 0;
  const drawn = parts(row).map((part, i) => {
    const width = part.bytes * scale;
    const from = x;
    x += width;
    const title = s("title", {}, partText(part));
    if (part.kind !== "tenant" && part.kind !== "others") {
      return s("g", { key: part.kind }, title, s("rect", { class: `part ${part.kind}`, x: num(from), y: 0, width: num(width), height: 20 }));
    }
    const tone = part.kind === "tenant" ? `c${colour(part.tenant)}` : "c8";
    const dim = part.kind === "tenant" && !bright(part.tenant) ? " dim" : "";
    const overhead = part.kind === "tenant" ? part.use.memory_overhead_bytes : 0;
    return s(
      "g",
      {
        key: part.kind === "tenant" ? `${part.tenant.id} ${i}` : part.kind,
        class: `${tone}${dim}${open && part.kind === "tenant" ? " opens" : ""}`,
        onclick: open && part.kind === "tenant" ? (event) => open(event, podLink(row.entry.node, part.tenant)) : null,
      },
      title,
      s("rect", { class: "quota", x: num(from), y: 0, width: num(width), height: 20 }),
      s("rect", { class: "used", x: num(from), y: 0, width: num(part.used * scale), height: 20 }),
      overhead > 0
        ? s("rect", { class: "overhead", x: num(from + (part.used - overhead) * scale), y: 0, width: num(overhead * scale), height: 20 })
        : null,
      s("rect", { class: "edge", x: num(from), y: 0, width: 2, height: 20 }),
    );
  });
  const label = `memory: ${format.bytes(gpu.memory_used_bytes)} used, ${format.bytes(gpu.memory_limits_bytes)} sold, ${format.bytes(gpu.memory_total_bytes)} in all`;
  return s("svg", { class: "bar", viewBox: `0 0 ${WIDTH} 20`, preserveAspectRatio: "none", role: "img", "aria-label": label }, drawn);
}

/** One tenant's quota, use and peak. */
export function useBar(use, tone) {
  const scale = 100 / Math.max(1, use.memory_limit_bytes, use.memory_peak_bytes);
  const used = use.memory_used_bytes;
  const label = `${format.bytes(used)} used, ${format.bytes(use.memory_peak_bytes)} peak, of ${format.bytes(use.memory_limit_bytes)}`;
  return s(
    "svg",
    { class: `bar small c${tone}`, viewBox: "0 0 100 20", preserveAspectRatio: "none", role: "img", "aria-label": label },
    s("title", {}, label),
    s("rect", { class: "quota", x: 0, y: 0, width: num(use.memory_limit_bytes * scale), height: 20 }),
    s("rect", { class: "used", x: 0, y: 0, width: num(used * scale), height: 20 }),
    s("rect", { class: "peak", x: num(Math.max(0, use.memory_peak_bytes * scale - 1)), y: 0, width: 1.5, height: 20 }),
  );
}

const num = (value) => String(Math.round(value * 100) / 100);

/** A dot and a word: colour never says it alone. */
export function health(state, away) {
  const word = away ? "no answer" : state;
  const tone = away ? "away" : state === "healthy" ? "good" : state === "unhealthy" ? "bad" : "warn";
  return h("span", { class: `health ${tone}` }, h("span", { class: "dot", "aria-hidden": "true" }), format.line(word));
}
