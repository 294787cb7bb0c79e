// Figures and foreign text as the command line writes them. `tests/suites/page` holds both against one table.

const UNITS = ["B", "KiB", "MiB", "GiB", "TiB", "PiB", "EiB"];

/** Bytes with the largest unit that fits, exact or with one decimal: `1.5 GiB`. */
export function bytes(count) {
  let value = Math.max(0, Math.trunc(Number(count) || 0));
  let unit = 0;
  let size = 1;
  while (unit + 1 < UNITS.length && value >= size * 1024) {
    size *= 1024;
    unit += 1;
  }
  const whole = Math.floor(value / size);
  const rest = value - whole * size;
  // As the command line, cut and not rounded: what is shown as used is never more than what is.
  return rest === 0 ? `${whole} ${UNITS[unit]}` : `${whole}.${Math.floor((rest * 10) / size)} ${UNITS[unit]}`;
}

/** A share of a GPU's time, of thousandths of the GPU: `25%`. */
export function cores(millis) {
  return percent((Math.trunc(Number(millis) || 0)) * 100);
}

/** A sum over GPUs, of thousandths of a GPU: `25% of a GPU`, `20.4 GPUs`. */
export function gpus(millis) {
  const all = Math.max(0, Math.trunc(Number(millis) || 0));
  if (all < 1000) return `${cores(all)} of a GPU`;
  const text = decimal(all / 1000).replace(/\.0$/, "");
  return `${text} ${text === "1" ? "GPU" : "GPUs"}`;
}

/** A percentage, of thousandths of a percent. */
export function percent(part) {
  const value = Math.max(0, Math.trunc(Number(part) || 0));
  const rest = value % 1000;
  const whole = (value - rest) / 1000;
  return rest === 0 ? `${whole}%` : `${whole}.${String(rest).padStart(3, "0").replace(/0+$/, "")}%`;
}

/** `2026-11-22 08:32:01`, in UTC; a dash for 0, which stands for "never". */
export function utc(unixMs) {
  if (!unixMs) return "-";
  const text = iso(unixMs);
  return `${text.slice(0, -5).replace("T", " ")}`;
}

/** `08:32:01`, in UTC. */
export function clock(unixMs) {
  return iso(unixMs).slice(-13, -5);
}

function iso(unixMs) {
  const second = Math.floor(unixMs / 1000) * 1000;
  const date = new Date(Math.min(Math.max(second, -62135596800000), 253402300799000));
  return date.toISOString();
}

/** How long ago, in the two largest units: `3d 4h`, `12m 5s`, `8s`. */
export function ago(sinceUnixMs, nowUnixMs) {
  return seconds(Math.max(0, nowUnixMs - sinceUnixMs) / 1000);
}

/** A length of time in the two largest units. */
export function seconds(length) {
  const all = Math.trunc(Math.max(0, Number(length) || 0));
  const [d, hours, m, sec] = [Math.floor(all / 86400), Math.floor(all / 3600) % 24, Math.floor(all / 60) % 60, all % 60];
  if (d > 0) return `${d}d ${hours}h`;
  if (hours > 0) return `${hours}h ${m}m`;
  if (m > 0) return `${m}m ${sec}s`;
  return `${sec}s`;
}

const ACTS =
  /[\u0000-\u001f\u007f-\u009f\u061c\u200b-\u200f\u2028-\u202e\u2060-\u206f\ufeff\ufff9-\ufffb]/g;
const SHORT = new Map([["\n", "\\n"], ["\r", "\\r"], ["\t", "\\t"]]);

/** Foreign text as one line: what acts instead of being seen is written as `\u` and four digits. */
export function line(text) {
  return String(text).replace(ACTS, (c) => SHORT.get(c) ?? `\\u${c.charCodeAt(0).toString(16).padStart(4, "0")}`);
}

/** Text of several lines of our own, which may quote foreign text. */
export function lines(text) {
  return String(text).replace(ACTS, (c) => (c === "\n" ? c : line(c)));
}

/** Text as one word of a shell's command: names come from addresses and pods. */
export function quoted(text) {
  const word = String(text);
  return /^(?!-)[A-Za-z0-9._/-]+$/.test(word) ? word : `'${word.replaceAll("'", "'\\''")}'`;
}

const FRACTIONS = new Map([
  [750, "¾"], [666, "⅔"], [667, "⅔"], [500, "½"], [333, "⅓"], [334, "⅓"], [250, "¼"], [200, "⅕"], [125, "⅛"],
  [1000, "1 GPU"],
]);

/** A part of a GPU: `½`, else its percentage. */
export function fraction(millis) {
  return FRACTIONS.get(millis) ?? cores(millis);
}

/** What still fits on a GPU: `1 × ½, 3 × ¼`; or what there is too little of. */
export function fits(gpu) {
  const some = (gpu.fits ?? []).filter((fit) => fit.count > 0);
  if (some.length === 0) return gpu.no_room ? `nothing: too little ${line(gpu.no_room)}` : "nothing";
  return some
    .map((fit) => `${fit.count} × ${fit.cores_millis > 0 ? fraction(fit.cores_millis) : bytes(fit.memory_bytes)}`)
    .join(", ");
}

/** A count with its word: `1 GPU`, `1,600 GPUs`. */
export function count(n, word, many = `${word}s`) {
  return `${number(n)} ${n === 1 ? word : many}`;
}

/** A count, with commas between thousands. */
export function number(n) {
  return String(Math.trunc(Number(n) || 0)).replace(/\B(?=(\d{3})+(?!\d))/g, ",");
}

/** A figure with one decimal: `1,234.5`. */
export function decimal(n, digits = 1) {
  const [whole, part] = (Number(n) || 0).toFixed(digits).split(".");
  return part === undefined ? number(whole) : `${number(whole)}.${part}`;
}

/** A product's name without what all have in common: `A100-SXM4-80GB`. */
export function model(name) {
  return line(name).replace(/^NVIDIA /, "");
}

/** An id or UUID, short: enough for `tessera explain`. */
export function short(id) {
  const text = line(id);
  return /^(GPU|MIG)-/.test(text) ? text.slice(0, 12) : text.slice(0, 8);
}
