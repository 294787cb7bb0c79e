// Begins here: follows the server, chooses the view by the address, draws what changed once a frame.

import { keepNamespace, keepToken, namespace, token } from "./api.js";
import { Colours } from "./bars.js";
import { Dialogs } from "./dialogs.js";
import { h, render } from "./dom.js";
import { FleetView } from "./fleet.js";
import * as format from "./format.js";
import { GpuView } from "./gpu.js";
import { Model } from "./model.js";
import { NamespacesView } from "./namespaces.js";
import { PodView } from "./pod.js";
import { parse, setQuery } from "./router.js";
import { follow } from "./stream.js";

class App {
  constructor() {
    this.model = new Model();
    this.colours = new Colours();
    this.live = { live: false, since: Date.now(), why: "", status: 0 };
    this.main = document.querySelector("#main");
    this.top = document.querySelector("#top");
    this.banner = document.querySelector("#banner");
    this.dialogs = new Dialogs(document.querySelector("#dialogs"), (text) => {
      keepToken(text);
      this.stream.again();
    });
    this.fleet = new FleetView(this);
    this.go();
    addEventListener("hashchange", () => this.go());
    addEventListener("resize", () => this.draw());
    addEventListener("scroll", () => this.view === this.fleet && this.draw(), { passive: true });
    addEventListener("keydown", (event) => this.key(event));
    addEventListener("tessera-token", (event) => this.dialogs.askToken(event.detail));
    document.addEventListener("visibilitychange", () => this.draw());
    document.querySelector(".skip").onclick = (event) => {
      event.preventDefault();
      this.main.focus();
    };
    // Lengths of time grow also when nobody says anything.
    setInterval(() => this.draw(), 1000);
    this.stream = follow((name, data) => this.take(name, data), (state) => this.state(state));
  }

  take(name, data) {
    const news = JSON.parse(data);
    if (name === "error" && news.code === 401) this.dialogs.askToken(news.error);
    if (name !== "fleet" && name !== "nodes") return;
    if (name === "fleet") this.model.takeFleet(news);
    else this.model.takeNodes(news);
    this.colours.learn(this.model.namespaces());
    this.draw();
  }

  state(state) {
    this.live = state;
    this.draw();
  }

  go() {
    const { view, rest, query } = parse(location.hash);
    const id = JSON.stringify([view, rest]);
    if (id !== this.viewId) {
      const first = this.view === undefined;
      if (this.view === this.fleet) this.fleetScroll = scrollY;
      this.view?.close?.();
      this.viewId = id;
      this.view = this.make(view, rest, query);
      this.query = query;
      this.main.replaceChildren();
      this.drawNow();
      if (!first) this.arrive();
    }
    if (this.view === this.fleet) this.fleetHash = location.hash;
    this.query = query;
    this.drawNow();
  }

  /** Where a reader's eye and focus are after a step to another view. */
  arrive() {
    this.main.focus({ preventScroll: true });
    if (this.view !== this.fleet) return scrollTo({ top: 0 });
    scrollTo({ top: this.fleetScroll ?? 0 });
    this.drawNow();
    this.fleet.resume();
  }

  make(view, rest, query) {
    switch (view) {
      case "gpu":
        return new GpuView(this, rest);
      case "pod":
      case "allocation":
        return new PodView(this, rest, view, query);
      case "namespaces":
        return new NamespacesView(this);
      default:
        return this.fleet;
    }
  }

  /** Pixels for a chart. */
  width() {
    const style = getComputedStyle(this.main);
    return Math.floor(this.main.clientWidth - parseFloat(style.paddingLeft) - parseFloat(style.paddingRight));
  }

  /** With the next frame. */
  draw() {
    if (this.frame || document.hidden) return;
    this.frame = requestAnimationFrame(() => this.drawNow());
  }

  drawNow() {
    cancelAnimationFrame(this.frame);
    this.frame = 0;
    const title = this.view.title();
    const name = this.model.name ? ` · ${format.line(this.model.name)}` : "";
    const full = `${title}${name} · Tessera`;
    if (document.title !== full) document.title = full;
    render(this.top, this.bar());
    render(this.banner, this.lost());
    render(this.main, this.view.draw(this.query));
    this.view.drawn?.(this.main);
    this.main.setAttribute("aria-busy", this.model.atUnixMs === 0 ? "true" : "false");
    this.dialogs.draw();
    if (this.model.atUnixMs !== 0 && !this.painted) {
      this.painted = true;
      performance.mark("tessera-first-rows");
    }
  }

