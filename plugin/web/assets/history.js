// A history with its charts, for a GPU or a pod: fetched, kept up to date, drawn on one time axis.

import { json } from "./api.js";
import { Axis, chart, eventTone, marks, roundUp, roundUpBytes } from "./chart.js";
import { h } from "./dom.js";
import * as format from "./format.js";
import { podLink, setQuery } from "./router.js";

/** Windows with the bucket that suits them. */
const WINDOWS = { "15m": [15, 10], "1h": [60, 10], "6h": [360, 300], "24h": [1440, 300], "7d": [10_080, 3600] };
const TONES = [0, 1, 2, 3, 4, 5, 6, 7, 9];
const EVENTS = 100;
/** Tenants of a GPU that are drawn: each is a band of four charts. */
const TENANTS = 64;
/** No figure is larger: in bytes it is 8 EiB. */
const MOST = 2 ** 63;

/** The history of a GPU of a node. */
export class History {
  constructor(app) {
    this.app = app;
    this.answer = null;
    this.error = "";
    this.asked = "";
    this.cursor = null;
    this.controller = null;
  }

  /** The window that an address names. */
  window(query) {
    const name = query.get("since") ?? "1h";
    return WINDOWS[name] ? name : "1h";
  }

  /** Asks where the answer is of something else, or old. */
  need(node, subject, name) {
    const asked = `${node}\n${subject}\n${name}`;
    const [minutes, step] = WINDOWS[name];
    const stale = performance.now() - (this.askedAt ?? -1e9) > Math.min(step * 1000, 60_000);
    if (asked === this.asked && !stale) return;
    if (asked !== this.asked) {
      this.answer = null;
      this.error = "";
    }
    this.asked = asked;
    this.askedAt = performance.now();
    this.controller?.abort();
    this.controller = new AbortController();
    const { signal } = this.controller;
    const since = Math.trunc(this.app.model.now()) - minutes * 60_000;
    json("history", { node, subject, since_unix_ms: since, step_seconds: step }, signal).then(
      (answer) => {
        this.answer = within(answer, since, since + minutes * 60_000, step);
        this.since = since;
        this.error = "";
        this.app.draw();
      },
      (error) => {
        if (signal.aborted) return;
        this.error = error.message;
        this.app.draw();
      },
    );
  }

  /** Drops what is under way. */
  stop() {
    this.controller?.abort();
  }

  /** Charts and events; `pod` names a tenant (`namespace/pod`) in the foreground, `tones` has colours by id. */
  draw(node, gpuUuid, name, width, { pod = "", tones = new Map() }) {
    const parts = [this.choice(name)];
    if (this.error) parts.push(h("p", { class: "warning" }, `No history: ${format.line(this.error)}`));
    if (!this.answer) {
      if (!this.error) parts.push(h("p", { class: "muted" }, "Reading the history."));
      return parts;
    }
    const { answer } = this;
    const stepMs = answer.step_seconds * 1000;
    const axis = new Axis({ since: this.since, until: answer.at_unix_ms, stepMs, width });
    const all = busiest(answer.tenants.filter((one) => one.gpu_uuid === gpuUuid), pod, tones);
    const tenants = all.slice(0, TENANTS);
    const gpu = answer.gpus.find((one) => one.gpu_uuid === gpuUuid);
    const events = answer.events.filter((event) => event.gpu_uuid === gpuUuid || event.gpu_uuid === "").slice(-EVENTS);
    const cursor = this.cursor === null ? null : Math.min(Math.max(this.cursor, axis.since), axis.until);
    const onCursor = (at) => {
      this.cursor = at;
      this.app.draw();
    };
    if (tenants.length === 0 && !gpu?.points.length) {
      parts.push(h("p", { class: "muted" }, "Nothing is kept of this time."));
      return parts;
    }
    const common = { axis, cursor, onCursor };
    parts.push(
      pod ? blame(tenants, pod) : null,
      all.length > TENANTS ? h("p", { key: "left-out", class: "muted" }, `Left out: ${format.count(all.length - TENANTS, "tenant")} that got less than these.`) : null,
      key(tenants, node, strips(gpu)),
      chart({ ...common, ...timeline(tenants), strips: strips(gpu) }),
      chart({ ...common, ...waits(tenants) }),
      chart({ ...common, ...memory(tenants, gpu, pod) }),
      chart({ ...common, ...refusals(tenants) }),
      marks({ ...common, events }),
      this.slider(axis, cursor, tenants),
      eventTable(events, node),
      answer.remarks.map((remark) => h("p", { class: "muted" }, format.line(remark))),
    );
    return parts;
  }

