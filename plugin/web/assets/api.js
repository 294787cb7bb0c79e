// Requests to the server that this page came from. The token and the namespace stay in this tab.

const KEY = "tessera-token";
const NAMESPACE = "tessera-namespace";

/** The token that the reader gave; empty for none. */
export const token = () => sessionStorage.getItem(KEY) ?? "";

/** Keeps a token for as long as this tab is open; an empty one drops it. */
export const keepToken = (text) => keep(KEY, text);

/** The one namespace that the reader asks for; empty for all. */
export const namespace = () => sessionStorage.getItem(NAMESPACE) ?? "";

/** Keeps the namespace for as long as this tab is open; an empty one drops it. */
export const keepNamespace = (text) => keep(NAMESPACE, text);

function keep(name, text) {
  if (text === "") sessionStorage.removeItem(name);
  else sessionStorage.setItem(name, text);
}

/** An answer that is no success: `message` says what is wrong, `status` is HTTP's. */
export class ApiError extends Error {
  constructor(status, message) {
    super(message);
    this.status = status;
  }
}

/** Asks; the caller reads the body. */
export async function ask(path, { accept = "application/json", signal } = {}) {
  const headers = { accept };
  // The API server's proxy keeps `Authorization` for itself.
  if (token() !== "") {
    headers.authorization = `Bearer ${token()}`;
    headers["tessera-authorization"] = headers.authorization;
  }
  let response;
  try {
    response = await fetch(path, { headers, signal, cache: "no-store", credentials: "same-origin" });
  } catch (error) {
    if (signal?.aborted) throw error;
    throw new ApiError(0, "the server does not answer");
  }
  if (response.ok) return response;
  let message = `the server answers ${response.status}`;
  try {
    message = (await response.json()).error ?? message;
  } catch {
    // Somebody between us and the server, who speaks no JSON.
  }
  if (response.status === 401) dispatchEvent(new CustomEvent("tessera-token", { detail: message }));
  throw new ApiError(response.status, message);
}

/** A path of the API, with the namespace that the reader asks for. */
export function path(name, query = {}) {
  const given = Object.entries({ namespace: namespace(), ...query }).filter(([, value]) => value !== "" && value !== undefined);
  // Relative to the page, which may stand behind a proxy's path.
  return `api/v1/${name}?${new URLSearchParams(given)}`;
}

/** Asks for JSON. */
export const json = async (name, query = {}, signal = undefined) => (await ask(path(name, query), { signal })).json();

/** Asks for text. */
export const text = async (name, query = {}, signal = undefined) =>
  (await ask(path(name, query), { accept: "text/plain", signal })).text();
