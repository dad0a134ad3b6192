// Time series: each chart is redrawn from at most 90 steps. A pointer, or the arrow keys, choose a step in all of them.
const CHART = {width: 300, height: 76};
// The broker makes each line, with a text for each of its values.
const CHARTS = [
  {id: "ended", title: "handoffs ended a second", lines: ["ended"]},
  {id: "bytes", title: "bytes read a second", lines: ["read"]},
  {id: "transfer", title: "grant to end (log)", log: true, lines: ["p50", "p99"]},
  {id: "failures", title: "failed or expired", bars: true, lines: ["failed"]},
];
let chosen = null, traffic = null;

function charts(now) {
  traffic = now.traffic;
  const room = byId("charts"), slots = Math.round(900 / traffic.step_s);
  for (const spec of CHARTS) {
    const made = byId(`chart-${spec.id}`) || chart(room, spec);
    plot(made.querySelector("svg"), spec, slots);
  }
  say("traffic-note", `in steps of ${traffic.step_s} s${now.tenant === null ? "" : `, of tenant ${now.tenant}`}`);
  readouts();
}

function chart(room, spec) {
  const made = put(room, "figure", {id: `chart-${spec.id}`}), caption = put(made, "figcaption");
  put(caption, "span", {}, spec.title);
  put(caption, "output");
  const drawn = put(made, "svg", {class: "chart", role: "img", tabindex: 0, viewBox: `0 0 ${CHART.width} ${CHART.height}`, preserveAspectRatio: "none"});
  const axis = put(made, "div", {class: "axis", "aria-hidden": "true"});
  for (const words of ["15 min ago", "most", "now"]) put(axis, "span", {}, words);
  drawn.addEventListener("pointermove", (event) => {
    const box = drawn.getBoundingClientRect(), slots = Number(drawn.dataset.slots);
    choose(traffic.ago.length - slots + Math.floor((event.clientX - box.left) / box.width * slots));
  });
  drawn.addEventListener("pointerleave", () => choose(null));
  drawn.addEventListener("blur", () => choose(null));
  drawn.addEventListener("keydown", (event) => {
    const by = {ArrowLeft: -1, ArrowRight: 1}[event.key];
    if (!by) return;
    event.preventDefault();
    choose(chosen === null ? traffic.ago.length - 1 : chosen + by);
  });
  return made;
}

function plot(drawn, spec, slots) {
  drawn.replaceChildren();
  drawn.dataset.slots = slots;
  const lines = spec.lines.map((name) => traffic.lines[name]), values = lines.map((line) => line.values);
  const most = Math.max(0, ...values.flat().filter((v) => v !== null));
  const least = spec.log ? Math.min(...values.flat().filter((v) => v !== null)) / 1.5 : 0;
  const share = (v) => (spec.log ? Math.log(v / least) / Math.log(most / least) : v / most);
  const wide = CHART.width / slots, first = slots - traffic.ago.length;
  const x = (index) => ((first + index + 0.5) * wide).toFixed(1);
  const y = (value) => (CHART.height - 1 - (most ? share(value) : 0) * (CHART.height - 6)).toFixed(1);
  put(drawn, "line", {class: "floor", x1: 0, x2: CHART.width, y1: CHART.height - 0.5, y2: CHART.height - 0.5});
  values.forEach((row, number) => {
    if (spec.bars) {
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
  const said = spec.lines.map((name, n) => `${name} ${lines[n].top}`).join(", ");
  drawn.setAttribute("aria-label", `${spec.title}, the last quarter of an hour: ${said}`);
  drawn.parentNode.querySelectorAll(".axis span")[1].textContent = most ? lines[lines.length - 1].top : "";
}

function choose(index) {
  chosen = index === null ? null : Math.min(Math.max(index, 0), traffic.ago.length - 1);
  readouts();
}

function readouts() {
  // Show the chosen step, or else the latest step in which anything is known.
  const count = traffic.ago.length, index = chosen === null ? count - 1 : Math.min(chosen, count - 1);
  if (!count) return;
  for (const spec of CHARTS) {
    const figure = byId(`chart-${spec.id}`), cursor = figure.querySelector(".cursor");
    const slots = Number(figure.querySelector("svg").dataset.slots);
    const at = (slots - count + index + 0.5) * CHART.width / slots;
    cursor.setAttribute("visibility", chosen === null ? "hidden" : "visible");
    cursor.setAttribute("x1", at);
    cursor.setAttribute("x2", at);
    const texts = spec.lines.map((name) => {
      const {values, texts} = traffic.lines[name];
      const step = chosen === null ? values.findLastIndex((value) => value !== null) : index;
      return `${spec.lines.length > 1 ? name : ""} ${texts[step] || "-"}`.trim();
    });
    const ago = chosen === null ? "" : index === count - 1 ? ", now" : `, ${traffic.ago[index]} ago`;
    figure.querySelector("output").textContent = texts.join("  ") + ago;
  }
}
