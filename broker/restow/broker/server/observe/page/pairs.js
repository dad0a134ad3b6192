// A map of P by D: how fast handoffs were read, how many, and how many failed. The engines of most bytes have rows and columns.
const MOST_P = 24, MOST_D = 12;

function pairs(now, wanted) {
  const all = now.pairs.filter((p) => wanted([p.from, p.to]));
  const first = (pick, most) => [...new Set(all.map(pick))].slice(0, most).sort();
  const rows = first((p) => p.from, MOST_P), columns = first((p) => p.to, MOST_D);
  const byNames = new Map(all.map((p) => [JSON.stringify([p.from, p.to]), p]));
  const table = clear("pairs");
  const shown = all.filter((p) => rows.includes(p.from) && columns.includes(p.to)).length;
  const more = all.length - shown + now.pairs_left_out;
  say("pairs-note", `what ended in the last quarter of an hour${more ? `; ${more} more pairs: restow top` : ""}`);
  if (!all.length) {
    put(put(put(table, "tbody"), "tr"), "td", {class: "soft"}, now.pairs.length ? "No pair matches the filter." : "Nothing has been handed over lately.");
    return;
  }
  const head = put(put(table, "thead"), "tr"), body = put(table, "tbody");
  put(head, "th", {scope: "col"}, "P \\ D");
  for (const name of columns) put(head, "th", {scope: "col", title: name}, short(name, 24));
  const most = Math.max(1, ...all.map((p) => p.bytes));
  for (const source of rows) {
    const line = put(body, "tr");
    put(line, "th", {scope: "row", title: source}, short(source, 24));
    for (const destination of columns) pairCell(line, byNames.get(JSON.stringify([source, destination])), most);
  }
}

function pairCell(line, pair, most) {
  if (!pair) {
    put(line, "td", {class: "soft"}, "-");
    return;
  }
  const cell = put(line, "td", {title: `${pair.from} to ${pair.to}: ${pair.read} read, p50 ${pair.p50}, p99 ${pair.p99}`});
  cell.style.setProperty("--share", pair.bytes / most);
  put(cell, "b", {}, pair["reads at"]);
  put(cell, "span", {}, `${pair.done} done, p99 ${pair.p99}`);
  if (pair.failed !== "-") put(cell, "span", {class: "bad"}, `${pair.failed} failed`);
}
