// The latest choices, those that a filter wants of all that are kept, and one of them term by term.

import { NONE, clock, count, el, ms, pairs, share, write } from "./elements.js";
import { ask, problemOf } from "./stream.js";
import { Table } from "./table.js";

const AGAIN_MS = 2_000;
const FEW = 12; // candidates before all are asked for
const REASONS = ["cache-hit", "cache-pull", "cache-passed", "cold-home", "cold-cheapest", "load-only", "policy"];
const ENDS = ["running", "complete", "worker-failed", "worker-late", "client-gone"];
export const TERMS = [
  ["queue_ms", "queue"],
  ["transfer_ms", "transfer"],
  ["miss_ms", "miss"],
  ["imbalance_ms", "imbalance"],
  ["decode_pressure_ms", "decode"],
];

function options(any, names) {
  return [el("option", { value: "" }, any), ...names.map((name) => el("option", { value: name }, name))];
}

function came(row) {
  if (!row.end) return "running";
  const first = row.first_ms === undefined || row.first_ms === null ? "" : ` ${ms(row.first_ms)}`;
  return row.is_stream ? `${row.end}, first token${first}` : `${row.end}, answer${first}`;
}

export class Decisions {
  constructor(openDetail) {
    this.openDetail = openDetail;
    this.isPaused = false;
    this.text = el("input", { type: "search", id: "decision-filter", class: "filter", placeholder: "request id or worker" });
    this.reason = el("select", {}, ...options("any reason", REASONS));
    this.end = el("select", {}, ...options("any end", ENDS));
    this.pause = el("button", { type: "button", "aria-pressed": "false" }, "Hold");
    this.said = el("p", { class: "summary", role: "status" });
    this.table = new Table({
      caption: "Decisions, the latest first",
      key: (row) => `${row.process ?? ""} ${row.request}`,
      open: (row) => this.show(row),
      columns: [
        { label: "Request", wide: true, text: (row) => row.request },
        { label: "At", text: (row) => clock(row.at_ms) },
        { label: "Worker", text: (row) => row.worker },
        { label: "Why", text: (row) => row.reason },
        { label: "Found of its prompt", number: true, text: (row) => `${count(row.matched_tokens)} of ${count(row.prompt_tokens)}` },
        { label: "Pulled", number: true, text: (row) => (row.pulled_tokens ? count(row.pulled_tokens) : NONE) },
        { label: "Predicted", number: true, text: (row) => ms(row.predicted_ms ?? 0) },
        { label: "Came true", text: came },
        { label: "Time saved", number: true, text: (row) => ms(row.net_ms ?? 0) },
      ],
      empty: "No request has been routed so far.",
    });
    const asked = () => this.search();
    this.text.addEventListener("input", asked);
    this.reason.addEventListener("change", asked);
    this.end.addEventListener("change", asked);
    this.pause.addEventListener("click", () => this.hold(!this.isPaused));
    this.node = el(
      "div",
      {},
      el(
        "div",
        { class: "tools" },
        el("label", {}, el("span", {}, "Filter"), this.text),
        el("label", {}, el("span", {}, "Reason"), this.reason),
        el("label", {}, el("span", {}, "End"), this.end),
        this.pause,
      ),
      this.said,
      this.table.node,
    );
  }

  hold(isHeld) {
    this.isPaused = isHeld;
    this.pause.setAttribute("aria-pressed", String(isHeld));
    write(this.pause, isHeld ? "Go on" : "Hold");
  }

  get isFiltered() {
    return Boolean(this.text.value || this.reason.value || this.end.value);
  }

  update(look) {
    if (this.isPaused || this.table.hasFocus) {
      write(this.said, this.isPaused ? "Held." : "Held while a row has the focus.");
      return;
    }
    if (this.isFiltered) {
      if (Date.now() - (this.askedAt ?? 0) >= AGAIN_MS) this.search();
      return;
    }
    this.table.update(look.decisions, "No request has been routed so far.");
    write(this.said, `The latest ${count(look.decisions.length)} of ${count(look.traffic.decisions)} since start; of those that still run, ten.`);
  }

  async search() {
    if (!this.isFiltered) return;
    this.askedAt = Date.now();
    const query = new URLSearchParams({ limit: "100" });
    for (const [name, field] of [["text", this.text], ["reason", this.reason], ["end", this.end]]) {
      if (field.value.trim()) query.set(name, field.value.trim());
    }
    const turn = (this.turn = (this.turn ?? 0) + 1);
    const answer = await ask(`dashboard/decisions?${query}`);
    if (turn !== this.turn || !this.isFiltered) return;
    if (answer.status !== 200) {
      write(this.said, problemOf(answer));
      return;
    }
    const found = answer.told.decisions;
    this.table.update(found, "None of the decisions that are kept matches this filter.");
    write(this.said, `${count(found.length)}${found.length === 100 ? " or more" : ""} of those that are kept match.`);
  }

  async show(row) {
    const body = el("div", {}, el("p", {}, "asking the gateway…"));
    this.openDetail(`Request ${row.request}`, body);
    const answer = await ask(`decisions/${encodeURIComponent(row.request)}`);
    if (answer.status === 404) {
      const text = "It is not kept any more: the gateway remembers the last ones only (--decisions-kept). What the list had:";
      body.replaceChildren(el("p", { class: "trouble" }, text), summary(row));
    } else if (answer.status !== 200) {
      body.replaceChildren(el("p", { class: "trouble" }, problemOf(answer)));
    } else {
      body.replaceChildren(...detail(answer.told));
    }
  }
}

