// A map of P by D: how fast handoffs were read, how many, and how many failed. Those of most bytes have rows and columns.
const MOST_P = 24, MOST_D = 12;

function pairs(now, wanted) {
  const all = now.traffic.pairs.filter((p) => wanted([p.source, p.destination]));
  const first = (pick, most) => [...new Set(all.map(pick))].slice(0, most).sort();
  const rows = first((p) => p.source, MOST_P), columns = first((p) => p.destination, MOST_D);
  const found = new Map(all.map((p) => [JSON.stringify([p.source, p.destination]), p]));
  const table = clear("pairs");
  const shown = all.filter((p) => rows.includes(p.source) && columns.includes(p.destination)).length;
  const more = all.length - shown + now.traffic.pairs_left_out;
  say("pairs-note", `what ended in the last quarter of an hour${more ? `; ${more} more pairs: restow top` : ""}`);
  if (!all.length) {
    put(put(put(table, "tbody"), "tr"), "td", {class: "soft"}, now.traffic.pairs.length ? "None has such a name." : "Nothing has been handed over lately.");
    return;
  }
  const head = put(put(table, "thead"), "tr"), body = put(table, "tbody");
  put(head, "th", {scope: "col"}, "P \\ D");
  for (const name of columns) put(head, "th", {scope: "col", title: name}, short(name, 24));
  const most = Math.max(1, ...all.map((p) => p.bytes));
  for (const source of rows) {
    const line = put(body, "tr");
    put(line, "th", {scope: "row", title: source}, short(source, 24));
    for (const destination of columns) pairCell(line, found.get(JSON.stringify([source, destination])), most);
  }
}

function pairCell(line, pair, most) {
  if (!pair) {
    put(line, "td", {class: "soft"}, "–");
    return;
  }
  const words = `${pair.source} to ${pair.destination}: ${size(pair.bytes)} read, p50 ${known(pair.p50_s, duration)}, p99 ${known(pair.p99_s, duration)}`;
  const cell = put(line, "td", {title: words});
  cell.style.setProperty("--share", pair.bytes / most);
  put(cell, "b", {}, known(pair.bytes_per_s, rate));
  put(cell, "span", {}, `${pair.done} done, p99 ${known(pair.p99_s, duration)}`);
  if (pair.failed) put(cell, "span", {class: "bad"}, `${pair.failed} failed`);
}
