"use strict";
// One phone at a time: its state is asked for again as soon as it was answered; actions go one after another.
// Texts of phones and tasks become text nodes, never HTML.
const $ = (id) => document.getElementById(id);
const LONG_PRESS = 500, DRAG = 1000, MOVED = 0.02;
const NONE = "No task is running. Start one, or just use the phone.";
let catalog = { phones: [], keeps: false }, tasks = null, phone = 0, seen = "", state = null;
let queue = Promise.resolve();
// This page keeps its name when it is loaded again; a copy of its tab gets another, so the name is stored between two
// loads alone.
const pageName = sessionStorage.getItem("page") || crypto.getRandomValues(new Uint32Array(4)).join("-");
const unnamed = () => sessionStorage.removeItem("page");
unnamed();
addEventListener("pageshow", unnamed);
addEventListener("pagehide", () => sessionStorage.setItem("page", pageName));

const at = (path, number = phone) => `/api/phones/${number}${path}`;
const pause = () => new Promise((resolve) => setTimeout(resolve, 1000));

async function ask(address, signal) {
  const answer = await fetch(address, { headers: { "Tapforge-Page": pageName }, signal });
  const said = await answer.json();
  if (!answer.ok) throw new Error(said.error);
  return said;
}

async function post(number, path, body) {
  const answer = await fetch(at(path, number), {
    method: "POST",
    headers: { "Content-Type": "application/json", "Tapforge-Page": pageName },
    body: JSON.stringify(body),
  });
  const said = await answer.json();
  if (number !== phone) return;
  if (answer.ok) { show(said); return; }
  if (said.reason === "held" && path === "/task" && !body.take && confirm(`${said.error}\n\nTake it?`)) {
    await post(number, path, { ...body, take: true });
    return;
  }
  $("note").textContent = said.error;
}

// On the phone that is shown now, whichever is shown when its turn comes.
function send(path, body) {
  const number = phone;
  queue = queue.then(() => post(number, path, body)).catch(() => { $("gone").hidden = false; });
  return queue;
}

// What is done is done on the screen that is shown when it is clicked.
function act(action) {
  if (!state || !state.frame) return queue;
  return send("/act", { action, screen: [state.width, state.height] });
}

function show(next) {
  if (!state || state.frame !== next.frame) {
    if (next.frame) $("screen").src = at(`/frame?sha=${next.frame}`);
    else $("screen").removeAttribute("src");
    $("screen").classList.toggle("pixels", next.width < 400);
    $("screen").style.aspectRatio = next.frame ? `${next.width} / ${next.height}` : "9 / 20";
  }
  state = next;
  seen = next.seen;
  const busy = next.phase !== "playing" && next.phase !== "ended" && next.phase !== "idle";
  const running = next.task !== null && next.phase === "playing" && !next.held;
  $("screen").classList.toggle("busy", busy);
  $("held").hidden = !next.held;
  $("goal").textContent = next.task ? next.task.goal : tasks && tasks.suites ? NONE : "No task is running. Start one.";
  $("steps").textContent = next.task ? `step ${next.steps} of ${next.task.max_steps}` : "";
  $("note").textContent = busy ? `${next.phase} ...` : next.note;
  for (const id of ["done", "impossible", "answer", "say"]) $(id).disabled = !running;
  $("stop").disabled = !running || !next.keep;
  showVerdict(next);
  $("others").hidden = !Object.keys(next.addresses).length;
  $("addresses").replaceChildren(...Object.entries(next.addresses).flatMap(([name, address]) => {
    const term = document.createElement("dt"), what = document.createElement("dd");
    term.textContent = name;
    what.append(Object.assign(document.createElement("code"), { textContent: address }));
    return [term, what];
  }));
}

