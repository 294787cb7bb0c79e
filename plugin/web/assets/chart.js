// Charts over one time axis. Buckets are drawn as steps; where nobody looked there is a gap.

import { h, s } from "./dom.js";
import * as format from "./format.js";

const LEFT = 64;
const RIGHT = 8;

/** Where instants lie. */
export class Axis {
  constructor({ since, until, stepMs, width }) {
    this.since = since;
    this.until = Math.max(until, since + stepMs);
    this.stepMs = stepMs;
    this.width = Math.max(240, width);
  }

  x(at) {
    const part = (at - this.since) / (this.until - this.since);
    return LEFT + Math.min(1, Math.max(0, part)) * (this.width - LEFT - RIGHT);
  }

  at(x) {
    return this.since + ((x - LEFT) / (this.width - LEFT - RIGHT)) * (this.until - this.since);
  }

  /** Round instants, at most one in 90 pixels. */
  ticks() {
    const most = Math.max(2, Math.floor((this.width - LEFT) / 90));
    const steps = [1, 2, 5, 10, 15, 30, 60, 120, 180, 360, 720, 1440, 2880, 10080].map((minutes) => minutes * 60_000);
    const length = this.until - this.since;
    const step = steps.find((one) => length / one <= most) ?? 86_400_000 * Math.ceil(length / 86_400_000 / most);
    const first = Math.ceil(this.since / step) * step;
    // Counted, not compared: beyond 2^53 an instant and a step later may be the same number.
    const count = Math.min(most, Math.floor((this.until - first) / step)) + 1;
    const list = Array.from({ length: count > 0 ? count : 0 }, (_, i) => first + i * step);
    return list.map((at) => ({ at, text: step >= 86_400_000 ? format.utc(at).slice(5, 10) : format.clock(at).slice(0, 5) }));
  }
}

const num = (value) => (Math.round(value * 10) / 10).toString();

/** A round figure that is not below a value. */
export function roundUp(value) {
  if (!(value > 0 && value < Infinity)) return 1;
  const power = 10 ** Math.floor(Math.log10(value));
  return [1, 2, 2.5, 5, 10].map((n) => n * power).find((n) => n >= value * 0.999);
}

/** A size whose quarters read well. */
export function roundUpBytes(value) {
  if (!(value < Infinity)) return 1;
  let unit = 1;
  while (unit * 1024 <= value) unit *= 1024;
  return Math.max(1, Math.ceil(value / unit)) * unit;
}

/** Runs of points without a gap: `[[{at, end, value…}]]`. */
function runs(points, stepMs) {
  const list = [];
  for (const point of points) {
    const last = list.at(-1);
    if (last && point.at - last.at(-1).at <= stepMs * 1.5) last.push(point);
    else list.push([point]);
  }
  return list;
}

/** The outline of a band between two heights for each point. */
function bandPath(points, axis, y, low, high) {
  return runs(points, axis.stepMs)
    .map((run) => {
      const top = run.map((p) => `${num(axis.x(p.at))},${num(y(high(p)))} ${num(axis.x(p.at + axis.stepMs))},${num(y(high(p)))}`);
      const back = [...run].reverse().map((p) => `${num(axis.x(p.at + axis.stepMs))},${num(y(low(p)))} ${num(axis.x(p.at))},${num(y(low(p)))}`);
      return `M${top.join(" L")} L${back.join(" L")}Z`;
    })
    .join("");
}

function linePath(points, axis, y, value) {
  return runs(points, axis.stepMs)
    .map((run) => `M${run.map((p) => `${num(axis.x(p.at))},${num(y(value(p)))} ${num(axis.x(p.at + axis.stepMs))},${num(y(value(p)))}`).join(" L")}`)
    .join("");
}

/**
 * A chart. `bands` are stacked, each `{name, tone, values: Map(at → value)}`; `lines` are `{name, kind, values}`.
 * `cursor` is an instant or null.
 */
