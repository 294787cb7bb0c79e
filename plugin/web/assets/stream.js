// Server-sent events over fetch, because an EventSource sends no Authorization header.

import { ask, path } from "./api.js";

/** Cuts a stream of text into events. Pieces are kept apart until a line ends, because one line may be megabytes. */
export class Events {
  constructor(take) {
    this.take = take;
    this.pieces = [];
    this.reset();
  }

  reset() {
    this.event = "message";
    this.data = [];
  }

  push(text) {
    let from = 0;
    for (;;) {
      const end = text.indexOf("\n", from);
      if (end < 0) break;
      this.pieces.push(text.slice(from, end));
      const line = this.pieces.join("");
      this.pieces = [];
      this.line(line.endsWith("\r") ? line.slice(0, -1) : line);
      from = end + 1;
    }
    if (from < text.length) this.pieces.push(text.slice(from));
  }

  line(line) {
    if (line === "") {
      if (this.data.length > 0) this.take(this.event, this.data.length === 1 ? this.data[0] : this.data.join("\n"));
      this.reset();
      return;
    }
    const colon = line.indexOf(":");
    if (colon === 0) return;
    const name = colon < 0 ? line : line.slice(0, colon);
    let value = colon < 0 ? "" : line.slice(colon + 1);
    if (value.startsWith(" ")) value = value.slice(1);
    if (name === "event") this.event = value;
    else if (name === "data") this.data.push(value);
  }
}

/** Longer than two of the server's comments: a connection that is silent for so long is dead. */
const SILENCE_MS = 40_000;
const RETRY_MS = [500, 1000, 2000, 5000];

/** Follows the server for ever: `onEvent(name, data)`, and `onState({live, since, why, status})`, `status` as HTTP has it. */
export function follow(onEvent, onState) {
  let failures = 0;
  let controller = null;
  let timer = 0;
  let lostSince = 0;

  const lost = (why, status = 0) => {
    lostSince ||= Date.now();
    onState({ live: false, since: lostSince, why, status });
    const wait = RETRY_MS[Math.min(failures, RETRY_MS.length - 1)];
    failures += 1;
    timer = setTimeout(run, wait);
  };

  async function run() {
    timer = 0;
    controller = new AbortController();
    let silence = 0;
    const heard = () => {
      clearTimeout(silence);
      silence = setTimeout(() => controller.abort(), SILENCE_MS);
    };
    try {
      heard();
      const response = await ask(path("stream"), { accept: "text/event-stream", signal: controller.signal });
      const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
      const events = new Events((name, data) => {
        onEvent(name, data);
        if (name === "error") return;
        lostSince = 0;
        failures = 0;
        onState({ live: true, since: 0, why: "", status: 200 });
      });
      for (;;) {
        const { done, value } = await reader.read();
        if (done) break;
        heard();
        events.push(value);
      }
      lost("the server ended the connection");
    } catch (error) {
      lost(error.status === undefined ? "the connection broke" : error.message, error.status);
    } finally {
      clearTimeout(silence);
    }
  }

  run();
  return {
    /** Asks again at once. */
    again() {
      if (timer === 0) return controller?.abort();
      clearTimeout(timer);
      run();
    },
  };
}
