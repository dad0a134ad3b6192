// The view stands in the address behind the #, so that it can be kept and sent on.
const LOOK_MS = 1000;
let view = new URLSearchParams(location.hash.slice(1)), seen = null, paused = false, waiting = null, looking = false, wantsOther = false;

function changed(more) {
  const other = new URLSearchParams(view);
  for (const [name, value] of Object.entries(more)) {
    if (value === null || value === "") other.delete(name);
    else other.set(name, value);
  }
  return other;
}

function change(more) {
  view = changed(more);
  history.replaceState(null, "", `#${view}`);
  if (seen) show(seen);
}

function wanted(texts) {
  const words = (view.get("filter") || "").toLowerCase().split(/\s+/).filter(Boolean), all = texts.join(" ").toLowerCase();
  return words.every((word) => all.includes(word));
}

function tenants(now) {
  const select = byId("tenant"), names = ["", ...now.tenants];
  byId("of-tenant").hidden = now.tenants.length < 2 && !view.get("tenant");
  if (JSON.stringify([...select.options].map((o) => o.value)) !== JSON.stringify(names)) {
    select.replaceChildren();
    for (const name of names) put(select, "option", {value: name}, name || "all");
  }
  select.value = view.get("tenant") || "";
}

function trouble(now) {
  const fleet = now.fleet;
  if (now.draining) return "draining: nothing is granted";
  if (fleet && fleet.unready) return fleet.trouble ? `${fleet.unready}: ${fleet.trouble}` : fleet.unready;
  if (fleet && !fleet.leads) return `stands by: ${fleet.leader || "nobody"} leads`;
  return "";
}

function show(now) {
  seen = now;
  const among = now.fleet ? ` at ${now.fleet.address}, one of ${now.fleet.brokers},` : "";
  say("about", `broker${among} ${now.version}, epoch ${now.epoch}, up ${now.uptime}`);
  say("trouble", trouble(now));
  tenants(now);
  charts(now);
  engines(now);
  figures(now);
  pairs(now, wanted);
  handoffs(now, wanted);
}

async function look() {
  if (looking) return;
  looking = true;
  clearTimeout(waiting);
  try {
    if (!document.hidden && (!paused || wantsOther)) {
      wantsOther = false;
      const tenant = view.get("tenant");
      const answer = await fetch(`status.json${tenant ? `?${new URLSearchParams({tenant})}` : ""}`, {cache: "no-store"});
      if (answer.status === 404 && tenant) throw new Error(`tenant ${tenant} has nothing here`);
      if (!answer.ok) throw new Error((await answer.text()).trim());
      const now = await answer.json();
      show(now);
      await lookAtHandoff();
    }
  } catch (error) {
    say("trouble", `no news: ${error.message}`);
  }
  looking = false;
  waiting = setTimeout(look, LOOK_MS);
}

// Another tenant is asked for also while paused: its name must not stand above the figures of the tenant before.
function lookAtOther() {
  wantsOther = true;
  look();
}

byId("controls").addEventListener("submit", (event) => event.preventDefault());
byId("filter").value = view.get("filter") || "";
byId("filter").addEventListener("input", (event) => change({filter: event.target.value}));
byId("tenant").addEventListener("change", (event) => { change({tenant: event.target.value}); lookAtOther(); });
byId("pause").addEventListener("click", (event) => {
  paused = !paused;
  event.target.setAttribute("aria-pressed", String(paused));
  event.target.textContent = paused ? "Go on" : "Pause";
});
byId("handoff").addEventListener("close", () => change({handoff: null, of: null}));
addEventListener("hashchange", () => {
  const tenant = view.get("tenant");
  view = new URLSearchParams(location.hash.slice(1));
  if (view.get("tenant") !== tenant) lookAtOther();
  byId("filter").value = view.get("filter") || "";
  lookAtHandoff().catch((error) => say("trouble", `no news: ${error.message}`));
  if (seen) show(seen);
});
document.addEventListener("visibilitychange", () => { if (!document.hidden) look(); });
for (const name of LIVE) state(put(byId("key"), "span"), name);
look();