function summary(found) {
  return pairs(
    ["Went to", found.worker],
    ["Why", found.reason],
    ["Plan", found.plan + (found.source ? ` from ${found.source}` : "")],
    ["Prompt", `${count(found.prompt_tokens)} tokens, ${count(found.matched_tokens)} expected there (${share(found.matched_tokens, found.prompt_tokens)})`],
    ["Pulled", found.pulled_tokens ? `${count(found.pulled_tokens)} tokens` : ""],
    ["Policy", found.policy],
    ["Chosen at", found.at?.replace("T", " ").replace("+00:00", " UTC")],
  );
}

function detail(found) {
  const gain = found.gain;
  const parts = [
    summary(found),
    el("h3", {}, "What was predicted, and what came true"),
    ...[...(found.earlier ?? []), found].map((attempt, index, all) => outcome(attempt, all.length > 1 ? index + 1 : 0)),
    el("h3", {}, "Against the best choice that is blind to caches"),
    el(
      "p",
      {},
      `${ms(found.net_gain_ms)} = saved prefill ${term(gain.saved_prefill_ms)} − queue ${term(gain.queue_ms)} − transfer ${term(gain.transfer_ms)} − imbalance ${term(gain.imbalance_ms)}`,
    ),
    el("p", { class: "note" }, `Of it, time: ${ms(gain.saved_prefill_ms - gain.queue_ms - gain.transfer_ms)}. Imbalance is the price that keeps cold prompts from crowding one worker: nobody waits for it.`),
    el("h3", {}, `Candidates: ${count(found.candidates.length)}, the cheapest first`),
    ...candidates(found),
  ];
  const out = Object.entries(found.excluded ?? {});
  if (out.length) {
    parts.push(el("h3", {}, "Not asked"), el("ul", {}, ...out.map(([worker, why]) => el("li", {}, `${worker}: ${why}`))));
  }
  if (found.notes?.length) {
    parts.push(el("h3", {}, "Notes"), el("ul", {}, ...found.notes.map((note) => el("li", {}, note))));
  }
  return parts;
}

/** One of a sum. */
function term(value) {
  return value < 0 ? `(${ms(value)})` : ms(value);
}

function outcome(found, number) {
  const came = found.outcome;
  const name = number ? `Attempt ${number}, ${found.worker}` : null;
  if (!came) return pairs(["Attempt", name], ["So far", "it is still running"]);
  const first = came.is_stream ? "First token" : "Answer began";
  return pairs(
    ["Attempt", name],
    ["End", `${came.end} after ${ms(came.took_ms)}`],
    ["Prefill predicted", ms(came.predicted_ms)],
    [first, came.first_byte_ms === null ? "never" : `after ${ms(came.first_byte_ms)}`],
    ["Tokens predicted to be reused", count(came.predicted_tokens)],
    ["Tokens reused", came.reused_tokens === null ? "the worker does not say" : count(came.reused_tokens)],
  );
}

function candidates(found) {
  const rows = [...found.candidates].sort((one, other) => one.cost_ms - other.cost_ms);
  const chosen = rows.find((row) => row.worker === found.worker);
  let few = rows.slice(0, FEW);
  if (chosen && !few.includes(chosen)) few = [...few.slice(0, -1), chosen];
  const most = Math.max(...few.map((row) => row.cost_ms), 0.001);
  const table = new Table({
    caption: "Candidates and their terms",
    key: (row) => row.worker,
    columns: [
      {
        label: "Worker",
        text: (row) => `${row === chosen ? "★ " : ""}${row.worker}`,
        fill: (cell, row, text) =>
          cell.replaceChildren(el("span", { class: row === chosen ? "chosen" : "" }, text), row === chosen ? el("span", { class: "hidden" }, " (chosen)") : ""),
      },
      { label: "Has", number: true, text: (row) => count(row.matched_tokens) },
      { label: "Pulls", number: true, text: (row) => (row.pulled_tokens ? count(row.pulled_tokens) : NONE) },
      ...TERMS.map(([name, label]) => ({ label, number: true, text: (row) => ms(row[name]) })),
      { label: "Cost", number: true, text: (row) => ms(row.cost_ms) },
      { label: "Terms", text: (row) => String(row.cost_ms), fill: (cell, row) => cell.replaceChildren(terms(row, most)) },
    ],
  });
  table.node.classList.add("candidates");
  table.update(few);
  const legend = el("p", { class: "legend" }, ...TERMS.map(([, label]) => el("span", { class: "key" }, el("span", { class: `swatch ${label}`, "aria-hidden": "true" }), label)));
  if (rows.length <= few.length) return [legend, table.node];
  const all = el("button", { type: "button" }, `Show all ${count(rows.length)}`);
  all.addEventListener("click", () => {
    all.remove();
    table.update(rows);
  });
  return [legend, table.node, all];
}

/** The terms of one candidate on end; what is beyond the scale is cut. */
function terms(row, most) {
  const parts = TERMS.filter(([name]) => row[name] > 0).map(([name, label]) => {
    const part = el("span", { class: `term ${label}` });
    part.style.flexBasis = `${Math.min(100, (row[name] / most) * 100)}%`;
    return part;
  });
  return el("span", { class: "terms", "aria-hidden": "true" }, ...parts);
}
