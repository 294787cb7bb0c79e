// Small pieces that several views have.

import { useBar } from "./bars.js";
import { h } from "./dom.js";
import * as format from "./format.js";
import { tenantName } from "./model.js";
import { gpuLink, podLink } from "./router.js";

/** Words with their figures. */
export function facts(pairs) {
  return h(
    "dl",
    { class: "facts" },
    pairs.filter((pair) => pair && pair[1] !== null && pair[1] !== "").map(([name, ...text]) => h("div", { key: name }, h("dt", {}, name), h("dd", {}, text))),
  );
}

/** A command to copy. */
export function command(text) {
  return h("code", { class: "command", tabindex: 0 }, format.line(text));
}

/** What a tenant wants: what it used, or had where nobody can tell, and its waiting. */
export function wanted(model, tenant) {
  const waits = model.rates.waits(tenant);
  if (!tenant.compute || waits === null) return null;
  return Math.min(1000, (tenant.compute.used_10s_millis ?? tenant.compute.got_10s_millis) + waits);
}

/** The part of the last ten seconds in which a tenant's work ran on the GPU. */
export function usedTime({ compute }) {
  if (!compute) return "-";
  const used = compute.used_10s_millis;
  return used === null || used === undefined ? "unknown" : format.cores(used);
}

/** Tenants with their figures, one line for each GPU that they use. */
export function tenantTable(model, rows, { tone, withGpu = false, label }) {
  const head = ["pod", withGpu ? "GPU" : "", "state", "quota | used | peak", "memory used / quota", "peak", "share", "used (10s)", "leased (10s)", "wanted", "refusals"].filter(Boolean);
  return h(
    "div",
    { class: "scroll", tabindex: 0, role: "region", "aria-label": label },
    h(
      "table",
      {},
      h("thead", {}, h("tr", {}, head.map((name) => h("th", { scope: "col" }, name)))),
      h(
        "tbody",
        {},
        rows.map(({ row, tenant, use }, i) => {
          const want = wanted(model, tenant);
          const short = tenant.compute && want !== null && want > use.cores_millis && tenant.compute.got_10s_millis * 10 < use.cores_millis * 9;
          return h(
            "tr",
            { key: `${tenant.id} ${use.gpu_uuid}` },
            h(
              "th",
              { scope: "row", class: "name" },
              h("a", { href: podLink(row.entry.node, tenant) }, h("bdi", {}, tenantName(tenant))),
              h("small", {}, format.line(tenant.container)),
            ),
            withGpu ? h("td", {}, h("a", { href: gpuLink(row.entry.node, row.gpu.uuid) }, `${format.line(row.entry.node)} · GPU ${row.gpu.index}`)) : null,
            h("td", {}, format.line(tenant.state)),
            h("td", { class: "barcell" }, useBar(use, tone(tenant, i))),
            h("td", { class: "figure" }, `${format.bytes(use.memory_used_bytes)} / ${format.bytes(use.memory_limit_bytes)}`),
            h("td", { class: "figure" }, format.bytes(use.memory_peak_bytes)),
            h("td", { class: "figure" }, `${format.cores(use.cores_millis)} ${format.line(use.policy)}`),
            h("td", { class: "figure" }, usedTime(tenant)),
            h("td", { class: `figure${short ? " tone warn" : ""}` }, tenant.compute ? format.cores(tenant.compute.got_10s_millis) : "-", short ? " ▼" : ""),
            h("td", { class: "figure" }, want === null ? "-" : format.cores(want)),
            h("td", { class: `figure${tenant.refusals > 0 ? " tone warn" : ""}` }, format.number(tenant.refusals)),
          );
        }),
      ),
    ),
  );
}

/** Above a view whose node does not answer. */
export function awayNote(model, entry) {
  if (entry.answers) return null;
  const shown = entry.answered_unix_ms > 0 ? ` What you see is its last answer, of ${format.ago(entry.answered_unix_ms, model.now())} ago (${format.utc(entry.answered_unix_ms)} UTC).` : "";
  return h("p", { class: "note bad", role: "status" }, h("bdi", {}, format.line(entry.node)), ` does not answer: ${format.line(entry.error)}${shown}`);
}

/** Where a view is. */
export function crumbs(...parts) {
  return h("nav", { class: "crumbs", "aria-label": "where" }, h("a", { href: "#/" }, "Fleet"), parts.map((part) => [" › ", part]));
}