  choice(name) {
    return h(
      "div",
      { class: "choice", role: "group", "aria-label": "time", key: "choice" },
      Object.keys(WINDOWS).map((one) =>
        h("button", { type: "button", key: one, "aria-pressed": one === name ? "true" : "false", onclick: () => setQuery({ since: one === "1h" ? "" : one }) }, one),
      ),
    );
  }

  /** The cursor by keyboard, and what lies under it in words. */
  slider(axis, cursor, tenants) {
    const at = bucket(cursor ?? axis.until - axis.stepMs, axis);
    const text = readout(tenants, at);
    return h(
      "div",
      { class: "readout", key: "readout" },
      h(
        "label",
        {},
        "at",
        h("input", {
          type: "range", min: axis.since, max: axis.until, step: axis.stepMs, value: String(cursor ?? axis.until), "aria-valuetext": `${format.clock(at)}: ${text}`,
          oninput: (event) => {
            this.cursor = Number(event.target.value);
            this.app.draw();
          },
        }),
      ),
      h("output", {}, `${format.utc(at)} UTC: ${text}`),
    );
  }
}

/**
 * An answer as one may draw it, whatever a node wrote: its step is one that histories have, its instants are in the
 * window that was asked for, and each figure is a number.
 */
export function within(answer, since, until, step) {
  const step_seconds = Object.values(WINDOWS).some(([, known]) => known === answer.step_seconds) ? answer.step_seconds : step;
  const stepMs = step_seconds * 1000;
  // The node's clock may be a bucket ahead.
  const last = until + stepMs;
  const now = answer.at_unix_ms;
  const inWindow = (one) => one.at_unix_ms > since - stepMs && one.at_unix_ms <= last;
  const series = (list) => (list ?? []).map((one) => ({ ...one, points: buckets((one.points ?? []).filter(inWindow), stepMs) }));
  return {
    ...answer,
    step_seconds,
    at_unix_ms: now >= since + stepMs && now <= last ? now : until,
    gpus: series(answer.gpus),
    tenants: series(answer.tenants),
    events: (answer.events ?? []).filter(inWindow),
    remarks: answer.remarks ?? [],
  };
}

/** One point for each bucket, in order: a node may write a bucket a million times, or each instant of it. */
function buckets(points, stepMs) {
  const last = new Map(points.map((point) => [Math.floor(point.at_unix_ms / stepMs) * stepMs, point]));
  const figure = (value) => (value > 0 && value < MOST ? Number(value) : 0);
  return [...last]
    .sort(([a], [b]) => a - b)
    .map(([at, point]) => ({ ...Object.fromEntries(Object.entries(point).map(([name, value]) => [name, figure(value)])), at_unix_ms: at }));
}

function bucket(at, axis) {
  return Math.floor(at / axis.stepMs) * axis.stepMs;
}

const nameOf = (one) => (one.pod === "" ? `allocation ${format.short(one.id)}` : `${format.line(one.namespace)}/${format.line(one.pod)}`);

/** Tenants with their colours, those that got most first; the rest is one. */
function busiest(list, pod, tones) {
  const got = (one) => one.points.reduce((total, point) => total + point.got_seconds, 0);
  const sorted = list
    .map((one) => ({ ...one, got: got(one), name: nameOf(one), mine: `${one.namespace}/${one.pod}` === pod }))
    .sort((a, b) => Number(b.mine) - Number(a.mine) || b.got - a.got || (a.name < b.name ? -1 : 1));
  const taken = new Set(tones.values());
  const free = TONES.filter((tone) => !taken.has(tone));
  return sorted.map((one) => ({ ...one, tone: tones.get(one.id) ?? free.shift() ?? 8 }));
}

