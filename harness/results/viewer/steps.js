// Recorded steps, out of the data that harness/results/viewer/data.py describes.

const PAD = -1;
const FATES = { a: "accepted", g: "grammar", m: "model", s: "stop", "-": "trimmed" };
const KINDS = ["preview", "draft", "rejected", "retokenize"];
const byId = (id) => document.getElementById(id);
let texts = null;  // of the tokens of the run that is shown

// ---- data -----------------------------------------------------------------------------------

const decoded = new Map();
function blob(number) {
  if (!decoded.has(number)) {
    const bytes = Uint8Array.from(atob(byId(`trace-${number}`).textContent), (c) => c.charCodeAt(0));
    const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"));
    decoded.set(number, new Response(stream).json());
  }
  return decoded.get(number);
}

// Where each step's part of a flat column begins.
const starts = (lengths) => {
  let end = 0;
  return [0, ...lengths.map((n) => (end += n))];
};

// One request's steps, as objects, with its output before and after each.
function unfold(columns, request) {
  const place = columns.request.indexOf(request);
  if (place < 0) return [];
  columns.first ??= starts(columns.steps);
  columns.at ??= Object.fromEntries(
    ["drafts", "trees", "trimmed", "jumps"].map((name) => [name, starts(columns[name])]));
  const steps = [];
  let output = [];
  for (let row = columns.first[place]; row < columns.first[place + 1]; row++) {
    const cut = (name, by) =>
      (columns[name] ?? []).slice(columns.at[by][row], columns.at[by][row + 1]);
    const each = {
      row, number: row - columns.first[place], batch: columns.batch[row], own: columns.own_id[row],
      drafts: cut("draft_ids", "drafts"), fates: cut("fates", "drafts"),
      parents: cut("parents", "trees"), trimmed: cut("trimmed_ids", "trimmed"),
      jump: cut("jump_ids", "jumps"), p: cut("p", "drafts"), q: cut("q", "drafts"),
      ownP: columns.own_p?.[row], times: {}, rollbacks: [], recorded: "legal" in columns,
      // one row of logits more than drafts
      legal: (columns.legal ?? []).slice(
        columns.at.drafts[row] + row, columns.at.drafts[row + 1] + row + 1),
    };
    for (const name of ["draft", "verify", "grammar", "exposed", "host"])
      each.times[name] = columns[`${name}_us`][row];
    for (const kind of KINDS) {
      const calls = columns[`rollback_${kind}_calls`]?.[row];
      if (calls) each.rollbacks.push([kind, columns[`rollback_${kind}_tokens`][row], calls]);
    }
    const kept = output.length - columns.retokenized[row];
    each.replaced = output.slice(kept);
    each.before = [...output.slice(0, kept), ...each.jump];
    const accepted = each.drafts.filter((_, node) => each.fates[node] === "a");
    output = [...each.before, ...accepted, ...(each.own === PAD ? [] : [each.own])];
    each.after = output;
    steps.push(each);
  }
  return steps;
}

// ---- tokens ---------------------------------------------------------------------------------

// A lone low surrogate stands for a byte that is no text by itself.
const strayByte = (code) => (code >= 0xdc80 && code <= 0xdcff ? code - 0xdc00 : null);
const encoder = new TextEncoder();

function bytesOf(ids) {
  const bytes = [];
  for (const id of ids)
    for (const character of texts.texts[id] ?? "") {
      const stray = strayByte(character.codePointAt(0));
      bytes.push(...(stray === null ? encoder.encode(character) : [stray]));
    }
  return new Uint8Array(bytes);
}

const SPACES = { " ": "·", "\n": "⏎", "\r": "␍", "\t": "→" };
function visible(id) {
  if (id === PAD) return "?";
  if (id in texts.special) return texts.special[id];
  if (!(id in texts.texts)) return `#${id}`;
  return [...texts.texts[id]].map((character) => {
    const code = character.codePointAt(0), stray = strayByte(code);
    if (stray !== null) return `‹${stray.toString(16).toUpperCase()}›`;
    return SPACES[character] ?? (code < 32 ? `‹${code.toString(16)}›` : character);
  }).join("");
}

// ---- cells ----------------------------------------------------------------------------------

// What stands in a step's strip, in order: {id, fate, p, q, legal, depth}.
function cellsOf(each) {
  const cells = [];
  const covered = bytesOf(each.replaced).length;
  for (const id of each.replaced) cells.push({ id, fate: "replaced" });
  let length = 0;
  for (const id of each.jump) {
    cells.push({ id, fate: length < covered ? "reencoded" : "forced" });
    length += bytesOf([id]).length;
  }
  const trimmed = [...each.trimmed], depths = [];
  each.drafts.forEach((id, node) => {
    const parent = each.parents.length ? each.parents[node] : node - 1;
    depths[node] = parent < 0 ? 0 : depths[parent] + 1;
    cells.push(id === PAD
      ? { id: trimmed.shift() ?? PAD, fate: "trimmed", depth: depths[node] }
      : { id, fate: FATES[each.fates[node]], p: each.p[node], q: each.q[node],
          legal: each.legal[parent + 1], depth: depths[node], draft: true });
  });
  for (const id of trimmed) cells.push({ id, fate: "trimmed" });
  if (each.own !== PAD) {
    // It was chosen in the row behind the last accepted draft, instead of that one's children.
    const last = each.fates.lastIndexOf("a");
    const parentOf = (node) => (each.parents.length ? each.parents[node] : node - 1);
    const refused = [...each.fates].some((fate, node) => "gm".includes(fate) && parentOf(node) === last);
    const fate = refused ? "corrected" : last >= 0 ? "bonus" : "own";
    const legal = each.legal[last + 1];
    cells.push({ id: each.own, fate, p: each.ownP, legal });
  }
  return cells;
}
