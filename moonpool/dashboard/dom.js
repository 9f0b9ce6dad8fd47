// Builds elements, and brings a shown tree to the state of a new one without losing focus or scroll positions.
// Styles are set through the CSSOM: the page's Content-Security-Policy forbids style attributes in markup.

const SVG = "http://www.w3.org/2000/svg";
const HANDLERS = ["onclick", "onkeydown", "oninput", "onsubmit", "onchange", "onpointermove", "onpointerleave"];

function build(element, attributes, children) {
  for (const [name, value] of Object.entries(attributes || {})) {
    if (value === null || value === undefined || value === false) continue;
    if (name === "style") for (const [key, text] of Object.entries(value)) element.style.setProperty(key, text);
    else if (name.startsWith("on")) element[name] = value;
    else if (name === "value" || name === "checked" || name === "disabled") element[name] = value;
    else element.setAttribute(name, value === true ? "" : value);
  }
  for (const child of children.flat(Infinity)) {
    if (child === null || child === undefined || child === false) continue;
    element.append(child instanceof Node ? child : document.createTextNode(String(child)));
  }
  return element;
}

export const h = (tag, attributes, ...children) => build(document.createElement(tag), attributes, children);
export const s = (tag, attributes, ...children) => build(document.createElementNS(SVG, tag), attributes, children);

// Makes `shown` equal to `wanted`, which is not used afterwards. Elements with data-keep are left alone.
export function morph(shown, wanted) {
  if (shown.nodeType !== wanted.nodeType || shown.nodeName !== wanted.nodeName) {
    shown.replaceWith(wanted);
    return;
  }
  if (shown.nodeType !== Node.ELEMENT_NODE) {
    if (shown.nodeValue !== wanted.nodeValue) shown.nodeValue = wanted.nodeValue;
    return;
  }
  if (shown.hasAttribute("data-keep") && wanted.hasAttribute("data-keep")) return;
  for (const { name } of [...shown.attributes])
    if (name !== "style" && !wanted.hasAttribute(name)) shown.removeAttribute(name);
  for (const { name, value } of wanted.attributes)
    if (name !== "style" && shown.getAttribute(name) !== value) shown.setAttribute(name, value);
  if (shown.style.cssText !== wanted.style.cssText) shown.style.cssText = wanted.style.cssText;
  for (const name of HANDLERS) if (shown[name] !== wanted[name]) shown[name] = wanted[name];
  if ("disabled" in shown && shown.disabled !== wanted.disabled) shown.disabled = wanted.disabled;
  const old = [...shown.childNodes], fresh = [...wanted.childNodes];
  fresh.forEach((child, at) => (at < old.length ? morph(old[at], child) : shown.append(child)));
  old.slice(fresh.length).forEach((child) => child.remove());
}

// Shows these children in `root`.
export function show(root, ...children) {
  const wanted = root.cloneNode(false);
  build(wanted, {}, children);
  morph(root, wanted);
}