export function chart({ axis, title, summary, bands = [], lines = [], most, text, height = 130, cursor = null, onCursor, strips = [] }) {
  const top = 8;
  const bottom = 20;
  const plot = height - top - bottom;
  const y = (value) => top + plot * (1 - Math.min(1, Math.max(0, value / most)));
  const instants = [...new Set(bands.flatMap((band) => [...band.values.keys()]))].sort((a, b) => a - b);
  const sums = new Map(instants.map((at) => [at, 0]));
  const drawn = bands.map((band) => {
    const points = instants.map((at) => {
      const low = sums.get(at);
      const high = low + (band.values.get(at) ?? 0);
      sums.set(at, high);
      return { at, low, high };
    });
    return s(
      "path",
      { key: `band ${band.key ?? band.name}`, class: `band c${band.tone}${band.dim ? " dim" : ""}`, d: bandPath(points, axis, y, (p) => p.low, (p) => p.high) },
      s("title", {}, band.name),
    );
  });
  const levels = [0, 0.5, 1].map((part) => part * most);
  return h(
    "figure",
    { key: title },
    h("figcaption", {}, title),
    s(
      "svg",
      {
        class: "chart", width: axis.width, height, viewBox: `0 0 ${axis.width} ${height}`, role: "img", "aria-label": `${title}: ${summary}`,
        onpointermove: onCursor && ((event) => onCursor(axis.at(event.clientX - event.currentTarget.getBoundingClientRect().left))),
      },
      levels.map((level) => [
        s("line", { key: `l ${level}`, class: "gridline", x1: LEFT, x2: axis.width - RIGHT, y1: num(y(level)), y2: num(y(level)) }),
        s("text", { key: `t ${level}`, class: "tick", x: LEFT - 6, y: num(y(level) + 4), "text-anchor": "end" }, text(level)),
      ]),
      axis.ticks().map(({ at, text: label }) => [
        s("line", { key: `x ${at}`, class: "gridline", x1: num(axis.x(at)), x2: num(axis.x(at)), y1: top, y2: top + plot }),
        s("text", { key: `xt ${at}`, class: "tick", x: num(axis.x(at)), y: height - 5, "text-anchor": axis.x(at) > axis.width - 24 ? "end" : "middle" }, label),
      ]),
      strips.map((strip, i) => s("path", { key: `s ${i}`, class: `strip ${strip.kind}`, d: bandPath(strip.points, axis, (v) => (v ? top : top + plot), () => 0, () => 1) }, s("title", {}, strip.name))),
      drawn,
      lines.map((one) =>
        s(
          "path",
          { key: `line ${one.name}`, class: `line ${one.kind}`, d: linePath([...one.values].map(([at, value]) => ({ at, value })), axis, y, (p) => p.value) },
          s("title", {}, one.name),
        ),
      ),
      cursor === null ? null : s("line", { key: "cursor", class: "cursor", x1: num(axis.x(cursor)), x2: num(axis.x(cursor)), y1: top, y2: top + plot }),
    ),
  );
}

/** Events on the same axis: a mark for each, with its number in the list below. */
export function marks({ axis, events, cursor = null, onCursor }) {
  const height = 34;
  return h(
    "figure",
    { key: "events" },
    h("figcaption", {}, "events"),
    s(
      "svg",
      {
        class: "chart", width: axis.width, height, viewBox: `0 0 ${axis.width} ${height}`, role: "img", "aria-label": `events: ${format.count(events.length, "event")}, listed below`,
        onpointermove: onCursor && ((event) => onCursor(axis.at(event.clientX - event.currentTarget.getBoundingClientRect().left))),
      },
      s("line", { class: "gridline", x1: LEFT, x2: axis.width - RIGHT, y1: 24, y2: 24 }),
      events.map((event, i) =>
        s(
          "g",
          { key: `e ${i} ${event.at_unix_ms}`, class: `mark ${eventTone(event.what)}` },
          s("title", {}, `${format.clock(event.at_unix_ms)} ${format.line(event.what)}: ${format.line(event.text)}`),
          s("path", { d: `M${num(axis.x(event.at_unix_ms))},24 l-5,-9 h10 z` }),
        ),
      ),
      cursor === null ? null : s("line", { key: "cursor", class: "cursor", x1: num(axis.x(cursor)), x2: num(axis.x(cursor)), y1: 0, y2: height }),
    ),
  );
}

/** How bad an event is. */
export function eventTone(what) {
  if (["health", "tampered", "bypassed", "driver-refused", "unaccounted"].includes(what)) return "bad";
  if (["refused-memory", "delayed", "overlapped", "rationed", "cordoned", "configuration-refused", "unlisted"].includes(what)) return "warn";
  return "plain";
}
