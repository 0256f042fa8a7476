// Draws the steps of steps.js and follows the keys. Both run in one function, as one script.

const SAID = {
  accepted: "accepted draft", grammar: "draft rejected by the grammar",
  model: "draft rejected by the model", stop: "draft behind the stop token",
  trimmed: "draft trimmed before the verification", bonus: "bonus: the target's own token",
  corrected: "correction: the target's own token", own: "the target's token; no draft was verified",
  forced: "forced by the grammar, inserted by a jump", replaced: "re-tokenised: replaced by a jump",
  reencoded: "re-tokenised: the same text in other tokens",
};
const index = JSON.parse(byId("trace-index").textContent);
const lanes = byId("tv-lanes"), tip = byId("tv-tip"), notice = byId("tv-notice");
const picks = Object.fromEntries(
  ["run", "request", "strategy", "beside"].map((name) => [name, byId(`tv-${name}`)]));
let step = 0, shown = [], turn = 0;

// ---- drawing --------------------------------------------------------------------------------

const node = (tag, properties = {}, ...children) => {
  const made = Object.assign(document.createElement(tag), properties);
  made.append(...children);
  return made;
};

function strip(each) {
  const box = node("div", { className: "tv-strip" });
  let depth = null;
  for (const cell of cellsOf(each)) {
    const drawn = node("span", { className: "tv-cell", tabIndex: -1 }, visible(cell.id));
    drawn.dataset.fate = cell.fate;
    drawn.setAttribute("aria-label", `${visible(cell.id)}: ${SAID[cell.fate]}`);
    drawn.setAttribute("aria-describedby", tip.id);
    drawn.tell = () => tell(drawn, cell, each);
    if (cell.depth === undefined || !each.parents.length) box.append(drawn);
    else {
      if (cell.depth !== depth) box.append(node("span", { className: "tv-depth" }));
      depth = cell.depth;
      box.lastChild.append(drawn);
    }
  }
  return box;
}

// ---- tooltip --------------------------------------------------------------------------------

const count = (n, word) => `${n.toLocaleString("en")} ${word}${n === 1 ? "" : "s"}`;
const orNot = (value, missing) => (value === undefined || value === null ? missing : String(value));

function facts(cell, each) {
  const lines = [["token", visible(cell.id)], ["id", cell.id === PAD ? "not recorded" : cell.id],
    ["fate", SAID[cell.fate]]];
  if (each.recorded && cell.legal !== undefined) {
    lines.push(["p", orNot(cell.p, "none")]);
    if (cell.draft) lines.push(["q", orNot(cell.q, "none (the draft model's argmax)")]);
    lines.push(["legal tokens", cell.legal === -1 ? "no mask" : cell.legal.toLocaleString("en")]);
  } else if (!each.recorded) lines.push(["p, q, legal", "not recorded (engine.detail=true)"]);
  else lines.push(["p, q, legal", "none: it was not verified"]);
  const { draft, verify, grammar, exposed, host } = each.times;
  lines.push(["step, µs", `draft ${draft}, verify ${verify}, grammar ${grammar} `
    + `(exposed ${exposed}), host ${host}`]);
  if (each.batch > 1) lines.push(["", `its share of a batch of ${each.batch}`]);
  for (const [kind, tokens, calls] of each.rollbacks)
    lines.push(["rolled back", `${count(tokens, "token")}, ${kind}, in ${count(calls, "call")}`]);
  return lines;
}

function tell(cell, what, each) {
  hush();
  cell.classList.add("tv-active");
  tip.replaceChildren(node("dl", {}, ...facts(what, each).flatMap(([name, value], line) => [
    node("dt", {}, name), node("dd", { className: line ? "" : "tv-token" }, String(value))])));
  tip.hidden = false;
  const at = cell.getBoundingClientRect(), size = tip.getBoundingClientRect();
  const below = at.bottom + 8 + size.height < innerHeight;
  tip.style.top = `${below ? at.bottom + 8 : Math.max(4, at.top - size.height - 8)}px`;
  tip.style.left = `${Math.max(4, Math.min(at.left, innerWidth - size.width - 8))}px`;
}

function hush() {
  tip.hidden = true;
  for (const cell of lanes.querySelectorAll(".tv-active")) cell.classList.remove("tv-active");
}

// ---- lanes ----------------------------------------------------------------------------------

function side(each) {
  const total = ["draft", "verify", "grammar", "host"].reduce((sum, k) => sum + each.times[k], 0);
  const box = node("div", { className: "tv-side" }, `${Math.round(total).toLocaleString("en")} µs`);
  for (const [kind, tokens] of each.rollbacks)
    box.append(node("br"), node("span", { className: "tv-rollback" }, `${tokens} ${kind}`));
  return box;
}

function lane(strategy, columns, request) {
  const steps = unfold(columns, request);
  const error = columns.error[request], finish = columns.finish[request];
  const drafted = steps.reduce((sum, each) => sum + each.drafts.filter((id) => id !== PAD).length, 0);
  const accepted = steps.reduce((sum, each) => sum + [...each.fates].filter((f) => f === "a").length, 0);
  const tokens = steps.at(-1)?.after.length ?? 0;
  const said = finish === undefined ? "did not run this request"
    : `${count(tokens, "token")} in ${count(Math.max(0, steps.length - 1), "step")}`
      + (drafted ? `, ${accepted} of ${count(drafted, "verified draft")} accepted` : "")
      + `, ended by ${error ? `an error: ${error}` : finish}`;
  const output = node("pre", { className: "tv-output" });
  const rows = steps.map((each, at) => {
    const row = node("div", { className: "tv-step", onclick: () => walk(at) },
      node("div", { className: "tv-number" }, at ? `step ${at}` : "prefill"), strip(each), side(each));
    return row;
  });
  const list = node("div", { className: "tv-steps" }, ...rows);
  list.addEventListener("scroll", hush);
  lanes.append(node("div", { className: "tv-lane" },
    node("div", { className: "tv-head" }, node("h4", {}, strategy), node("span", {}, said)),
    output, list));
  return { steps, rows, output, list };
}

