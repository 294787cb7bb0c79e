// Descriptions of elements, and the smallest change of the document that makes it so.
// Text becomes text nodes and nothing else; there is no way to hand in markup.

const SVG = "http://www.w3.org/2000/svg";
const known = new WeakMap();

function make(space, tag, props, children) {
  return {
    space,
    tag,
    props: props ?? {},
    children: children.flat(Infinity).filter((c) => c !== null && c !== undefined && c !== false),
  };
}

/** Describes an element of HTML. `key` among `props` names it among its neighbours. */
export function h(tag, props, ...children) {
  return make(null, tag, props, children);
}

/** Describes an element of SVG. */
export function s(tag, props, ...children) {
  return make(SVG, tag, props, children);
}

/** Makes the children of `parent` be as described. */
export function render(parent, ...described) {
  const wanted = described.flat(Infinity).filter((c) => c !== null && c !== undefined && c !== false);
  const keyed = new Map();
  const loose = [];
  for (const node of parent.childNodes) {
    const key = known.get(node)?.key;
    if (key === undefined) loose.push(node);
    else keyed.set(key, node);
  }
  let next = 0;
  const kept = new Set();
  const nodes = wanted.map((one) => {
    let old;
    if (one.tag && one.props.key !== undefined) old = keyed.get(one.props.key);
    else if (next < loose.length) old = loose[next++];
    const node = same(old, one) ? old : create(one);
    kept.add(node);
    update(node, one);
    return node;
  });
  for (const node of [...parent.childNodes]) if (!kept.has(node)) node.remove();
  nodes.forEach((node, i) => {
    const there = parent.childNodes[i];
    if (there !== node) parent.insertBefore(node, there ?? null);
  });
}

function same(node, one) {
  if (!node) return false;
  if (!one.tag) return node.nodeType === Node.TEXT_NODE;
  return known.get(node)?.tag === one.tag && known.get(node)?.space === one.space;
}

function create(one) {
  if (!one.tag) return document.createTextNode("");
  const node = one.space ? document.createElementNS(one.space, one.tag) : document.createElement(one.tag);
  known.set(node, { tag: one.tag, space: one.space, key: one.props.key, props: {} });
  return node;
}

function update(node, one) {
  if (!one.tag) {
    const text = String(one);
    if (node.data !== text) node.data = text;
    return;
  }
  const memory = known.get(node);
  const before = memory.props;
  for (const name of Object.keys(before)) if (!(name in one.props)) set(node, name, null, before[name]);
  for (const [name, value] of Object.entries(one.props)) set(node, name, value, before[name]);
  memory.props = one.props;
  render(node, one.children);
  // A select takes a value only once it has the option.
  if (one.tag === "select") set(node, "value", one.props.value, before.value);
}

function set(node, name, value, before) {
  if (name === "key") return;
  if (name.startsWith("on")) {
    node[name] = value ?? null;
  } else if (name === "style") {
    // By the object model: a policy against inline styles does not concern it.
    for (const part of Object.keys(before ?? {})) if (!(part in (value ?? {}))) node.style.removeProperty(part);
    for (const [part, text] of Object.entries(value ?? {})) {
      if (before?.[part] !== text) node.style.setProperty(part, text);
    }
  } else if ((name === "value" && node.tagName !== "OPTION") || name === "checked" || name === "disabled") {
    if (node[name] !== (value ?? "")) node[name] = value ?? "";
  } else if (name === "href" && value !== null && !String(value).startsWith("#")) {
    throw new Error("links of this page stay on this page");
  } else if (value === null || value === undefined || value === false) {
    if (before !== null && before !== undefined && before !== false) node.removeAttribute(name);
  } else if (value !== before) {
    node.setAttribute(name, value === true ? "" : String(value));
  }
}
