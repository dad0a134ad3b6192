// One handoff in a dialog: how its time was spent, then what each rank did from the grant on, by a scale of its own.
const GANTT = {width: 820, left: 110, right: 150, row: 20, bar: 13};

function spanName(span) {
  if (span.kind === "stage") return `stage P${span.src_rank} for D${span.rank}`;
  if (span.kind !== "read") return span.kind;
  return span.rank === null ? "read" : `read rank ${span.rank}`;
}

function spanWords(span) {
  const words = duration(span.end_s - span.begin_s);
  if (span.bytes_read !== null) return `${words}, ${size(span.bytes_read)}`;
  if (!span.over) return `${words} so far`;
  return span.kind === "read" ? `${words}, not reported` : words;
}

function gantt(room, spans, begin, end) {
  const height = spans.length * GANTT.row + 20, wide = GANTT.width - GANTT.left - GANTT.right, whole = Math.max(end - begin, 1e-9);
  const said = spans.map((s) => `${spanName(s)} from ${duration(s.begin_s - begin)}: ${spanWords(s)}`).join("; ");
  const drawn = put(room, "svg", {class: "gantt", role: "img", "aria-label": said, viewBox: `0 0 ${GANTT.width} ${height}`});
  const x = (at) => GANTT.left + (at - begin) / whole * wide;
  [0, 0.25, 0.5, 0.75, 1].forEach((part) => {
    const at = GANTT.left + part * wide;
    put(drawn, "line", {class: "floor", x1: at, x2: at, y1: 0, y2: height - 16});
    put(drawn, "text", {class: "soft", x: at, y: height - 3, "text-anchor": "middle"}, duration(part * whole));
  });
  spans.forEach((span, index) => {
    const y = index * GANTT.row + 2;
    put(drawn, "text", {x: GANTT.left - 8, y: y + 11, "text-anchor": "end"}, spanName(span));
    const bar = put(drawn, "rect", {class: `${span.kind}${span.over ? "" : " open"}`, x: x(span.begin_s), y, rx: 2, width: Math.max(1.5, x(span.end_s) - x(span.begin_s)), height: GANTT.bar});
    put(bar, "title", {}, `${spanName(span)}: ${spanWords(span)}`);
    put(drawn, "text", {x: x(span.end_s) + 6, y: y + 11}, spanWords(span));
  });
}

function showOne(dialog, one) {
  const scrolled = dialog.scrollTop;
  dialog.replaceChildren();
  const first = put(dialog, "div", {class: "first"});
  put(first, "h2", {id: "one-title"}, one.handoff_id);
  const close = put(first, "button", {type: "button"}, "Close");
  close.addEventListener("click", () => dialog.close());
  const about = put(dialog, "p");
  state(about, one.state);
  about.append(` from ${one.source || "–"} to ${one.destination || "–"}, ${one.tokens ? `${one.tokens} tokens` : "position not known"}, ${size(one.bytes)} read`);
  if (one.waits_for) put(dialog, "p", {class: "soft"}, `waits: ${one.waits_for}`);
  if (one.ranks) put(dialog, "p", {class: "soft"}, `reads: ${progress(one).text}`);
  if (one.reason) put(dialog, "p", {class: "bad"}, `${one.reason}: ${one.detail}`);
  if (one.next_step) put(dialog, "p", {}, `${one.meaning} Next: ${one.next_step}`);
  const ranks = one.spans.filter((s) => s.rank !== null), phases = one.spans.filter((s) => s.rank === null);
  const granted = phases.at(-1).end_s, ended = Math.max(...one.spans.map((s) => s.end_s));
  if (ranks.length) phases.push({kind: "read", rank: null, src_rank: null, begin_s: granted, end_s: one.lasted_s, over: ranks.every((s) => s.over), bytes_read: one.bytes});
  put(dialog, "h3", {}, `The whole: ${duration(one.lasted_s)}`);
  gantt(dialog, phases, 0, one.lasted_s);
  if (ranks.length) {
    put(dialog, "h3", {}, "From the grant on, by rank");
    gantt(dialog, ranks, granted, ended);
  }
  put(dialog, "h3", {}, "What happened");
  const body = put(put(dialog, "table"), "tbody");
  for (const entry of one.timeline) {
    const line = put(body, "tr");
    for (const [kind, words] of [["number", duration(entry.at_s)], ["", entry.event], ["", entry.detail]]) put(line, "td", {class: kind}, words);
  }
  dialog.scrollTop = scrolled;
}

async function lookAtOne() {
  const dialog = byId("one"), id = view.get("handoff");
  if (id === null) {
    if (dialog.open) dialog.close();
    return;
  }
  const asked = new URLSearchParams({id, tenant: view.get("of") || "default"});
  const answer = await fetch(`handoff.json?${asked}`, {cache: "no-store"});
  if (view.get("handoff") !== id) return;  // another is wanted by now, or none
  const held = dialog.contains(document.activeElement);
  if (answer.ok) showOne(dialog, await answer.json());
  else {
    dialog.replaceChildren();
    put(dialog, "h2", {id: "one-title"}, id);
    put(dialog, "p", {class: "bad"}, "It is not known here, or not any more.");
    put(dialog, "button", {type: "button"}, "Close").addEventListener("click", () => dialog.close());
  }
  if (!dialog.open) dialog.showModal();
  else if (held) dialog.querySelector("button").focus();
}