function showVerdict(next) {
  const { verdict, keep } = next, invalid = keep ? keep.invalid : "";
  const undecided = invalid ? "invalid" : verdict ? "undecided" : "";
  $("verdict").className = verdict && verdict.outcome ? verdict.outcome : undecided;
  $("outcome").textContent = !verdict ? "" : verdict.outcome
    ? verdict.outcome + (verdict.score === null ? "" : `, score ${verdict.score}`) : "No verifier: you decide.";
  const effects = verdict && verdict.side_effects.length ? ` Side effects: ${verdict.side_effects.join(", ")}.` : "";
  const hint = verdict && verdict.feasible === false ? " This task can't be done." : "";
  $("why").textContent = verdict ? `${verdict.reason ? `${verdict.reason}.` : ""}${effects}${hint}` : "";
  if (invalid) $("kept").textContent = `It can't be kept: ${invalid}`;
  else $("kept").textContent = keep && keep.kept ? `Kept: ${keep.kept}` : "";
  const mine = keep && !next.held;
  $("keep").hidden = !(mine && keep.can && !keep.decide);
  $("worked").hidden = $("failed").hidden = !(mine && keep.can && keep.decide);
  $("discard").hidden = !(mine && !keep.kept && (keep.can || invalid));
}

let following = new AbortController();
async function follow() {
  for (;;) {
    const asked = phone;
    following = new AbortController();
    try {
      const next = await ask(at(`?seen=${seen}`), following.signal);
      $("gone").hidden = true;
      if (asked === phone && next.seen !== seen) show(next);
    } catch {
      if (asked !== phone) continue;
      $("gone").hidden = false;
      await pause();
    }
  }
}

// --- fingers and keys ---

let down = null;
function place(event) {
  const box = $("screen").getBoundingClientRect();
  const part = (value, size) => Math.min(1, Math.max(0, value / size));
  return { x: part(event.clientX - box.left, box.width), y: part(event.clientY - box.top, box.height) };
}
$("screen").addEventListener("pointerdown", (event) => {
  if (event.button !== 0) return;
  event.preventDefault();
  $("phone").focus();
  $("screen").setPointerCapture(event.pointerId);
  down = { ...place(event), when: performance.now() };
});
$("screen").addEventListener("pointerup", (event) => {
  if (!down) return;
  const up = place(event), from = down, time = performance.now() - down.when;
  down = null;
  if (Math.hypot(up.x - from.x, up.y - from.y) > MOVED)
    act({ type: time >= DRAG ? "drag" : "swipe", x: from.x, y: from.y, x2: up.x, y2: up.y });
  else act({ type: time >= LONG_PRESS ? "long_press" : "tap", x: from.x, y: from.y });
});
$("screen").addEventListener("pointercancel", () => { down = null; });
$("screen").addEventListener("contextmenu", (event) => event.preventDefault());
let wheeled = 0;
$("screen").addEventListener("wheel", (event) => {
  event.preventDefault();
  if (performance.now() - wheeled < 250 || !event.deltaY) return;
  wheeled = performance.now();
  act({ type: "scroll", direction: event.deltaY > 0 ? "down" : "up", ...place(event) });
}, { passive: false });
$("phone").addEventListener("keydown", (event) => {
  if (event.ctrlKey || event.metaKey || event.altKey || event.isComposing) return;
  const named = { Enter: { type: "enter" }, Backspace: { type: "key", name: "DEL" }, Escape: { type: "back" },
    Home: { type: "home" } };
  if (named[event.key]) act(named[event.key]);
  else if ([...event.key].length === 1) act({ type: "type", text: event.key });
  else return;
  event.preventDefault();
});
$("phone").addEventListener("paste", (event) => {
  const text = event.clipboardData.getData("text").slice(0, 10000);
  if (text) act({ type: "type", text });
});
for (const button of document.querySelectorAll("[data-key]"))
  button.addEventListener("click", () => act({ type: button.dataset.key }));
