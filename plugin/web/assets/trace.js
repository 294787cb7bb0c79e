// A trace of a GPU's time: a lane for each tenant, with its leases, drains and waits; and the GPU's own, with idleness.

import { json } from "./api.js";
import { h, s } from "./dom.js";
import * as format from "./format.js";

const SECONDS = 10;
/** What is drawn at once, milliseconds. */
const ZOOMS = [10_000, 1000, 100, 10];
const LANE = 26;
const LEFT = 8;
/** Intervals of one lane and kind that are drawn; of more, those that are seen first. */
const MOST = 20_000;
const KINDS = { wait: [18, 4], drain: [4, 12], late: [4, 12], lease: [4, 12], idle: [4, 12] };

/** The trace of a GPU, once somebody asks for one. */
export class TraceView {
  constructor(app) {
    this.app = app;
    this.trace = null;
    this.error = "";
    this.controller = null;
    this.zoom = 1000;
    this.from = 0;
  }

  ask(node) {
    this.stop();
    this.controller = new AbortController();
    const { signal } = this.controller;
    const renew = (news) => {
      if (signal.aborted) return;
      Object.assign(this, { controller: null, from: 0, ...news });
      this.app.draw();
    };
    json("trace", { node, seconds: SECONDS }, signal).then(
      (trace) => renew({ trace, error: "" }),
      (error) => renew({ trace: null, error: error.message }),
    );
    this.app.draw();
  }

  stop() {
    this.controller?.abort();
    this.controller = null;
  }

  draw(node, uuid, width, tones) {
    const asking = this.controller !== null;
    return [
      h(
        "p",
        { class: "choice", key: "ask" },
        h("button", { type: "button", disabled: asking ? "" : null, onclick: () => this.ask(node) }, asking ? `Recording ${SECONDS} seconds` : `Record ${SECONDS} seconds`),
        this.trace ? h("button", { type: "button", onclick: () => this.save(`trace-${format.short(uuid)}.json`) }, "Save it for Perfetto") : null,
      ),
      this.error ? h("p", { class: "warning", key: "error" }, `No trace: ${format.line(this.error)}`) : null,
      this.trace ? this.lanes(lanesOf(this.trace, uuid), width, tones) : null,
    ];
  }

  save(name) {
    // Of this page's own making: links to elsewhere are refused where views are drawn.
    const link = document.createElement("a");
    link.href = URL.createObjectURL(new Blob([JSON.stringify(this.trace)], { type: "application/json" }));
    link.download = name;
    link.click();
    setTimeout(() => URL.revokeObjectURL(link.href), 60_000);
  }

  lanes(lanes, width, tones) {
    if (lanes.length === 0) return h("p", { class: "muted" }, "No tenant of this GPU that you may see asked for time.");
    const length = Math.min(Math.max(1, (this.trace.otherData?.duration_us ?? 0) / 1000), 60_000);
    const span = Math.min(this.zoom, length);
    const from = Math.min(this.from, Math.max(0, length - span));
    const x = (us) => LEFT + (Math.min(Math.max(us / 1000 - from, 0), span) / span) * (width - 2 * LEFT);
    const lost = this.trace.otherData?.lost_events ?? 0;
    return [
      h(
        "div",
        { class: "choice", role: "group", "aria-label": "how much is shown", key: "zoom" },
        ZOOMS.map((ms) =>
          h("button", { type: "button", key: ms, "aria-pressed": ms === this.zoom ? "true" : "false", onclick: () => this.move({ zoom: ms }) }, ms < 1000 ? `${ms} ms` : `${ms / 1000} s`),
        ),
      ),
      h(
        "div",
        { class: "readout", key: "from" },
        h(
          "label",
          {},
          "from",
          h("input", {
            type: "range", min: 0, max: Math.max(0, length - span), step: span / 10, value: String(from), "aria-valuetext": `${format.decimal(from)} ms`,
            oninput: (event) => this.move({ from: Number(event.target.value) }),
          }),
        ),
        h("output", {}, `${format.decimal(from)} to ${format.decimal(from + span)} ms of ${format.decimal(length)}`),
      ),
      lost > 0 ? h("p", { class: "muted", key: "lost" }, `It begins later: there was no room for its first ${format.count(lost, "event")}.`) : null,
      lanes.map((lane) =>
        h(
          "figure",
          { key: `lane ${lane.tid}`, class: "lane" },
          h("figcaption", {}, `${lane.name}: ${said(lane)}`),
          s(
            "svg",
            { class: "chart", width, height: LANE, viewBox: `0 0 ${width} ${LANE}`, role: "img", "aria-label": `${lane.name}: ${said(lane)}` },
            Object.entries(KINDS).map(([kind, [y, height]]) => s("path", { key: kind, class: `trace ${kind} c${tones.get(lane.allocation) ?? 8}`, d: rectangles(lane[kind], x, y, height, from, span) }, s("title", {}, kind))),
          ),
        ),
      ),
    ];
  }

  move(to) {
    Object.assign(this, to);
    this.app.draw();
  }
}

/** Intervals in sight as one path. */
function rectangles(list, x, y, height, from, span) {
  const seen = list.filter(({ ts, dur }) => (ts + dur) / 1000 >= from && ts / 1000 <= from + span);
  return seen.slice(0, MOST).map(({ ts, dur }) => {
    const left = x(ts);
    return `M${left.toFixed(1)},${y}h${Math.max(0.5, x(ts + dur) - left).toFixed(1)}v${height}H${left.toFixed(1)}z`;
  }).join("");
}

function said(lane) {
  const all = (list) => `${format.decimal(list.reduce((sum, one) => sum + one.dur, 0) / 1000)} ms`;
  if (lane.tid === 0) return `idle while a launch waited for ${all(lane.idle)}`;
  return `${format.count(lane.lease.length, "lease")} of ${all(lane.lease)}, waited ${all(lane.wait)}`;
}

/** What a trace has of one GPU: a lane for each tenant, those with most leases first. */
export function lanesOf(trace, uuid) {
  const events = trace.traceEvents ?? [];
  const pid = events.find((one) => one.name === "process_name" && String(one.args?.name ?? "").includes(uuid))?.pid;
  const lanes = new Map();
  for (const one of events) {
    if (pid === undefined || one.pid !== pid) continue;
    if (!lanes.has(one.tid)) lanes.set(one.tid, { tid: one.tid, name: "", allocation: "", wait: [], drain: [], late: [], lease: [], idle: [] });
    const lane = lanes.get(one.tid);
    if (one.name === "thread_name") Object.assign(lane, { name: format.line(one.args?.name ?? ""), allocation: one.args?.allocation ?? "" });
    if (one.ph !== "X" || !(one.ts >= 0) || !(one.dur >= 0)) continue;
    const kind = one.name.startsWith("idle") ? "idle" : one.name;
    if (kind in KINDS) lane[kind].push(one);
  }
  return [...lanes.values()].sort((a, b) => b.lease.length - a.lease.length).slice(0, 64);
}
