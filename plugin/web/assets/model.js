// What the server said last, cut into rows that views draw. Only what changed is worked out again.

import * as format from "./format.js";

/** Answers of nodes arrive in any order, some seconds apart: what is older than this comes from a clock that was set back. */
const SET_BACK_MS = 60_000;

const sum = (list, of) => list.reduce((total, one) => total + of(one), 0);

/** The tenant's waiting since its last figures, in thousandths of the time; null where there is one look only. */
class Rates {
  constructor() {
    this.looks = new Map();
  }

  take(tenant, atUnixMs) {
    const waited = tenant.compute?.waited_us;
    if (waited === undefined) return;
    const look = this.looks.get(tenant.id);
    if (!look || look.generation !== tenant.generation || waited < look.waited || atUnixMs < look.at) {
      this.looks.set(tenant.id, { at: atUnixMs, waited, generation: tenant.generation, millis: null });
    } else if (atUnixMs - look.at >= 1900) {
      look.millis = Math.min(1000, Math.round((waited - look.waited) / (atUnixMs - look.at)));
      look.at = atUnixMs;
      look.waited = waited;
    }
  }

  keep(ids) {
    for (const id of this.looks.keys()) if (!ids.has(id)) this.looks.delete(id);
  }

  waits(tenant) {
    return this.looks.get(tenant.id)?.millis ?? null;
  }
}

/** The fleet as the page has it. */
export class Model {
  constructor() {
    this.nodes = new Map();
    this.name = "";
    this.atUnixMs = 0;
    /** The server's clock less this machine's: they may differ by hours. */
    this.offsetMs = 0;
    this.rates = new Rates();
    this.revision = 0;
  }

  /** Now, by the server's clock. */
  now() {
    return Date.now() + this.offsetMs;
  }

  /** Everything again. */
  takeFleet(fleet) {
    this.name = fleet.name ?? "";
    this.clock(fleet.at_unix_ms);
    const before = this.nodes;
    this.nodes = new Map();
    for (const entry of fleet.nodes ?? []) this.nodes.set(entry.node, this.node(entry, before.get(entry.node)));
    this.rates.keep(new Set(this.tenants().map(({ tenant }) => tenant.id)));
    this.revision += 1;
  }

  /** Some nodes again. */
  takeNodes(entries) {
    for (const entry of entries) {
      this.nodes.set(entry.node, this.node(entry));
      if (entry.answers) this.clock(entry.answered_unix_ms);
    }
    this.revision += 1;
  }

  clock(atUnixMs) {
    if (!(atUnixMs > this.atUnixMs || atUnixMs < this.atUnixMs - SET_BACK_MS)) return;
    this.atUnixMs = atUnixMs;
    this.offsetMs = atUnixMs - Date.now();
  }

  node(entry) {
    const view = entry.view;
    const gpus = (view?.gpus ?? []).map((gpu) => this.gpu(entry, view, gpu));
    const byUuid = new Map(gpus.map((row) => [row.gpu.uuid, row]));
    for (const tenant of view?.tenants ?? []) {
      if (entry.answers) this.rates.take(tenant, view.at_unix_ms);
      for (const use of tenant.gpus ?? []) byUuid.get(use.gpu_uuid)?.tenants.push({ tenant, use });
    }
    for (const other of view?.others ?? []) {
      const row = byUuid.get(other.gpu_uuid);
      if (row) row.others = other;
    }
    for (const row of gpus) row.finish();
    const namespaces = new Set((view?.tenants ?? []).map((tenant) => tenant.namespace));
    const trouble = entry.answers && gpus.every((row) => row.trouble === 0) ? 0 : 1;
    return { entry, gpus, namespaces, trouble, totals: totals(entry, gpus) };
  }

  gpu(entry, view, gpu) {
    return new GpuRow(entry, gpu);
  }

  /** All GPUs. */
  gpus() {
    return [...this.nodes.values()].flatMap((node) => node.gpus);
  }

  /** All tenants with their nodes. */
  tenants() {
    return [...this.nodes.values()].flatMap(({ entry }) => (entry.view?.tenants ?? []).map((tenant) => ({ entry, tenant })));
  }

  /** All namespaces, in order. */
  namespaces() {
    const all = new Set();
    for (const node of this.nodes.values()) for (const name of node.namespaces) all.add(name);
    return [...all].sort();
  }

  /** All models of GPUs, in order. */
  models() {
    const all = new Set();
    for (const node of this.nodes.values()) for (const { gpu } of node.gpus) all.add(gpu.name);
    return [...all].sort();
  }

  /** Sums over all nodes. */
  totals() {
    const all = [...this.nodes.values()].map((node) => node.totals);
    const keys = Object.keys(EMPTY);
    return Object.fromEntries(keys.map((key) => [key, sum(all, (one) => one[key])]));
  }
}

/** A GPU with its tenants. */
export class GpuRow {
  constructor(entry, gpu) {
    this.entry = entry;
    this.gpu = gpu;
    this.key = `${entry.node}\n${gpu.uuid}`;
    this.tenants = [];
    this.others = null;
  }

