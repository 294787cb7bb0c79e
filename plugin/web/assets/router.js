// Addresses: `#/`, `#/gpu/NODE/UUID`, `#/pod/NAMESPACE/POD`, `#/allocation/ID`, `#/namespaces`, each with a query part.

const encode = (text) => encodeURIComponent(typeof text.toWellFormed === "function" ? text.toWellFormed() : text);

function decode(text) {
  try {
    return decodeURIComponent(text);
  } catch {
    return text;
  }
}

/** The view and its parts of an address. */
export function parse(hash) {
  const text = hash.replace(/^#/, "");
  const at = text.indexOf("?");
  const path = at < 0 ? text : text.slice(0, at);
  const query = new URLSearchParams(at < 0 ? "" : text.slice(at + 1));
  const [view = "", ...rest] = path.replace(/^\//, "").split("/").map(decode);
  return { view, rest, query };
}

/** An address. */
export function link(parts, query) {
  const pairs = Object.entries(query ?? {}).filter(([, value]) => value !== "" && value !== null && value !== undefined);
  const tail = pairs.length > 0 ? `?${pairs.map(([name, value]) => `${name}=${encode(String(value))}`).join("&")}` : "";
  return `#/${parts.map(encode).join("/")}${tail}`;
}

/** The address of a GPU. */
export const gpuLink = (node, uuid, query) => link(["gpu", node, uuid], query);

/** The address of a tenant's pod; of the allocation, while kubelet has not named a pod. */
export function podLink(node, tenant) {
  return tenant.pod === "" ? link(["allocation", tenant.id], { node }) : link(["pod", tenant.namespace, tenant.pod], { node });
}

/** Changes the query part of the address that is shown, without a step back for each letter. */
export function setQuery(changes) {
  const { view, rest, query } = parse(location.hash);
  for (const [name, value] of Object.entries(changes)) {
    if (value === "" || value === null || value === undefined) query.delete(name);
    else query.set(name, value);
  }
  const next = link(view === "" ? [] : [view, ...rest], Object.fromEntries(query));
  history.replaceState(null, "", next);
  dispatchEvent(new HashChangeEvent("hashchange"));
}
