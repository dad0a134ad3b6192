// Functions with which all parts draw. Engines choose their names, which go into text nodes and attributes, and never into markup.
const SVG = "http://www.w3.org/2000/svg";
const LIVE = ["WAITING", "READY", "STAGING", "READING"];
const DOTS = {DONE: "--good", FAILED: "--bad", EXPIRED: "--warn", CANCELLED: "--WAITING"};

function put(parent, tag, attributes = {}, text = "") {
  const made = parent.namespaceURI === SVG || tag === "svg"
    ? document.createElementNS(SVG, tag) : document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
  if (text !== "") made.textContent = text;
  parent.append(made);
  return made;
}

function byId(id) { return document.getElementById(id); }

function clear(id) {
  const element = byId(id);
  element.replaceChildren();
  return element;
}

function say(id, words) {
  // A text that stays the same is left alone, so that a screen reader does not begin again.
  const element = byId(id);
  if (element.textContent !== words) element.textContent = words;
}

function short(text, most) { return text.length > most ? `${text.slice(0, most - 1)}…` : text; }

function state(cell, name) {
  const mark = put(cell, "span", {class: "state"}, name);
  mark.style.setProperty("--dot", `var(${DOTS[name] || `--${name}`})`);
}

function figures(now) {
  const list = clear("figures");
  for (const [title, text, bad] of now.figures) {
    const box = put(list, "div");
    put(box, "dt", {}, title);
    put(box, "dd", bad ? {class: "bad"} : {}, text);
  }
}
