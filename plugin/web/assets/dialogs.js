// The two dialogs: keys, and the token.

import { h, render } from "./dom.js";
import * as format from "./format.js";

const KEYS = [
  ["/", "filter: words, or node: namespace: pod: model: gpu: before a word"],
  ["↓ ↑ j k", "from GPU to GPU; Page up and down by ten; Home, End"],
  ["Tab, Enter", "from link to link; open"],
  ["Escape", "drop the filter; back to the fleet"],
  ["f, n", "fleet; namespaces"],
  ["← →", "on the time below charts: from bucket to bucket"],
  ["?", "this"],
];

/** Help, and asking for a token. */
export class Dialogs {
  constructor(root, onToken) {
    this.root = root;
    this.onToken = onToken;
    this.reason = "";
    this.draw();
  }

  draw() {
    render(
      this.root,
      h(
        "dialog",
        { key: "help", "aria-labelledby": "help-title" },
        h("h2", { id: "help-title" }, "Keys"),
        h("dl", { class: "keys" }, KEYS.map(([key, text]) => h("div", {}, h("dt", {}, h("kbd", {}, key)), h("dd", {}, text)))),
        h("p", { class: "muted" }, "Times are in UTC. This page changes nothing: it shows the commands that do."),
        h("form", { method: "dialog" }, h("button", {}, "Close")),
      ),
      h(
        "dialog",
        { key: "token", "aria-labelledby": "token-title" },
        h("h2", { id: "token-title" }, "A token, please"),
        h("p", {}, `The server says: ${format.line(this.reason)}`),
        h("p", {}, "It shows what your Kubernetes account may read. A token of a service account that may get pods:"),
        h("p", {}, h("code", { class: "command", tabindex: 0 }, "kubectl create token NAME --namespace NAMESPACE")),
        h("p", {}, "Your own, where your kubeconfig has one:"),
        h("p", {}, h("code", { class: "command", tabindex: 0 }, "kubectl config view --minify --raw -o jsonpath='{.users[0].user.token}'")),
        h(
          "form",
          { method: "dialog", onsubmit: () => this.submit() },
          h("label", {}, "token", h("input", { type: "password", id: "token", autocomplete: "off", spellcheck: "false" })),
          h("p", { class: "muted" }, "It stays in this tab, and is gone when you close it."),
          h("button", { value: "ok" }, "Use it"),
        ),
      ),
    );
    [this.helpDialog, this.tokenDialog] = this.root.children;
  }

  open() {
    return this.helpDialog.open || this.tokenDialog.open;
  }

  help() {
    if (!this.open()) this.helpDialog.showModal();
  }

  askToken(reason) {
    if (this.tokenDialog.open) return;
    this.reason = reason;
    this.draw();
    this.tokenDialog.showModal();
  }

  submit() {
    const input = this.root.querySelector("#token");
    const text = input.value.trim();
    input.value = "";
    if (text !== "") this.onToken(text);
  }
}
