// The workers, and the beginnings of prompts that most of them are asked for.

import { NONE, bar, brief, count, el, ms, pairs, percent, share, span, write } from "./elements.js";
import { ask, problemOf } from "./stream.js";
import { Table } from "./table.js";

const TIERS = ["device", "host", "disk", "shared"];
const MARKS = { good: "●", busy: "◐", bad: "▲" };
const BUSY = new Set(["joining", "checking", "warming", "draining", "asleep"]);

function tone(row) {
  if (row.state === "ready") return (row.breaker ?? "closed") === "closed" && !row.alarms?.length ? "good" : "busy";
  return BUSY.has(row.state) ? "busy" : "bad";
}

function told(row) {
  const tiers = row.tiers ?? {};
  const named = TIERS.filter((tier) => tiers[tier]).map((tier) => `${tier} ${brief(tiers[tier])}`);
  const held = row.held_blocks ?? 0;
  const of = row.capacity_blocks ? ` of ${brief(row.capacity_blocks)}` : "";
  const where = named.length ? `: ${named.join(", ")}` : "";
  const expected = row.expected_blocks ? `; +${brief(row.expected_blocks)} expected` : "";
  const memory = row.memory === undefined ? "" : `; memory ${percent(row.memory)}`;
  return `${brief(held)}${of}${where}${expected}${memory}`;
}

function trust(row) {
  if (row.believed === undefined || row.believed === null) return `${row.mode}: by our own routing`;
  return `${percent(row.believed)} (${row.feed})`;
}

const ORDERS = {
  trouble: {
    label: "trouble, then name",
    of: (row) => [{ bad: 0, busy: 1, good: 2 }[tone(row)], 0],
  },
  load: { label: "load", of: (row) => [-(row.load_ms ?? 0), -(row.active ?? 0)] },
  hits: { label: "hit tokens", of: (row) => [-(row.hit_tokens ?? 0), 0] },
  trust: { label: "least trusted", of: (row) => [row.believed ?? 2, 0] },
  name: { label: "name", of: () => [0, 0] },
};

export class Fleet {
  constructor(openDetail) {
    this.openDetail = openDetail;
    this.filter = el("input", { type: "search", id: "fleet-filter", class: "filter", placeholder: "name, state, mode or model" });
    const choices = Object.entries(ORDERS).map(([name, order]) => el("option", { value: name }, order.label));
    this.order = el("select", { id: "fleet-order" }, ...choices);
    this.summary = el("p", { class: "summary", role: "status" });
    this.trouble = el("p", { class: "trouble", hidden: true });
    this.table = new Table({
      caption: "Workers",
      key: (row) => row.worker,
      open: (row) => this.show(row.worker),
      columns: [
        { label: "Worker", text: (row) => row.worker },
        {
          label: "State",
          text: (row) => `${MARKS[tone(row)]} ${row.state}${row.alarms?.length ? `: ${row.alarms.join(", ")}` : ""}`,
          fill: (cell, row, text) => cell.replaceChildren(el("span", { class: `state ${tone(row)}` }, text)),
        },
        { label: "Load", number: true, text: (row) => ms(row.load_ms ?? 0) },
        { label: "In flight", number: true, text: (row) => count(row.active ?? 0) },
        {
          label: "KV told, blocks",
          text: told,
          fill: (cell, row, text) => {
            const filled = row.capacity_blocks ? bar((row.held_blocks ?? 0) / row.capacity_blocks) : null;
            cell.replaceChildren(el("span", {}, text), ...(filled ? [filled] : []));
          },
        },
        { label: "Hits", number: true, text: (row) => share(row.hit_tokens ?? 0, row.prompt_tokens) },
        { label: "Sent", number: true, text: (row) => brief(row.chosen ?? 0) },
        { label: "Breaker", text: (row) => row.breaker ?? "closed" },
        { label: "Directory trusted", text: trust },
        { label: "Life", number: true, text: (row) => (row.incarnation ? `#${row.incarnation}` : NONE) },
      ],
      empty: "",
    });
    const again = () => this.look && this.update(this.look);
    this.filter.addEventListener("input", again);
    this.order.addEventListener("change", again);
    this.node = el(
      "div",
      {},
      el(
        "div",
        { class: "tools" },
        el("label", {}, el("span", {}, "Filter"), this.filter),
        el("label", {}, el("span", {}, "Order by"), this.order),
      ),
      this.summary,
      this.trouble,
      this.table.node,
    );
  }

  update(look) {
    this.look = look;
    const workers = look.workers;
    const wanted = this.filter.value.trim().toLowerCase();
    const shown = wanted
      ? workers.filter((row) => `${row.worker} ${row.state} ${row.mode} ${row.model ?? ""}`.toLowerCase().includes(wanted))
      : [...workers];
    const order = ORDERS[this.order.value].of;
    const ranked = new Map(shown.map((row) => [row, order(row)]));
    shown.sort((one, other) => {
      const [a, b] = [ranked.get(one), ranked.get(other)];
      return a[0] - b[0] || a[1] - b[1] || one.worker.localeCompare(other.worker);
    });
    const ready = workers.filter((row) => row.state === "ready").length;
    write(this.summary, `${count(ready)} of ${count(workers.length)} workers are ready; ${count(shown.length)} shown.`);
    this.trouble.hidden = ready > 0 || workers.length === 0;
    write(
      this.trouble,
      "No worker may be chosen now: requests wait or are answered 503. Open a worker to see why it is not ready.",
    );
    this.table.update(shown, workers.length ? "No worker matches this filter." : NO_WORKERS);
  }

