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

function figures(now, before) {
  const ready = now.engines_ready, engines = now.engines.length + now.engines_left_out;
  const total = Object.values(now.ended).reduce((a, b) => a + b, 0), failed = now.ended.FAILED + now.ended.EXPIRED;
  const same = before !== null && before.epoch === now.epoch && before.tenant === now.tenant && now.now_s > before.now_s;
  const change = (value, was) => (same ? (value - was) / (now.now_s - before.now_s) : null);
  const ends = change(total, same ? before.total : 0), bytes = change(now.bytes_read, same ? before.bytes : 0);
  const list = clear("figures");
  const all = [
    ["engines ready", `${ready} of ${engines}`, ready < engines],
    ["agents", now.agents, false],
    ["under way", now.live, false],
    ["ended a second", known(ends, (value) => value.toFixed(1)), false],
    ["read a second", known(bytes, size), false],
    ["done", now.ended.DONE, false],
    ["failed or expired", failed, failed > 0],
    ["in quarantine", now.quarantined, now.quarantined > 0],
  ];
  for (const [name, value, bad] of all) {
    const box = put(list, "div");
    put(box, "dt", {}, name);
    put(box, "dd", bad ? {class: "bad"} : {}, String(value));
  }
  return {epoch: now.epoch, tenant: now.tenant, now_s: now.now_s, total, bytes: now.bytes_read};
}
