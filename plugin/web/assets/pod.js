// A pod: what it may use, uses and wants; why; what was; what would suit it better.

import { json, text } from "./api.js";
import { awayNote, command, crumbs, facts, tenantTable, usedTime, wanted } from "./facts.js";
import { h } from "./dom.js";
import * as format from "./format.js";
import { History } from "./history.js";
import { podsOf, tenantName } from "./model.js";
import { gpuLink, link } from "./router.js";

const AGAIN_MS = 15_000;

/** The view of a pod, or of an allocation that kubelet has not named. */
export class PodView {
  constructor(app, rest, kind, query) {
    this.app = app;
    this.kind = kind;
    [this.namespace, this.pod] = kind === "pod" ? [rest[0] ?? "", rest[1] ?? ""] : ["", ""];
    this.id = kind === "pod" ? "" : (rest[0] ?? "");
    this.node = query.get("node") ?? "";
    this.histories = new Map();
    this.explained = { text: "", error: "", at: -Infinity };
    this.advice = { workloads: null, error: "", at: -Infinity };
    this.controller = new AbortController();
  }

  subject() {
    return this.kind === "pod" ? `${this.namespace}/${this.pod}` : this.id;
  }

  title() {
    return this.kind === "pod" ? `${format.line(this.namespace)}/${format.line(this.pod)}` : `allocation ${format.short(this.id)}`;
  }

  /** Its tenants with their GPUs. */
  find() {
    const mine = (tenant) => (this.kind === "pod" ? podsOf(tenant).includes(`${this.namespace}/${this.pod}`) : tenant.id === this.id);
    return this.app.model.gpus().flatMap((row) => row.tenants.filter(({ tenant }) => mine(tenant)).map((one) => ({ ...one, row })));
  }

  draw(query) {
    const { model } = this.app;
    const found = this.find();
    const node = found[0]?.row.entry.node ?? this.node;
    const heading = [
      crumbs(this.kind === "pod" ? h("a", { href: link([], { namespace: this.namespace }) }, h("bdi", {}, format.line(this.namespace))) : "allocations", h("bdi", {}, format.line(this.pod || this.id))),
      h("h1", { class: "name" }, h("bdi", {}, this.title())),
    ];
    if (model.atUnixMs === 0) return [...heading, h("p", { class: "empty" }, "Waiting for the first answer.")];
    this.ask(node);
    const name = historyWindow(this.histories, this.app, query);
    const gpus = found.length > 0 ? found.map(({ row, use }) => ({ uuid: use.gpu_uuid, label: `GPU ${row.gpu.index} of ${format.line(row.entry.node)}`, node: row.entry.node })) : this.gone(node, name);
    return [
      ...heading,
      found.length > 0 ? this.live(found) : h("p", { class: "note warn" }, "No pod of this name uses a GPU now, or you may not see it. What is kept of it follows."),
      h("h2", {}, "Why"),
      this.explanation(),
      h("h2", {}, "Advice"),
      this.advised(found),
      h("h2", {}, "History"),
      unique(gpus).map((gpu) =>
        h(
          "section",
          { class: "history", key: `history ${gpu.uuid}`, "aria-label": `history on ${gpu.label}` },
          h("h3", {}, h("a", { href: gpuLink(gpu.node, gpu.uuid, { pod: this.subject() }) }, gpu.label)),
          this.historyOf(gpu, name),
        ),
      ),
      gpus.length === 0 ? h("p", { class: "muted" }, "Nothing is kept of it.") : null,
    ];
  }

  live(found) {
    const { model } = this.app;
    const { tenant, use, row } = found[0];
    const want = wanted(model, tenant);
    const waiting = tenant.compute?.waiting_us;
    return [
      awayNote(model, row.entry),
      h("div", { class: row.entry.answers ? "" : "away", key: "live" }, tenantTable(model, found, { tone: (_, i) => i % 10, withGpu: true, label: "quota and use" })),
      facts([
        ["workload", format.line(tenant.workload)],
        ["asked as", tenant.claim ? `claim ${format.line(tenant.claim)}, ${format.line(tenant.request)}` : format.line(tenant.resource_name)],
        ["quota", format.bytes(use.memory_limit_bytes)],
        ["memory used", format.bytes(use.memory_used_bytes)],
        ["overhead", use.memory_overhead_bytes > 0 ? format.bytes(use.memory_overhead_bytes) : ""],
        ["peak of a process", format.bytes(use.memory_peak_bytes)],
        ["share", `${format.cores(use.cores_millis)} ${format.line(use.policy)}${use.changed ? ", changed while it runs" : ""}`],
        ["GPU time used", tenant.compute ? `${usedTime(tenant)} in 10s` : ""],
        ["leased", tenant.compute ? `${format.cores(tenant.compute.got_1s_millis)} in 1s, ${format.cores(tenant.compute.got_10s_millis)} in 10s` : "its GPU time is not divided"],
        ["wanted", want === null ? "" : format.cores(want)],
        ["waiting now", waiting !== null && waiting !== undefined ? `for ${Math.ceil(waiting / 1000)}ms` : ""],
        ["gate", format.line(tenant.compute?.gate ?? "")],
        ["refusals", tenant.refusals > 0 ? `${format.number(tenant.refusals)} over the quota` : "none"],
        ["driver's refusals", tenant.driver_refusals > 0 ? format.number(tenant.driver_refusals) : ""],
        ["processes", format.number(tenant.processes)],
        ["allocated", `${format.utc(tenant.allocated_unix_ms)} UTC, ${format.ago(tenant.allocated_unix_ms, model.now())} ago`],
        ["allocation", format.short(tenant.id)],
        ["also held by", tenant.other_holders.map(format.line).join(", ")],
      ]),
    ];
  }