function write(output, each) {
  const old = each.before.length - each.jump.length;
  const decoder = new TextDecoder();
  const prefix = decoder.decode(bytesOf(each.after.slice(0, old)), { stream: true });
  const fresh = decoder.decode(bytesOf(each.after.slice(old)));
  output.replaceChildren(prefix, node("mark", {}, fresh));
  output.scrollTop = output.scrollHeight;
}

// Show a step in every lane; one that has ended stays at its last.
function walk(to, keepFocus = false) {
  const last = Math.max(0, ...shown.map((each) => each.steps.length - 1));
  step = Math.min(Math.max(0, to), last);
  for (const { steps, rows, output, list } of shown) {
    if (!steps.length) continue;
    const at = Math.min(step, steps.length - 1);
    const left = rows.find((row) => row.hasAttribute("aria-current"));
    if (left) {
      left.removeAttribute("aria-current");
      for (const cell of left.querySelectorAll(".tv-cell")) cell.tabIndex = -1;
    }
    const row = rows[at], cells = [...row.querySelectorAll(".tv-cell")];
    const focused = keepFocus && left
      ? [...left.querySelectorAll(".tv-cell")].indexOf(document.activeElement) : -1;
    row.setAttribute("aria-current", "step");
    for (const cell of cells) cell.tabIndex = 0;
    list.scrollTop = row.offsetTop - (list.clientHeight - row.offsetHeight) / 2;
    if (focused >= 0) cells[Math.min(focused, cells.length - 1)]?.focus({ preventScroll: true });
    write(output, steps[at]);
  }
}

// ---- choosing -------------------------------------------------------------------------------

function fill(select, options, wanted) {
  select.replaceChildren(...options.map(([value, text]) => new Option(text, value)));
  const found = options.some(([value]) => String(value) === wanted);
  select.value = found ? wanted : String(options[0]?.[0] ?? "");
}

const run = () => index.runs[Number(picks.run.value)];

function chooseRun() {
  const names = Object.keys(run().strategies ?? {});
  const drafting = names.find((name) => name !== "plain") ?? names[0];
  fill(picks.request, (run().requests ?? []).map(([name, kind], i) => [i, `${name} (${kind})`]),
    picks.request.value);
  fill(picks.strategy, names.map((name) => [name, name]), picks.strategy.value || drafting);
  fill(picks.beside, [["", "nothing"], ...names.map((name) => [name, name])], picks.beside.value);
  return show();
}

async function show() {
  const mine = ++turn, of = run();
  hush();
  notice.textContent = !of ? "There is no run to show."
    : !of.viewable ? "This run was recorded by a version without traces to show; run it again."
    : !of.detail ? "p, q and the number of legal tokens were not recorded; run with "
      + "engine.detail=true to see them."
    : "Recorded with engine.detail=true: its times are not for quoting.";
  if (!of?.viewable) {
    shown = [];
    lanes.replaceChildren();
    return;
  }
  const names = [...new Set([picks.strategy.value, picks.beside.value])].filter(Boolean);
  const [words, ...columns] = await Promise.all(
    [of.tokens, ...names.map((name) => of.strategies[name])].map(blob));
  if (mine !== turn) return;  // something else was chosen meanwhile
  texts = words;
  lanes.replaceChildren();
  shown = names.map((name, i) => lane(name, columns[i], Number(picks.request.value)));
  walk(step);
}

function nextRequest(by) {
  const { options, selectedIndex } = picks.request;
  const to = Math.min(Math.max(0, selectedIndex + by), options.length - 1);
  if (to === selectedIndex) return;
  picks.request.selectedIndex = to;
  step = 0;
  lanes.focus({ preventScroll: true });
  show();
}

const KEYS = {
  ArrowLeft: () => walk(step - 1, true), ArrowRight: () => walk(step + 1, true),
  Home: () => walk(0, true), End: () => walk(Infinity, true),
  ArrowUp: () => nextRequest(-1), ArrowDown: () => nextRequest(1), Escape: hush,
};
lanes.addEventListener("keydown", (event) => {
  const act = KEYS[event.key];
  if (!act || event.altKey || event.ctrlKey || event.metaKey) return;
  event.preventDefault();
  act();
});
for (const kind of ["mouseover", "focusin"])
  lanes.addEventListener(kind, (event) => event.target.closest(".tv-cell")?.tell?.());
for (const kind of ["mouseout", "focusout"]) lanes.addEventListener(kind, hush);
addEventListener("scroll", hush, { passive: true });
picks.run.addEventListener("change", () => { step = 0; chooseRun(); });
picks.request.addEventListener("change", () => { step = 0; show(); });
picks.strategy.addEventListener("change", show);
picks.beside.addEventListener("change", show);
fill(picks.run, index.runs.map((each, i) => [i, each.name]), "0");
if (index.runs.length) chooseRun(); else show();
