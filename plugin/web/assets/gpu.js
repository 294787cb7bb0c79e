// A GPU: its state, tenants, and what happened on one time axis.

import { bar, health } from "./bars.js";
import { h } from "./dom.js";
import { awayNote, crumbs, facts, tenantTable } from "./facts.js";
import * as format from "./format.js";
import { History } from "./history.js";
import { tenantName } from "./model.js";
import { link, podLink } from "./router.js";
import { TraceView } from "./trace.js";

/** The length of a lease. */
function quantum(us) {
  if (!us) return "-";
  return us < 10_000 ? `${Math.floor(us / 1000)}.${Math.floor((us % 1000) / 100)}ms` : `${Math.floor(us / 1000)}ms`;
}

/** The view of a GPU. */
export class GpuView {
  constructor(app, [node, uuid]) {
    this.app = app;
    this.node = node ?? "";
    this.uuid = uuid ?? "";
    this.history = new History(app);
    this.trace = new TraceView(app);
  }

  find() {
    const node = this.app.model.nodes.get(this.node);
    return node?.gpus.find(({ gpu }) => gpu.uuid === this.uuid || String(gpu.index) === this.uuid);
  }

  title() {
    const row = this.find();
    return `${row ? `GPU ${row.gpu.index}` : format.short(this.uuid)} of ${format.line(this.node)}`;
  }

  draw(query) {
    const { model } = this.app;
    const row = this.find();
    if (!row) {
      const text = model.atUnixMs === 0 ? "Waiting for the first answer." : `Node ${format.line(this.node)} has no GPU ${format.line(this.uuid)}, or you may not see it.`;
      return [crumbs(this.title()), h("h1", {}, this.title()), h("p", { class: "empty" }, text)];
    }
    const { gpu, entry } = row;
    const name = this.history.window(query);
    this.history.need(entry.node, gpu.uuid, name);
    const index = new Map(row.tenants.map(({ tenant }, i) => [tenant.id, i % 10]));
    const tone = (tenant) => index.get(tenant.id) ?? 8;
    const open = (event, href) => (location.hash = href);
    return [
      crumbs(h("a", { href: link([], { q: `node:${entry.node}` }) }, h("bdi", {}, format.line(entry.node))), `GPU ${gpu.index}`),
      h("h1", {}, h("bdi", {}, this.title()), " ", health(gpu.state, !entry.answers)),
      awayNote(model, entry),
      stateNote(model, gpu),
      gpu.cordon ? h("p", { class: "note warn" }, `⊘ ${format.line(gpu.cordon)}. What runs here goes on; nothing new comes.`) : null,
      h("div", { class: entry.answers ? "big" : "big away" }, bar(row, { colour: tone, open })),
      facts([
        ["model", format.model(gpu.name)],
        ["memory used / sold / total", `${format.bytes(gpu.memory_used_bytes)} / ${format.bytes(gpu.memory_limits_bytes)} / ${format.bytes(gpu.memory_total_bytes)}`],
        ["outside tenants", gpu.memory_outside_bytes > 0 ? format.bytes(gpu.memory_outside_bytes) : ""],
        ["reserve", format.bytes(gpu.memory_reserve_bytes)],
        ["for each context", format.bytes(gpu.context_overhead_bytes)],
        ["shares sold", format.cores(gpu.cores_millis)],
        ["fits next", format.fits(gpu)],
        ["lease", lease(row)],
        ["waiting", gpu.lease ? format.number(gpu.lease.waiting) : ""],
        ["quantum", gpu.lease ? quantum(gpu.lease.quantum_us) : ""],
        ["front end", `${format.line(gpu.front_end)}${gpu.moving ? ", moving" : ""}`],
        ["UUID", format.line(gpu.uuid)],
        ["PCI", format.line(gpu.pci_bus_id)],
        ["NUMA node", gpu.numa_node === null || gpu.numa_node === undefined ? "" : String(gpu.numa_node)],
      ]),
      h("h2", {}, "Tenants"),
      row.tenants.length === 0 ? h("p", { class: "muted" }, "None that you may see.") : tenantTable(model, row.tenants.map((one) => ({ ...one, row })), { tone, label: "tenants" }),
      row.others ? h("p", { class: "muted" }, `And ${format.count(row.others.tenants, "tenant")} of other namespaces: ${format.bytes(row.others.memory_limit_bytes)} and ${format.cores(row.others.cores_millis)} in all.`) : null,
      gpu.lease ? [h("h2", {}, "Trace"), h("section", { key: "trace", "aria-label": "trace" }, this.trace.draw(entry.node, gpu.uuid, this.app.width(), index))] : null,
      h("h2", {}, "History"),
      h("section", { class: "history", key: "history", "aria-label": "history" }, this.history.draw(entry.node, gpu.uuid, name, this.app.width(), { pod: query.get("pod") ?? "", tones: index })),
    ];
  }

  close() {
    this.history.stop();
    this.trace.stop();
  }
}

function stateNote(model, gpu) {
  if (gpu.state === "healthy") return null;
  const since = gpu.state_since_unix_ms > 0 ? ` since ${format.ago(gpu.state_since_unix_ms, model.now())}` : "";
  const waits = gpu.state_waits_for ? ` It waits for ${format.line(gpu.state_waits_for)}.` : "";
  return h("p", { class: `note ${gpu.state === "unhealthy" ? "bad" : "warn"}` }, `${format.line(gpu.state)}${since}: ${format.line(gpu.state_reason)}.${waits}`);
}

function lease(row) {
  const { lease: one } = row.gpu;
  if (!one) return "not divided";
  const holder = row.tenants.find(({ tenant }) => tenant.id === one.holder);
  if (!holder) return one.holder === "" ? "free, or a tenant that you may not see" : format.short(one.holder);
  return h("a", { href: podLink(row.entry.node, holder.tenant) }, h("bdi", {}, tenantName(holder.tenant)));
}