  bar() {
    const here = (view) => (this.view instanceof view ? "page" : null);
    return [
      h("a", { class: "brand", href: "#/" }, "Tessera"),
      this.model.name ? h("span", { class: "muted cluster" }, h("bdi", {}, format.line(this.model.name))) : null,
      h(
        "nav",
        { "aria-label": "views" },
        h("a", { href: "#/", "aria-current": here(FleetView) }, "Fleet"),
        h("a", { href: "#/namespaces", "aria-current": here(NamespacesView) }, "Namespaces"),
      ),
      h(
        "span",
        { class: "status", id: "live" },
        h("span", { class: `health ${this.live.live ? "good" : "bad"}` }, h("span", { class: "dot", "aria-hidden": "true" }), this.live.live ? "live" : "not live"),
        this.model.atUnixMs ? h("span", { class: "muted" }, `${format.clock(this.model.atUnixMs)} UTC`) : null,
      ),
      namespace() === "" ? null : h("button", { type: "button", key: "namespace", class: "quiet", onclick: () => this.narrow("") }, "namespace ", h("bdi", {}, format.line(namespace())), ": drop"),
      token() === "" ? null : h("button", { type: "button", class: "quiet", onclick: () => this.forget() }, "drop token"),
      h("button", { type: "button", class: "quiet", "aria-label": "help, keys", onclick: () => this.dialogs.help() }, "?"),
    ];
  }

  lost() {
    // A connection that is being made is not lost yet.
    if (this.live.live || (this.model.atUnixMs === 0 && this.live.why === "")) return null;
    const since = format.ago(this.live.since, Date.now());
    const what = this.model.atUnixMs === 0 ? "No answer yet" : `No live data since ${format.clock(this.live.since + this.model.offsetMs)} UTC (${since})`;
    const why = this.live.why ? `: ${format.line(this.live.why)}` : "";
    return [h("p", { key: "lost", class: "note bad", role: "alert" }, what, why, ". Trying again."), this.live.status === 403 ? this.askNamespace() : null];
  }

  /** Rights on a namespace without tenants are known to the server only once it is named. */
  askNamespace() {
    const submit = (event) => {
      event.preventDefault();
      this.narrow(event.target.elements.namespace.value.trim());
    };
    return h(
      "form",
      { key: "namespace", class: "filters", role: "form", "aria-label": "namespace", onsubmit: submit },
      h("label", {}, "your namespace", h("input", { name: "namespace", id: "namespace", maxlength: 253, autocomplete: "off", spellcheck: "false" })),
      h("button", {}, "Show it"),
    );
  }

  /** Everything again, as the reader of one namespace sees it; of all, where it is empty. */
  narrow(name) {
    keepNamespace(name);
    location.reload();
  }

  forget() {
    keepToken("");
    location.reload();
  }

  key(event) {
    if (event.ctrlKey || event.metaKey || event.altKey || this.dialogs.open()) return;
    const typing = event.target.matches?.("input:not([type=range]), textarea, select");
    if (event.key === "Escape") {
      if (this.escape(event)) event.preventDefault();
      return;
    }
    if (typing) {
      if (event.target.id === "filter" && (event.key === "ArrowDown" || event.key === "Enter") && this.view.key?.({ key: "ArrowDown" })) event.preventDefault();
      return;
    }
    if (event.key === "/") {
      if (this.view !== this.fleet) location.hash = this.fleetHash ?? "#/";
      this.go();
      document.querySelector("#filter")?.select();
      document.querySelector("#filter")?.focus();
      event.preventDefault();
    } else if (event.key === "?") {
      this.dialogs.help();
      event.preventDefault();
    } else if (event.key === "n") {
      location.hash = "#/namespaces";
    } else if (event.key === "f") {
      location.hash = "#/";
    } else if (event.target.type !== "range" && this.view.key?.(event)) {
      event.preventDefault();
    }
  }

  /** One step back: out of the filter, then without it, then to the fleet. */
  escape(event) {
    if (this.view === this.fleet) {
      if (event.target.id === "filter" && event.target.value === "") event.target.blur();
      setQuery({ q: "", namespace: "", model: "", show: "" });
      this.fleet.active = "";
      return true;
    }
    location.hash = this.fleetHash ?? "#/";
    return true;
  }
}

new App();
