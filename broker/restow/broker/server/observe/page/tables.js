// Tables that are sorted by any column, and whose rows stay the same elements from look to look, so that focus and selection stay.
function sorted(rows, titles, index, falling) {
  const title = titles[index], amount = (row) => row.amounts[title] ?? -Infinity;
  const compare = (a, b) => (title in a.amounts ? amount(a) - amount(b) || 0 : a.texts[index].localeCompare(b.texts[index]));
  const ordered = [...rows].sort(compare);
  return falling ? ordered.reverse() : ordered;
}

const NUMBERS = ["age", "lease", "tokens", "read", "in", "ago"];

function table(id, titles, rows, none) {
  const made = byId(id);
  if (!made.tHead) header(made, id, titles);
  const order = view.get(`sort-${id}`) || "", index = titles.indexOf(order.replace(/^-/, ""));
  [...made.tHead.rows[0].cells].forEach((cell, at) => {
    if (at === index) cell.setAttribute("aria-sort", order.startsWith("-") ? "descending" : "ascending");
    else cell.removeAttribute("aria-sort");
  });
  made.tHead.hidden = !rows.length;
  const body = made.tBodies[0], known_ = new Map([...body.rows].map((line) => [line.dataset.key, line]));
  const wanted = index < 0 ? rows : sorted(rows, titles, index, order.startsWith("-"));
  const keys = new Set(wanted.map((row) => row.key));
  for (const [key, line] of known_) if (!keys.has(key)) line.remove();
  let next = body.firstChild;
  for (const row of wanted) {
    const line = known_.get(row.key) || newLine(row, titles);
    if (line === next) next = next.nextSibling;
    else body.insertBefore(line, next);
    fill(line, row, titles);
  }
  if (!wanted.length) {
    const line = put(body, "tr", {"data-key": ""});
    put(line, "td", {class: "soft"}, none);
  }
}

function kind(title) { return NUMBERS.includes(title) ? "number" : title === "state" ? "is-state" : ""; }

function header(made, id, titles) {
  made.replaceChildren();
  const head = put(put(made, "thead"), "tr");
  for (const title of titles) {
    const button = put(put(head, "th", {class: kind(title), scope: "col"}), "button", {type: "button", title: `sort by ${title}`}, title);
    // The first click sorts up, the second down, the third as the broker does.
    button.addEventListener("click", () => {
      const key = `sort-${id}`, was = view.get(key);
      change({[key]: was === title ? `-${title}` : was === `-${title}` ? null : title});
    });
  }
  put(made, "tbody");
}

function newLine(row, titles) {
  const line = document.createElement("tr");
  line.dataset.key = row.key;
  titles.forEach((title, index) => {
    const cell = put(line, "td", {class: kind(title)});
    if (index === 0) put(cell, "a", {href: "#"});
  });
  return line;
}

function fill(line, row, titles) {
  row.texts.forEach((text, index) => {
    const cell = line.cells[index];
    if (index === 0) {
      const href = `#${changed({handoff: text, of: row.tenant})}`;
      if (cell.firstChild.getAttribute("href") !== href) cell.firstChild.setAttribute("href", href);
    }
    if (cell.textContent === text) return;
    if (titles[index] === "state") { cell.replaceChildren(); state(cell, text); return; }
    if (index === 0) cell.firstChild.textContent = text;
    else cell.textContent = text;
    cell.title = text;
  });
}

function handoffs(now, wanted) {
  for (const [id, told, none] of [["under-way", now.under_way, "Nothing is under way."], ["ends", now.ended, "Nothing has ended yet."]]) {
    const matching = told.rows.filter((row) => wanted(row.texts)), all = told.rows.length;
    say(`${id}-note`, [told.note, matching.length < all ? `${matching.length} of these ${all} match` : ""].filter(Boolean).join("; "));
    table(id, told.titles, matching, all ? "No listed handoff matches the filter." : none);
  }
}