const valuesOf = (one, of) => new Map(one.points.map((point) => [point.at_unix_ms, of(point)]));
const per = (part, point) => (point.seconds > 0 ? part / point.seconds : 0);

function bandsOf(tenants, of) {
  return tenants.map((one) => ({ key: `${one.id} ${one.generation}`, name: one.name, tone: one.tone, values: valuesOf(one, of), dim: tenants[0].mine && !one.mine }));
}

const percentOf = (part) => format.percent(Math.round(part * 100) * 1000);

function timeline(tenants) {
  const seconds = tenants.reduce((total, one) => total + one.got, 0);
  const summary = tenants.slice(0, 3).map((one) => `${one.name} ${percentOf(seconds > 0 ? one.got / seconds : 0)}`).join(", ");
  return { title: "GPU time: which tenant held the lease", summary, bands: bandsOf(tenants, (p) => per(p.got_seconds, p)), most: 1, text: percentOf, height: 170 };
}

function waits(tenants) {
  const bands = bandsOf(tenants, (p) => per(p.waited_seconds, p));
  const most = Math.max(0.1, ...heights(bands));
  return { title: "waiting: part of the time, tenants added up", summary: `at most ${percentOf(most)}`, bands, most: roundUp(most), text: percentOf, height: 110 };
}

function heights(bands) {
  const sums = new Map();
  for (const band of bands) for (const [at, value] of band.values) sums.set(at, (sums.get(at) ?? 0) + value);
  return sums.values();
}

function memory(tenants, gpu, pod) {
  const mine = tenants.filter((one) => one.mine);
  if (pod && mine.length > 0) {
    const lines = mine.flatMap((one) => [
      { name: "quota", kind: "limit", values: valuesOf(one, (p) => p.memory_limit_bytes) },
      { name: "peak", kind: "peak", values: valuesOf(one, (p) => p.memory_peak_bytes) },
    ]);
    const bands = mine.map((one) => ({ key: one.id, name: one.name, tone: one.tone, values: valuesOf(one, (p) => p.memory_used_bytes) }));
    const most = Math.max(1, ...lines.flatMap((one) => [...one.values.values()]));
    return { title: "memory: used, peak (dotted), quota (dashed)", summary: `quota ${format.bytes(most)}`, bands, lines, most: roundUpBytes(most), text: format.bytes };
  }
  const bands = bandsOf(tenants, (p) => p.memory_used_bytes);
  const limits = new Map((gpu?.points ?? []).map((p) => [p.at_unix_ms, p.memory_limits_bytes]));
  const most = Math.max(1, ...limits.values(), ...heights(bands));
  return { title: "memory: used by tenants, sold (dashed)", summary: `sold ${format.bytes(Math.max(0, ...limits.values()))}`, bands, lines: [{ name: "sold", kind: "limit", values: limits }], most: roundUpBytes(most), text: format.bytes };
}

function refusals(tenants) {
  const bands = bandsOf(tenants, (p) => p.refusals);
  const most = Math.max(0, ...heights(bands));
  const total = tenants.reduce((sum, one) => sum + one.points.reduce((all, p) => all + p.refusals, 0), 0);
  return { title: `refusals: ${format.number(total)}`, summary: format.count(total, "refusal"), bands, most: roundUp(Math.max(2, most)), text: (n) => format.number(Math.round(n)), height: 80 };
}

function strips(gpu) {
  const points = (of) => (gpu?.points ?? []).filter((p) => of(p) > 0).map((p) => ({ at: p.at_unix_ms }));
  return [
    { kind: "unhealthy", name: "not healthy", points: points((p) => p.unhealthy_seconds) },
    { kind: "cordoned", name: "cordoned", points: points((p) => p.cordoned_seconds) },
  ].filter((strip) => strip.points.length > 0);
}

