"use strict";
// Every text of a model or a passage goes through textContent: none of it is ever parsed as HTML.
const rows = JSON.parse(document.getElementById("data").textContent);
const filters = document.getElementById("filters");
const list = document.getElementById("list");
const detail = document.getElementById("detail");
const SVG = "http://www.w3.org/2000/svg";
const MOST = 500;

function element(name, text, className) {
  const made = document.createElement(name);
  if (text !== undefined) made.textContent = text;
  if (className) made.className = className;
  return made;
}

function verdict(row) {
  return row.right === null ? "void" : row.right ? "right" : "wrong";
}

function values(key) {
  return [...new Set(rows.map((row) => (key === "right" ? verdict(row) : String(row[key]))))].filter(Boolean);
}

for (const select of filters.querySelectorAll("select")) {
  select.append(new Option("all", ""));
  for (const value of values(select.name)) select.append(new Option(value.replace(/_0*(?=\d)/, " "), value));
}

function matches(row) {
  const wanted = new FormData(filters);
  for (const key of ["file", "data_source", "status"]) {
    if (wanted.get(key) && String(row[key]) !== wanted.get(key)) return false;
  }
  if (wanted.get("right") && verdict(row) !== wanted.get("right")) return false;
  const text = wanted.get("text").toLowerCase();
  return !text || `${row.question}\n${row.answer}\n${(row.golden_answers || []).join("\n")}`.toLowerCase().includes(text);
}

function strip(row) {
  const svg = document.createElementNS(SVG, "svg");
  svg.setAttribute("viewBox", `0 0 ${Math.max(row.num_tokens, 1)} 10`);
  svg.setAttribute("preserveAspectRatio", "none");
  svg.setAttribute("height", "12");
  svg.setAttribute("class", "strip");
  const add = (start, end, kind) => {
    const rect = document.createElementNS(SVG, "rect");
    rect.setAttribute("x", start);
    rect.setAttribute("width", Math.max(end - start, 0));
    rect.setAttribute("height", 10);
    rect.setAttribute("class", kind);
    svg.append(rect);
  };
  add(0, row.num_tokens, "observed");
  add(0, row.num_prompt_tokens || 0, "prompt");
  for (const [start, end] of row.sampled_spans || []) add(start, end, "sampled");
  return svg;
}

function facts(pairs) {
  const found = element("dl");
  for (const [name, value] of pairs) {
    if (value !== undefined && value !== null && value !== "") found.append(element("dt", name), element("dd", String(value)));
  }
  return found;
}

function passages(turn) {
  const box = element("details");
  box.append(element("summary", `${turn.passages.length} passages`));
  for (const passage of turn.passages) {
    const score = typeof passage.score === "number" ? ` · ${passage.score.toFixed(3)}` : "";
    box.append(element("b", `${passage.title || passage.id}${score}`), element("pre", passage.text));
  }
  return box;
}

function show(row) {
  const parts = Object.entries(row.reward_parts || {}).map(([name, value]) => `${name} ${value}`);
  detail.replaceChildren(
    element("h3", row.question),
    facts([
      ["golden answers", (row.golden_answers || []).join(" | ")],
      ["answer", row.answer],
      ["verdict", verdict(row)],
      ["status", row.failure ? `${row.status}: ${row.failure}` : row.status],
      ["reward", parts.join(", ")],
      ["tokens", `${row.num_prompt_tokens} prompt, ${row.num_sampled_tokens} sampled of ${row.num_response_tokens}`],
      ["question id", row.question_id],
      ["group, policy version", `${row.group_id}, ${row.policy_version}`],
    ]),
    strip(row),
  );
  for (const message of row.prompt || []) {
    const box = element("details");
    box.append(element("summary", `prompt (${message.role})`), element("pre", message.content));
    detail.append(box);
  }
  (row.turns || []).forEach((turn, index) => {
    const heading = `turn ${index + 1}: ${turn.action}${turn.query ? ` “${turn.query}”` : ""}`;
    detail.append(element("h4", heading), element("pre", turn.completion, "sampled"));
    if (turn.observation) detail.append(element("pre", turn.observation, "observed"));
    for (const call of turn.calls || []) {
      detail.append(element("p", `${call.tool || "no tool run"} · ${call.status} · ${(call.seconds || 0).toFixed(3)} s`));
    }
    if ((turn.passages || []).length) detail.append(passages(turn));
  });
}

function choose(button, row) {
  for (const other of list.querySelectorAll("[aria-current]")) other.removeAttribute("aria-current");
  button.setAttribute("aria-current", "true");
  show(row);
}

function refresh() {
  const found = rows.filter(matches);
  const kept = found.slice(0, MOST);
  document.getElementById("count").textContent = found.length > MOST ? `${found.length}, the first ${MOST} listed` : `${found.length}`;
  list.replaceChildren(
    ...kept.map((row) => {
      const item = element("li");
      const button = element("button", `${{ right: "✓", wrong: "✗", void: "∅" }[verdict(row)]} ${row.step} · ${row.question}`);
      button.type = "button";
      button.addEventListener("click", () => choose(button, row));
      item.append(button);
      return item;
    }),
  );
  if (list.firstChild) choose(list.querySelector("button"), kept[0]);
  else detail.replaceChildren(element("p", rows.length ? "No trajectory matches." : "No trajectories in this run."));
}

filters.addEventListener("input", refresh);
filters.addEventListener("submit", (event) => event.preventDefault());
refresh();
