// A handoff in a dialog: how its time was spent, then what each rank did from the grant on, by another scale.
const GANTT = {width: 820, left: 110, right: 150, row: 20, bar: 13};

function gantt(room, chart) {
  put(room, "h3", {}, chart.title);
  const height = chart.bars.length * GANTT.row + 20, wide = GANTT.width - GANTT.left - GANTT.right;
  const said = chart.bars.map((bar) => `${bar.label}: ${bar.words}`).join("; ");
  const drawn = put(room, "svg", {class: "gantt", role: "img", "aria-label": said, viewBox: `0 0 ${GANTT.width} ${height}`});
  const x = (share) => GANTT.left + share * wide;
  chart.ticks.forEach((words, index) => {
    const at = x(index / (chart.ticks.length - 1));
    put(drawn, "line", {class: "floor", x1: at, x2: at, y1: 0, y2: height - 16});
    put(drawn, "text", {class: "soft", x: at, y: height - 3, "text-anchor": "middle"}, words);
  });
  chart.bars.forEach((bar, index) => {
    const y = index * GANTT.row + 2;
    put(drawn, "text", {x: GANTT.left - 8, y: y + 11, "text-anchor": "end"}, bar.label);
    const span = put(drawn, "rect", {class: `${bar.kind}${bar.over ? "" : " open"}`, x: x(bar.begin), y, rx: 2, width: Math.max(1.5, x(bar.end) - x(bar.begin)), height: GANTT.bar});
    put(span, "title", {}, `${bar.label}: ${bar.words}`);
    put(drawn, "text", {x: x(bar.end) + 6, y: y + 11}, bar.words);
  });
}

function showHandoff(dialog, handoff) {
  const scrolled = dialog.scrollTop;
  dialog.replaceChildren();
  const first = put(dialog, "div", {class: "first"});
  put(first, "h2", {id: "handoff-title"}, handoff.id);
  put(first, "button", {type: "button"}, "Close").addEventListener("click", () => dialog.close());
  for (const part of [handoff, ...handoff.deliveries]) {
    state(put(dialog, "p"), part.state);
    for (const [words, kind] of part.about) put(dialog, "p", {class: kind}, words);
    for (const chart of part.charts) gantt(dialog, chart);
    const body = put(put(dialog, "table"), "tbody");
    for (const [at, event, detail] of part.timeline) {
      const line = put(body, "tr");
      for (const [kind, words] of [["number", `${at} ms`], ["", event], ["", detail]]) put(line, "td", {class: kind}, words);
    }
  }
  dialog.scrollTop = scrolled;
}

async function lookAtHandoff() {
  const dialog = byId("handoff"), id = view.get("handoff");
  if (id === null) {
    if (dialog.open) dialog.close();
    return;
  }
  const asked = new URLSearchParams({id, tenant: view.get("of") || "default"});
  const answer = await fetch(`handoff.json?${asked}`, {cache: "no-store"});
  if (view.get("handoff") !== id) return;  // another handoff is wanted by now, or none
  const held = dialog.contains(document.activeElement);
  if (answer.ok) showHandoff(dialog, await answer.json());
  else {
    dialog.replaceChildren();
    put(dialog, "h2", {id: "handoff-title"}, id);
    put(dialog, "p", {class: "bad"}, "The broker does not know it, or not any more.");
    put(dialog, "button", {type: "button"}, "Close").addEventListener("click", () => dialog.close());
  }
  if (!dialog.open) dialog.showModal();
  else if (held) dialog.querySelector("button").focus();
}
