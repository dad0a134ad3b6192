// Tables that are sorted by any column, and whose rows stay the same elements from look to look, so that focus and selection stay.
function cellText(value) { return typeof value === "object" ? value.text : value; }
function cellValue(value) { return typeof value === "object" ? value.by : value; }
function by(amount, words) { return {text: known(amount, words), by: amount ?? -Infinity}; }

function sorted(rows, index, falling) {
  const compare = (a, b) => (typeof a === "number" && typeof b === "number" ? a - b : String(a).localeCompare(String(b)));
  const found = [...rows].sort((a, b) => compare(cellValue(a.cells[index]), cellValue(b.cells[index])));
  return falling ? found.reverse() : found;
}

function table(id, columns, rows, none) {
  const made = byId(id);
  if (!made.tHead) header(made, id, columns);
  const order = view.get(`sort-${id}`) || "", index = columns.findIndex(([name]) => name === order.replace(/^-/, ""));
  [...made.tHead.rows[0].cells].forEach((cell, at) => {
    if (at === index) cell.setAttribute("aria-sort", order.startsWith("-") ? "descending" : "ascending");
    else cell.removeAttribute("aria-sort");
  });
  made.tHead.hidden = !rows.length;
  const body = made.tBodies[0], known_ = new Map([...body.rows].map((line) => [line.dataset.key, line]));
  const wanted = index < 0 ? rows : sorted(rows, index, order.startsWith("-"));
  const keys = new Set(wanted.map((row) => row.key));
  for (const [key, line] of known_) if (!keys.has(key)) line.remove();
  let next = body.firstChild;
  for (const row of wanted) {
    const line = known_.get(row.key) || newLine(row, columns);
    if (line === next) next = next.nextSibling;
    else body.insertBefore(line, next);
    fill(line, row, columns);
  }
  if (!wanted.length) {
    const line = put(body, "tr", {"data-key": ""});
    put(line, "td", {class: "soft"}, none);
  }
}

function header(made, id, columns) {
  made.replaceChildren();
  const head = put(put(made, "thead"), "tr");
  for (const [name, kind] of columns) {
    const button = put(put(head, "th", {class: kind, scope: "col"}), "button", {type: "button", title: `sort by ${name}`}, name);
    // Once up, once down, then as the broker has them.
    button.addEventListener("click", () => {
      const key = `sort-${id}`, was = view.get(key);
      change({[key]: was === name ? `-${name}` : was === `-${name}` ? null : name});
    });
  }
  put(made, "tbody");
}

function newLine(row, columns) {
  const line = document.createElement("tr");
  line.dataset.key = row.key;
  columns.forEach(([, kind], index) => {
    const cell = put(line, "td", {class: kind});
    if (index === 0) put(cell, "a", {href: "#"});
  });
  return line;
}

function fill(line, row, columns) {
  row.cells.forEach((value, index) => {
    const cell = line.cells[index], text = String(cellText(value));
    if (index === 0) {
      const href = `#${changed({handoff: row.id, of: row.tenant})}`;
      if (cell.firstChild.getAttribute("href") !== href) cell.firstChild.setAttribute("href", href);
    }
    if (cell.textContent === text) return;
    if (columns[index][1] === "is-state") { cell.replaceChildren(); state(cell, text); return; }
    if (index === 0) cell.firstChild.textContent = text;
    else cell.textContent = text;
    cell.title = text;
  });
}

function progress(handoff) {
  if (!handoff.ranks) return by(null);
  const words = `${size(handoff.bytes)} of ${size(handoff.expected_bytes)}`;
  return {text: handoff.ranks > 1 ? `${words}, ${handoff.settled_ranks} of ${handoff.ranks} ranks` : words, by: handoff.bytes};
}

function handoffs(now, wanted) {
  const texts = (h) => [h.handoff_id, h.state, h.source || "", h.destination || "", h.reason || "", h.waits_for || ""];
  // A publication, and each of its deliveries, has a line of its own under one id.
  const to = (h) => h.destination || (h.readers ? `${h.delivered} of ${h.readers} readers` : "–");
  const row = (h, more) => ({key: JSON.stringify([h.tenant, h.handoff_id, h.readers ? "" : h.number]), id: h.handoff_id, tenant: h.tenant, cells: [h.handoff_id, h.state, h.source || "–", to(h), ...more]});
  const live = now.handoffs.filter((h) => wanted(texts(h))), ends = now.ends.filter((h) => wanted(texts(h)));
  const left = now.live - now.handoffs.length;
  const of = (found, listed) => (found.length < listed.length ? `${found.length} of these ${listed.length} match` : "");
  say("under-way-note", [left > 0 ? `the oldest ${now.handoffs.length} of ${now.live}` : "", of(live, now.handoffs)].filter(Boolean).join("; "));
  say("ends-note", of(ends, now.ends));
  table("under-way",
    [["handoff", ""], ["state", "is-state"], ["from", ""], ["to", ""], ["tokens", "number"], ["age", "number"], ["lease", "number"], ["read", ""], ["waits for", ""]],
    live.map((h) => row(h, [by(h.tokens, String), by(h.age_s, duration), by(h.lease_s, duration), progress(h), h.waits_for])),
    now.handoffs.length ? "None of those listed matches." : "Nothing is under way.");
  table("ends",
    [["handoff", ""], ["state", "is-state"], ["from", ""], ["to", ""], ["read", "number"], ["in", "number"], ["by", ""], ["ago", "number"], ["reason", ""]],
    ends.map((h) => row(h, [by(h.bytes, size), by(h.transfer_s, duration), h.strategies.join(", "), by(h.ago_s, duration), h.reason ? `${h.reason}: ${h.detail}` : ""])),
    now.ends.length ? "None of those listed matches." : "Nothing has ended yet.");
}
