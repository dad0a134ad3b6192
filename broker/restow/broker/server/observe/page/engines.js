// Engines with a dot for each rank, and lines for the handoffs under way between them.
const CARD = {width: 270, height: 54, gap: 14, top: 34};

function sides(now) {
  // Engines that prefill are on the left, engines that decode on the right, others in the middle.
  const sources = new Set(now.pairs.map((p) => p.from)), destinations = new Set(now.pairs.map((p) => p.to));
  const prefills = (e) => e.publishes || sources.has(e.name), decodes = (e) => e.asks || destinations.has(e.name);
  const named = (test) => now.engines.filter(test).map((e) => e.name).sort();
  return [named(prefills), named(decodes), named((e) => !prefills(e) && !decodes(e))];
}

function lost(engine) { return !engine.session || engine.agents.includes(false); }

function card(map, engine, x, y) {
  const group = put(map, "g");
  put(group, "title", {}, [`${engine.name}: ${engine.model}`, engine.held, engine.session ? "" : "no session"].filter(Boolean).join(", "));
  put(group, "rect", {class: lost(engine) ? "engine lost" : "engine", x, y, width: CARD.width, height: CARD.height, rx: 6});
  put(group, "text", {x: x + 12, y: y + 20}, short(engine.name, 34));
  put(group, "text", {class: "soft", x: x + 12, y: y + 36}, short(engine.session ? (engine.keeps ? `store, ${engine.held}` : engine.model) : "no session", 40));
  const most = 24;
  engine.agents.slice(0, most).forEach((there, rank) => {
    const dot = put(group, "circle", {class: there ? "there" : "missing", cx: x + 15 + rank * 10, cy: y + 45, r: 3});
    put(dot, "title", {}, `rank ${rank}: ${there ? "agent connected" : "no agent"}`);
  });
  if (engine.agents.length > most) put(group, "text", {class: "soft", x: x + 15 + most * 10, y: y + 49}, "…");
}

function between(now, from, to) {
  const pairs = new Map();
  const add = (line) => {
    if (!from.has(line.from) || !to.has(line.to)) return {};
    const key = JSON.stringify([line.from, line.to]);
    if (!pairs.has(key)) pairs.set(key, {source: line.from, destination: line.to, counts: {}});
    return pairs.get(key).counts;
  };
  now.pairs.forEach(add);
  for (const line of now.lines) add(line)[line.state] = line.count;
  return [...pairs.values()];
}

function engines(now) {
  const drawn = clear("map"), width = 1120, [left, right, idle] = sides(now);
  const byName = new Map(now.engines.map((e) => [e.name, e]));
  const rows = Math.max(left.length, right.length, idle.length, 1);
  const height = CARD.top + rows * (CARD.height + CARD.gap) + 6;
  drawn.setAttribute("viewBox", `0 0 ${width} ${height}`);
  const missing = now.engines.filter(lost).map((e) => e.name);
  drawn.setAttribute("aria-label", `${now.engines.length} engines: ${left.length} prefill, ${right.length} decode; ` +
    `without a session or an agent: ${missing.join(", ") || "none"}`);
  say("engines-note", now.engines_left_out ? `${now.engines.length} of ${now.engines.length + now.engines_left_out}` : "");
  const middle = (width - CARD.width) / 2, columns = [20, width - 20 - CARD.width, middle];
  ["prefill", "decode", "no handoff yet"].forEach((title, index) => {
    if ([left, right, idle][index].length) put(drawn, "text", {class: "soft", x: columns[index], y: 22}, title);
  });
  if (!now.engines.length) {
    put(drawn, "text", {class: "soft", x: width / 2, y: height / 2 + 14, "text-anchor": "middle"}, "No engine is registered.");
    return;
  }
  const place = (names, x) => new Map(names.map((name, index) => [name, {x, y: CARD.top + index * (CARD.height + CARD.gap)}]));
  const from = place(left, columns[0]), to = place(right, columns[1]), apart = place(idle, columns[2]);
  const labels = [], drawnOf = new Map();
  for (const {source, destination, counts} of between(now, from, to)) {
    const a = from.get(source), b = to.get(destination);
    const x0 = a.x + CARD.width, x1 = b.x, y0 = a.y + CARD.height / 2, y1 = b.y + CARD.height / 2;
    const total = Object.values(counts).reduce((m, n) => m + n, 0);
    const busiest = LIVE.filter((s) => counts[s]).pop();
    const d = `M${x0} ${y0} C${x0 + 180} ${y0} ${x1 - 180} ${y1} ${x1} ${y1}`;
    const line = put(drawn, "path", total ? {d, "stroke-width": 1.5 + Math.min(7, Math.log2(total))} : {d, class: "lately"});
    put(line, "title", {}, `${source} to ${destination}: ${LIVE.filter((s) => counts[s]).map((s) => `${counts[s]} ${s}`).join(", ") || "nothing under way"}`);
    if (!total) continue;
    line.style.stroke = `var(--${busiest})`;
    // Each line of an engine has its label at another place, all of them before lines cross.
    const index = drawnOf.get(source) || 0;
    drawnOf.set(source, index + 1);
    const t = 0.2 + 0.25 * (index / Math.max(1, right.length - 1)), y = y0 + (y1 - y0) * (3 * t * t - 2 * t * t * t), x = x0 + 3 * t * (1 - t) * (1 - t) * 180 + 3 * t * t * (1 - t) * (x1 - x0 - 180) + t * t * t * (x1 - x0);
    labels.push([x, y + 4, String(total)]);
  }
  for (const [x, y, words] of labels) put(drawn, "text", {class: "count", x, y, "text-anchor": "middle"}, words);
  for (const [name, {x, y}] of from) card(drawn, byName.get(name), x, y);
  for (const [name, {x, y}] of apart) card(drawn, byName.get(name), x, y);
  for (const [name, {x, y}] of to) card(drawn, byName.get(name), x, y);
}