function openApp() {
  if ($("app").value.trim()) act({ type: "open_app", name: $("app").value.trim() });
  $("app").value = "";
}
$("open").addEventListener("click", openApp);
$("app").addEventListener("keydown", (event) => { if (event.key === "Enter" && !event.isComposing) openApp(); });
function type() {
  if ($("text").value) act({ type: "type", text: $("text").value });
  $("text").value = "";
}
$("type").addEventListener("click", type);
$("text").addEventListener("keydown", (event) => { if (event.key === "Enter" && !event.isComposing) type(); });

// --- tasks ---

function options(id, names, chosen) {
  $(id).replaceChildren(...names.map(([value, text]) => new Option(text, value, false, value === chosen)));
}
const same = (names) => names.map((one) => [one, one]);
function templates() {
  options("template", same(tasks.suites[$("suite").value][$("split").value]), $("template").value);
}
function chosen() {
  if (tasks.suites) {
    const number = Math.max(0, Math.floor(Number($("index").value)) || 0);
    return { suite: $("suite").value, split: $("split").value, template: $("template").value, number };
  }
  return $("mygoal").value.trim() ? { goal: $("mygoal").value.trim() } : { key: $("key").value };
}
function start() {
  send("/task", chosen());
  $("answer").value = "";
  $("phone").focus();
}
function nextTask() {
  if (tasks.suites) $("index").value = Number($("index").value) + 1;
  else if ($("key").options.length) $("key").selectedIndex = ($("key").selectedIndex + 1) % $("key").options.length;
  $("mygoal").value = "";
  start();
}
$("start").addEventListener("click", start);
$("next").addEventListener("click", nextTask);
$("suite").addEventListener("change", templates);
$("split").addEventListener("change", templates);
$("done").addEventListener("click", () => send("/finish", { status: "success" }));
$("impossible").addEventListener("click", () => send("/finish", { status: "infeasible" }));
$("say").addEventListener("click", () => send("/finish", { answer: $("answer").value }));
$("answer").addEventListener("keydown", (event) => {
  if (event.key === "Enter" && !event.isComposing) send("/finish", { answer: $("answer").value });
});
$("keep").addEventListener("click", () => send("/keep", {}));
$("worked").addEventListener("click", () => send("/keep", { outcome: "success" }));
$("failed").addEventListener("click", () => send("/keep", { outcome: "failure" }));
$("discard").addEventListener("click", () => send("/discard", {}));
$("stop").addEventListener("click", () => send("/discard", {}));
$("take").addEventListener("click", () => send("/take", {}));
$("number").addEventListener("change", () => {
  phone = Number($("number").value);
  seen = "";
  state = null;
  following.abort();
  list();
});

// Until the phone's list is there, or another phone is shown.
async function list() {
  const asked = phone;
  let listed = null;
  $("start").disabled = $("next").disabled = true;
  while (!listed && asked === phone)
    try { listed = await ask(at("/catalog", asked)); } catch { await pause(); }
  if (asked !== phone) return;
  tasks = listed;
  $("suites").hidden = !tasks.suites;
  $("listed").hidden = !tasks.tasks || !tasks.tasks.length;
  $("own").hidden = !tasks.goals;
  $("listnote").hidden = !tasks.note;
  $("listnote").textContent = tasks.note || "";
  if (tasks.suites) {
    options("suite", same(Object.keys(tasks.suites)), $("suite").value);
    options("split", same(Object.keys(tasks.suites[$("suite").value])), $("split").value);
    templates();
  } else options("key", tasks.tasks.map((one) => [one.key, one.goal || one.template]), $("key").value);
  $("start").disabled = $("next").disabled = false;
  if (state) show(state);
}
async function begin() {
  for (;;) try { catalog = await ask("/api/catalog"); break; } catch { $("gone").hidden = false; await pause(); }
  options("number", catalog.phones.map((one, number) => [String(number), one]));
  $("which").hidden = catalog.phones.length < 2;
  follow();
  await list();
}
begin();