  /** Explanation and advice, once in a while. */
  ask(node) {
    const { signal } = this.controller;
    const now = performance.now();
    if (now - this.explained.at > AGAIN_MS) {
      this.explained.at = now;
      text("explain", { subject: this.subject(), node }, signal).then(
        (reply) => this.renew({ explained: { text: reply, error: "", at: now } }),
        (error) => signal.aborted || this.renew({ explained: { text: "", error: error.message, at: now } }),
      );
    }
    if (this.kind === "pod" && now - this.advice.at > AGAIN_MS * 4) {
      this.advice.at = now;
      json("recommend", { namespace: this.namespace, pod: this.pod }, signal).then(
        (reply) => this.renew({ advice: { workloads: reply.workloads, error: "", at: now } }),
        (error) => signal.aborted || this.renew({ advice: { workloads: null, error: error.message, at: now } }),
      );
    }
  }

  renew(news) {
    Object.assign(this, news);
    this.app.draw();
  }

  explanation() {
    const { text: reply, error } = this.explained;
    return [
      error ? h("p", { class: "warning" }, `No explanation: ${format.line(error)}`) : null,
      reply ? h("pre", { tabindex: 0, role: "region", "aria-label": "explanation" }, format.lines(reply)) : error ? null : h("p", { class: "muted" }, "Asking."),
      h("p", {}, "The same in a terminal: ", command(`kubectl tessera explain ${format.quoted(this.subject())}`)),
    ];
  }

  advised(found) {
    const { workloads, error } = this.advice;
    if (error) return h("p", { class: "warning" }, `No advice: ${format.line(error)}`);
    if (workloads === null) return h("p", { class: "muted" }, this.kind === "pod" ? "Asking." : "There is advice once kubelet has named the pod.");
    if (workloads.length === 0) return h("p", { class: "muted" }, "Nothing is known of it yet.");
    return workloads.map((one) =>
      h(
        "div",
        { class: "advice", key: `${one.workload} ${one.container} ${one.part}` },
        facts([
          ["container", format.line(one.part ? `${one.container}, ${one.part}` : one.container)],
          ["memory", `${format.bytes(one.memory_limit_bytes)} now, ${format.bytes(one.memory_bytes)} would do`],
          ["share", `${format.cores(one.cores_millis)} now, ${format.cores(one.recommended_cores_millis)} would do`],
          ["confidence", format.line(one.confidence)],
          ["observed", format.seconds(one.observed_seconds)],
          ["would free", savings(one)],
        ]),
        h("ul", {}, one.evidence.map((line) => h("li", {}, format.line(line)))),
        one.changes.length > 0 ? [h("p", {}, "To change it:"), one.changes.map((change) => h("p", {}, command(change.text)))] : h("p", {}, "Nothing should change."),
      ),
    );
  }

  historyOf(gpu, name) {
    let one = this.histories.get(gpu.uuid);
    if (!one) {
      one = new History(this.app);
      this.histories.set(gpu.uuid, one);
    }
    // Of the whole GPU, because it matters who held it meanwhile.
    one.need(gpu.node, gpu.uuid, name);
    return one.draw(gpu.node, gpu.uuid, name, this.app.width(), { pod: this.subject() });
  }

  /** GPUs of a pod that is gone, as the history knows them. */
  gone(node, name) {
    this.past ??= new History(this.app);
    this.past.need(node, this.subject(), name);
    const tenants = this.past.answer?.tenants ?? [];
    return tenants.map((one) => ({ uuid: one.gpu_uuid, node: this.past.answer.node || node, label: `${format.short(one.gpu_uuid)} of ${format.line(this.past.answer.node || node)}` }));
  }

  close() {
    this.controller.abort();
    for (const one of this.histories.values()) one.stop();
    this.past?.stop();
  }
}

function historyWindow(histories, app, query) {
  return ([...histories.values()][0] ?? new History(app)).window(query);
}

function unique(gpus) {
  return [...new Map(gpus.map((gpu) => [gpu.uuid, gpu])).values()];
}

function savings(one) {
  const parts = [[one.saves_memory_bytes, format.bytes], [one.saves_cores_millis, format.gpus]];
  const listed = (sign) => parts.filter(([saved]) => saved * sign > 0).map(([saved, text]) => text(Math.abs(saved))).join(" and ");
  const [frees, needs] = [listed(1), listed(-1)];
  const texts = [frees, needs ? `it needs ${needs} more` : ""].filter(Boolean).join("; ");
  return texts && one.pods.length > 1 ? `${texts}, over ${format.count(one.pods.length, "pod")}` : texts;
}