  async show(name) {
    const body = el("div", {}, el("p", {}, "asking the gateway…"));
    this.openDetail(name, body);
    const answer = await ask(`workers/${encodeURIComponent(name)}`);
    if (answer.status !== 200) {
      body.replaceChildren(el("p", { class: "trouble" }, problemOf(answer)));
      return;
    }
    body.replaceChildren(...detail(answer.told));
  }
}

const NO_WORKERS =
  "No worker is named. Start the gateway with --worker-urls http://HOST:PORT, or add one to this one: " +
  'curl -X POST ADMIN_URL/workers -d \'{"url": "http://HOST:PORT"}\'';

/** A name and a value of the admin API as people say them. */
function inWords([name, value]) {
  const words = name.replaceAll("_", " ");
  const said = { true: "yes", false: "no" }[value] ?? String(value);
  return [words[0].toUpperCase() + words.slice(1), said];
}

function detail(worker) {
  const more = worker.detail ?? {};
  const check = more.check ?? {};
  const parts = [
    pairs(
      ["State", worker.state],
      ["Mode", worker.mode],
      ["Why", worker.reason],
      ["URL", worker.url],
      ["Model", worker.model_id],
      ["Engine", [more.engine, more.engine_version].filter(Boolean).join(" ")],
      ["Breaker", worker.breaker],
      ["Labels", Object.entries(worker.labels ?? {}).map(([name, value]) => `${name}=${value}`).join(", ")],
      ["Block", more.block_tokens ? `${more.block_tokens} tokens` : ""],
      ["Capacity", more.capacity_blocks ? `${count(more.capacity_blocks)} blocks` : ""],
      ["Does not tell", (more.degraded ?? []).join(", ")],
      ["Self-test", [check.status, check.unfinished && `the last one did not come to its end: ${check.unfinished}`].filter(Boolean).join("; ")],
    ),
  ];
  for (const alarm of more.alarms ?? []) {
    parts.push(el("h3", {}, `Alarm: ${alarm.kind}`), pairs(["Why", alarm.why], ["For", span(alarm.lasts_s * 1_000)], ["Rank", alarm.rank]));
  }
  if (more.isolation) {
    parts.push(el("h3", {}, "Tenants are kept apart by"), pairs(...Object.entries(more.isolation).map(inWords)));
  }
  const findings = (check.findings ?? []).filter((one) => one.state !== "ok");
  if (findings.length) {
    parts.push(el("h3", {}, "What its self-test says"));
    for (const one of findings) {
      parts.push(pairs(["What", `${one.what}: ${one.state}`], ["Expected", one.expected], ["Found", one.found], ["Remedy", one.remedy]));
    }
  }
  for (const rank of more.ranks ?? []) {
    parts.push(
      el("h3", {}, `Rank ${rank.worker}`),
      pairs(
        ["Incarnation", count(rank.incarnation)],
        ["In flight", count(rank.in_flight)],
        ["Queue", ms(rank.queue_ms)],
        ["Measured over predicted", rank.scale.toFixed(2)],
        ["Blocks told", count(rank.held_blocks)],
        ["In tiers", TIERS.filter((tier) => rank.held_in_tiers[tier]).map((tier) => `${tier} ${count(rank.held_in_tiers[tier])}`).join(", ")],
        ["Blocks expected", count(rank.predicted_blocks)],
        ["Events", `${rank.feed_state}, ${percent(rank.believed_share)} believed`],
        ["Gaps in events", count(rank.feed_stats?.gaps ?? 0)],
      ),
    );
  }
  return parts;
}

export class Prefixes {
  constructor() {
    this.table = new Table({
      caption: "Beginnings that spare most",
      key: (row) => row.prefix,
      columns: [
        { label: "Beginning, by its id", text: (row) => row.prefix, fill: (cell, row, text) => cell.replaceChildren(el("code", {}, text)) },
        { label: "Tokens", number: true, text: (row) => count(row.tokens) },
        { label: "Requests lately", number: true, text: (row) => row.requests.toFixed(1) },
        { label: "Tokens spared lately", number: true, text: (row) => brief(row.requests * row.tokens) },
        { label: "Workers that have it", number: true, text: (row) => count(row.holders) },
      ],
      empty: "No prompt has begun like an earlier one so far.",
    });
    this.node = el(
      "div",
      {},
      el(
        "p",
        { class: "note" },
        "What was found in caches of each prompt, cut to a power of two of blocks, and counted; a request weighs half after a minute. An id is half of a keyed digest: it tells nothing of the text.",
      ),
      this.table.node,
    );
  }

  update(look) {
    this.table.update(look.prefixes);
  }
}
