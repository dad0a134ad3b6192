// What all parts draw with. Names are what engines call themselves: they go into text nodes and attributes, and never into markup.
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
  const found = byId(id);
  found.replaceChildren();
  return found;
}

function say(id, words) {
  // A text that stays the same is left alone: whoever reads it aloud need not begin again.
  const found = byId(id);
  if (found.textContent !== words) found.textContent = words;
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