  finish() {
    this.usedBytes = this.gpu.memory_used_bytes;
    this.overheadBytes = sum(this.tenants, ({ use }) => use.memory_overhead_bytes);
    this.waiting = this.gpu.lease?.waiting ?? 0;
    this.refusals = sum(this.tenants, ({ tenant }) => tenant.refusals);
    this.freeMillis = Math.max(0, ...(this.gpu.fits ?? []).filter((fit) => fit.count > 0).map((fit) => fit.cores_millis || 1));
    this.trouble = !this.entry.answers || this.gpu.state !== "healthy" || this.gpu.cordon !== "" ? 1 : 0;
  }

  /** What a filter looks at, in small letters. */
  words() {
    if (!this.found) {
      const pods = this.tenants.flatMap(({ tenant }) => podsOf(tenant)).map((pod) => pod.toLowerCase());
      this.found = {
        node: [this.entry.node.toLowerCase()],
        namespace: this.tenants.map(({ tenant }) => tenant.namespace.toLowerCase()),
        pod: pods,
        model: [this.gpu.name.toLowerCase()],
        gpu: [this.gpu.uuid.toLowerCase()],
        state: states(this),
      };
    }
    return this.found;
  }
}

/** The words for how a GPU is. */
function states({ entry, gpu }) {
  const words = entry.answers ? [gpu.state] : ["no answer", "away"];
  return gpu.cordon === "" ? words : [...words, "cordoned"];
}

const EMPTY = {
  nodes: 0, away: 0, gpus: 0, sick: 0, cordoned: 0, tenants: 0, waiting: 0, refusals: 0,
  usedBytes: 0, soldBytes: 0, totalBytes: 0, soldMillis: 0,
};

function totals(entry, gpus) {
  // One on several GPUs is one; an older plugin has them by GPU alone.
  const others = entry.view?.hidden_tenants || sum(entry.view?.others ?? [], (other) => other.tenants);
  return {
    nodes: 1,
    away: entry.answers ? 0 : 1,
    gpus: gpus.length,
    sick: gpus.filter(({ gpu }) => gpu.state !== "healthy").length,
    cordoned: gpus.filter(({ gpu }) => gpu.cordon !== "").length,
    tenants: (entry.view?.tenants ?? []).length + others,
    waiting: sum(gpus, (row) => row.waiting),
    refusals: sum(entry.view?.tenants ?? [], (tenant) => tenant.refusals),
    usedBytes: sum(gpus, ({ gpu }) => gpu.memory_used_bytes),
    soldBytes: sum(gpus, ({ gpu }) => gpu.memory_limits_bytes),
    totalBytes: sum(gpus, ({ gpu }) => gpu.memory_total_bytes),
    soldMillis: sum(gpus, ({ gpu }) => gpu.cores_millis),
  };
}

/** What a filter asks: words that all must be there, some of one field (`node:`, `namespace:`, `pod:`, `model:`, `gpu:`, `state:`). */
export function parseFilter(text) {
  return text.toLowerCase().split(/\s+/).filter(Boolean).map((word) => {
    const match = /^(node|namespace|ns|pod|model|gpu|state):(.*)$/s.exec(word);
    const field = match?.[1] === "ns" ? "namespace" : match?.[1];
    return match ? { field, word: match[2] } : { field: "", word };
  });
}

/** Whether a GPU is one of those that a filter asks for. */
export function matches(row, filter) {
  const words = row.words();
  // A state from its beginning, for `healthy` is a part of `unhealthy`.
  const has = (name, word) => words[name].some((text) => (name === "state" ? text.startsWith(word) : text.includes(word)));
  return filter.every(({ field, word }) => (field ? has(field, word) : Object.keys(words).some((name) => has(name, word))));
}

/** Whether a tenant is one of those: what a bar keeps bright. */
export function tenantMatches(tenant, filter) {
  const pods = podsOf(tenant).map((pod) => pod.toLowerCase());
  const has = (word) => pods.some((pod) => pod.includes(word));
  return filter
    .filter(({ field, word }) => field === "pod" || field === "namespace" || (field === "" && has(word)))
    .every(({ field, word }) => (field === "namespace" ? tenant.namespace.toLowerCase().includes(word) : has(word)));
}

/** Orders of GPUs, by the names that the page's select has. */
export const ORDERS = {
  node: { title: "nodes, trouble first", by: () => 0 },
  trouble: { title: "GPUs, trouble first", by: (row) => -row.trouble },
  used: { title: "memory used", by: (row) => -row.usedBytes },
  sold: { title: "memory sold", by: (row) => -row.gpu.memory_limits_bytes },
  waiting: { title: "waiting", by: (row) => -row.waiting },
  refusals: { title: "refusals", by: (row) => -row.refusals },
  free: { title: "what fits next", by: (row) => -row.freeMillis },
};

/** The pods that hold a tenant, `namespace/pod`: of a claim, all that share it. */
export function podsOf(tenant) {
  const others = tenant.other_holders.map((holder) => holder.split("/").slice(0, 2).join("/"));
  return [...new Set([`${tenant.namespace}/${tenant.pod}`, ...others])];
}

/** The name of a tenant for people, printable; pods that share a claim are of its namespace. */
export function tenantName(tenant) {
  if (tenant.pod === "") return `allocation ${format.short(tenant.id)}`;
  const [first, ...others] = podsOf(tenant).map(format.line);
  return [first, ...others.map((pod) => pod.split("/")[1])].join(", ");
}