/** Which tenants held the GPU while a pod waited for it, weighed by its waiting. */
export function holdersWhileWaiting(tenants) {
  const mine = tenants.filter((one) => one.mine);
  const waited = new Map();
  for (const one of mine) for (const p of one.points) waited.set(p.at_unix_ms, (waited.get(p.at_unix_ms) ?? 0) + p.waited_seconds);
  const total = [...waited.values()].reduce((sum, one) => sum + one, 0);
  const holders = tenants
    .filter((one) => !one.mine)
    .map((one) => ({ name: one.name, part: one.points.reduce((sum, p) => sum + (waited.get(p.at_unix_ms) ?? 0) * per(p.got_seconds, p), 0) / (total || 1) }))
    .filter(({ part }) => part >= 0.005)
    .sort((a, b) => b.part - a.part);
  const own = mine.reduce((all, one) => all + one.points.reduce((sum, p) => sum + p.waited_seconds * per(p.got_seconds, p), 0), 0) / (total || 1);
  return { total, holders, own };
}

function blame(tenants, pod) {
  const { total, holders, own } = holdersWhileWaiting(tenants);
  if (total < 0.05) return h("p", { key: "blame" }, "It did not wait for this GPU in this time.");
  const who = holders.length > 0 ? holders.slice(0, 5).map(({ name, part }) => `${name} ${percentOf(part)}`).join(", ") : "no tenant that you may see";
  return h("p", { key: "blame", class: "blame" }, `It waited ${format.seconds(total)} for this GPU in this time. Meanwhile others held it: ${who}; it had ${percentOf(own)} itself.`);
}

function key(tenants, node, marked) {
  return h(
    "ul",
    { class: "legend", "aria-label": "colours of the charts", key: "key" },
    tenants.map((one) =>
      h(
        "li",
        { key: `${one.id} ${one.generation}`, class: `c${one.tone}` },
        h("span", { class: "swatch", "aria-hidden": "true" }),
        h("a", { href: podLink(node, one) }, h("bdi", {}, one.name)),
        one.live ? null : h("span", { class: "muted" }, " (gone)"),
      ),
    ),
    marked.map((one) => h("li", { key: one.kind }, h("span", { class: `swatch ${one.kind}`, "aria-hidden": "true" }), one.name)),
  );
}

function readout(tenants, at) {
  const here = tenants.map((one) => ({ one, point: one.points.find((p) => p.at_unix_ms === at) })).filter(({ point }) => point);
  if (here.length === 0) return "nothing is kept of this moment";
  const held = here.filter(({ point }) => per(point.got_seconds, point) >= 0.005).sort((a, b) => b.point.got_seconds - a.point.got_seconds);
  const wait = here.filter(({ point }) => per(point.waited_seconds, point) >= 0.005).sort((a, b) => b.point.waited_seconds - a.point.waited_seconds);
  const list = (some, of) => some.slice(0, 3).map(({ one, point }) => `${one.name} ${percentOf(per(of(point), point))}`).join(", ") || "none";
  return `held by ${list(held, (p) => p.got_seconds)}; waiting: ${list(wait, (p) => p.waited_seconds)}`;
}

function eventTable(events, node) {
  if (events.length === 0) return h("p", { class: "muted", key: "events-none" }, "No events in this time.");
  return h(
    "div",
    { class: "scroll events", key: "event-table", tabindex: 0, role: "region", "aria-label": "events" },
    h(
      "table",
      {},
      h("thead", {}, h("tr", {}, ["time (UTC)", "event", "pod", "what happened"].map((name) => h("th", { scope: "col" }, name)))),
      h(
        "tbody",
        {},
        [...events].reverse().map((event) =>
          h(
            "tr",
            {},
            h("td", { class: "time" }, format.utc(event.at_unix_ms)),
            h("td", { class: `tone ${eventTone(event.what)}` }, format.line(event.what)),
            h("td", { class: "name" }, eventPod(event, node)),
            h("td", { class: "text" }, format.line(event.text)),
          ),
        ),
      ),
    ),
  );
}

function eventPod(event, node) {
  const slash = event.pod.indexOf("/");
  if (slash < 0) return "-";
  const [namespace, pod] = [event.pod.slice(0, slash), event.pod.slice(slash + 1)];
  return h("a", { href: podLink(node, { namespace, pod, id: event.tenant }) }, h("bdi", {}, format.line(event.pod)));
}
