// Time series: each chart is drawn anew from at most 90 steps. A pointer, or the arrow keys, choose a step in all of them.
const CHART = {width: 300, height: 76};
const CHARTS = [
  {id: "ended", title: "handoffs ended a second", lines: [["", (s) => s.ends]], words: (v) => `${v.toFixed(1)}/s`},
  {id: "bytes", title: "bytes read a second", lines: [["", (s) => s.rate]], words: rate},
  {id: "transfer", title: "grant to end (log)", log: true, lines: [["p50", (s) => s.p50_s], ["p99", (s) => s.p99_s]], words: duration},
  {id: "failures", title: "failed or expired", bars: true, lines: [["", (s) => s.failed]], words: (v) => String(v)},
];
let chosen = null, chartSteps = [];

function stepsOf(now) {
  const {step_s: stepS, steps} = now.traffic;
  // The last step is not over: its rates are those of the time that it has had.
  const last = Math.max(now.now_s % stepS, stepS / 2);
  return steps.map((step, index) => {
    const seconds = index === steps.length - 1 ? last : stepS;
    return {...step, ago_s: (steps.length - 1 - index) * stepS, ends: (step.done + step.failed + step.cancelled) / seconds, rate: step.bytes / seconds};
  });
}

function charts(now) {
  chartSteps = stepsOf(now);
  const room = byId("charts"), slots = Math.round(900 / now.traffic.step_s);
  for (const one of CHARTS) {
    const made = byId(`chart-${one.id}`) || chart(room, one);
    plot(made.querySelector("svg"), one, slots);
  }
  say("traffic-note", `in steps of ${now.traffic.step_s} s${now.tenant === null ? "" : `, of tenant ${now.tenant}`}`);
  readouts();
}

function chart(room, one) {
  const made = put(room, "figure", {id: `chart-${one.id}`}), caption = put(made, "figcaption");
  put(caption, "span", {}, one.title);
  put(caption, "output");
  const drawn = put(made, "svg", {class: "chart", role: "img", tabindex: 0, viewBox: `0 0 ${CHART.width} ${CHART.height}`, preserveAspectRatio: "none"});
  const axis = put(made, "div", {class: "axis", "aria-hidden": "true"});
  for (const words of ["15 min ago", "most", "now"]) put(axis, "span", {}, words);
  drawn.addEventListener("pointermove", (event) => {
    const box = drawn.getBoundingClientRect(), slots = Number(drawn.dataset.slots);
    choose(chartSteps.length - slots + Math.floor((event.clientX - box.left) / box.width * slots));
  });
  drawn.addEventListener("pointerleave", () => choose(null));
  drawn.addEventListener("blur", () => choose(null));
  drawn.addEventListener("keydown", (event) => {
    const by = {ArrowLeft: -1, ArrowRight: 1}[event.key];
    if (!by) return;
    event.preventDefault();
    choose(chosen === null ? chartSteps.length - 1 : chosen + by);
  });
  return made;
}

function plot(drawn, one, slots) {
  drawn.replaceChildren();
  drawn.dataset.slots = slots;
  const values = one.lines.map(([, pick]) => chartSteps.map(pick));
  const most = Math.max(0, ...values.flat().filter((v) => v !== null));
  const least = one.log ? Math.min(...values.flat().filter((v) => v !== null)) / 1.5 : 0;
  const share = (v) => (one.log ? Math.log(v / least) / Math.log(most / least) : v / most);
  const wide = CHART.width / slots, first = slots - chartSteps.length;
  const x = (index) => ((first + index + 0.5) * wide).toFixed(1);
  const y = (value) => (CHART.height - 1 - (most ? share(value) : 0) * (CHART.height - 6)).toFixed(1);
  put(drawn, "line", {class: "floor", x1: 0, x2: CHART.width, y1: CHART.height - 0.5, y2: CHART.height - 0.5});
  values.forEach((row, number) => {
    if (one.bars) {
      const bars = row.map((v, i) => (v ? `M${(x(i) - wide * 0.4).toFixed(1)} ${CHART.height}V${y(v)}h${(wide * 0.8).toFixed(1)}V${CHART.height}z` : ""));
      put(drawn, "path", {class: "bars", d: bars.join("")});
      return;
    }
    // Where nothing is known, the line has a gap; a value by itself is a dot.
    let path = "", down = false;
    row.forEach((v, i) => {
      if (v === null) { down = false; return; }
      const alone = !down && (i + 1 >= row.length || row[i + 1] === null);
      path += `${down ? "L" : "M"}${x(i)} ${y(v)}${alone ? "h2.5" : ""}`;
      down = true;
    });
    if (values.length === 1 && row.length) {
      put(drawn, "path", {class: "area", d: `${path}L${x(row.length - 1)} ${CHART.height}L${x(0)} ${CHART.height}z`});
    }
    put(drawn, "path", {class: number ? "second" : "top", d: path});
  });
  put(drawn, "line", {class: "cursor", y1: 0, y2: CHART.height, x1: 0, x2: 0, visibility: "hidden"});
  const said = one.lines.map(([name], n) => `${name} at most ${most && values[n].some((v) => v !== null) ? one.words(Math.max(...values[n].filter((v) => v !== null))) : "nothing"}`);
  drawn.setAttribute("aria-label", `${one.title}, the last quarter of an hour: ${said.join(", ").trim()}`);
  drawn.parentNode.querySelectorAll(".axis span")[1].textContent = most ? `top: ${one.words(most)}` : "";
}

function choose(index) {
  chosen = index === null ? null : Math.min(Math.max(index, 0), chartSteps.length - 1);
  readouts();
}

function readouts() {
  // Of the chosen step; else of the latest one in which anything is known.
  const index = chosen === null ? chartSteps.length - 1 : chosen, step = chartSteps[index];
  if (!step) return;
  for (const one of CHARTS) {
    const figure = byId(`chart-${one.id}`), cursor = figure.querySelector(".cursor");
    const slots = Number(figure.querySelector("svg").dataset.slots);
    const at = (slots - chartSteps.length + index + 0.5) * CHART.width / slots;
    cursor.setAttribute("visibility", chosen === null ? "hidden" : "visible");
    cursor.setAttribute("x1", at);
    cursor.setAttribute("x2", at);
    const latest = (pick) => chartSteps.map(pick).findLast((value) => value !== null) ?? null;
    const words = one.lines.map(([name, pick]) => `${name} ${known(chosen === null ? latest(pick) : pick(step), one.words)}`.trim()).join("  ");
    figure.querySelector("output").textContent = chosen === null ? words : `${words}, ${step.ago_s ? `${duration(step.ago_s)} ago` : "now"}`;
  }
}
