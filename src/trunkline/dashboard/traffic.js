// What the fleet was asked, what it spared, and what the least queue would have done.

import { NONE, bar, brief, count, el, ms, share, span, svg, write } from "./elements.js";
import { Table } from "./table.js";

const KEPT_LOOKS = 120; // two minutes of one a second

/** The line of figures that stands above every view. */
export class Figures {
  constructor() {
    this.tiles = new Map();
    this.node = document.getElementById("figures");
    for (const [name, label] of [
      ["false", "False hits"],
      ["ready", "Workers ready"],
      ["hits", "Prompt tokens hit"],
      ["spared", "Prefill avoided"],
      ["ttft", "TTFT p95, observed"],
      ["saved", "Net time saved"],
    ]) {
      const value = el("strong", {}, NONE);
      const more = el("span", { class: "more" });
      this.node.append(el("div", { class: `tile ${name}` }, el("span", { class: "label" }, label), value, more));
      this.tiles.set(name, { value, more });
    }
  }

  set(name, value, more) {
    const tile = this.tiles.get(name);
    write(tile.value, value);
    write(tile.more, more);
  }

  update(look) {
    const { traffic, integrity, workers } = look;
    const wrong = integrity.false_hits + integrity.leaking;
    this.set("false", count(wrong), whatWasLookedAt(integrity));
    this.node.classList.toggle("leaks", wrong > 0);
    this.set(
      "hits",
      share(traffic.hit_tokens, traffic.prompt_tokens),
      `${brief(traffic.hit_tokens)} of ${brief(traffic.prompt_tokens)} tokens`,
    );
    this.set("spared", span(traffic.saved_prefill_ms), "predicted, since start");
    const { observed, chosen, least_queue: least } = traffic.foregone;
    const predicted = least ? `predicted ${ms(chosen.p95)}, by least queue ${ms(least.p95)}` : "nothing has ended";
    this.set("ttft", ms(observed?.p95), observed ? predicted : `none streamed: ${predicted}`);
    this.set("saved", span(traffic.net_saved_ms), "predicted, against a cache-blind choice");
    const ready = workers.filter((row) => row.state === "ready").length;
    this.set("ready", `${count(ready)} of ${count(workers.length)}`, `${count(traffic.active)} ${traffic.active === 1 ? "request" : "requests"} in flight`);
  }
}

function whatWasLookedAt({ false_hits: hits, leaking, tested, workers, refused_pulls: refused }) {
  if (leaking) return `▲ ${count(leaking)} workers reuse KV under another salt`;
  if (hits) return "▲ answers reused KV though their salt was their own";
  const pulls = refused ? `; ${count(refused)} pulls refused for wrong bytes` : "";
  if (!tested) return `no worker's isolation has been tested${pulls}`;
  return `${count(tested)} of ${count(workers)} workers tested for it${pulls}`;
}

export class Traffic {
  constructor() {
    this.looks = [];
    this.rates = el("p", { class: "summary" });
    this.compared = new Table({
      caption: "Time to the first token",
      key: (row) => row.name,
      columns: [
        { label: "Of what", text: (row) => row.name },
        ...["p50", "p95", "p99"].map((rank) => ({
          label: rank,
          number: true,
          text: (row) => `${row.of[rank]} of ${row.most}`,
          fill: (cell, row) => cell.replaceChildren(el("span", {}, ms(row.of[rank])), bar(row.most && row.of[rank] / row.most, row.tone)),
        })),
      ],
      empty: "No choice has ended so far.",
    });
    this.verdict = el("p", { class: "verdict" });
    this.basis = el("p", { class: "note" });
    this.chart = el("div", { class: "chart" });
    this.reasons = counts("Why workers were chosen", "Reason");
    this.codes = counts("How requests ended", "Answer");
    this.node = el(
      "div",
      {},
      this.rates,
      this.chart,
      el("h3", {}, "Against the least queue: an estimate"),
      this.verdict,
      this.compared.node,
      this.basis,
      el("div", { class: "columns" }, this.reasons.node, this.codes.node),
    );
  }

  update(look) {
    const { traffic } = look;
    const rate = this.rateOf(look);
    const line = [
      `${brief(rate.decisions)} choices a second`,
      `${brief(rate.tokens)} prompt tokens a second`,
      `${share(rate.hits, rate.tokens)} of them hit now`,
      `${count(traffic.active)} in flight`,
      `${count(traffic.waiting)} waiting for a turn`,
      `${count(traffic.refused)} refused by the gateway since start`,
      `${count(traffic.over_claims)} over-claims`,
    ];
    write(this.rates, line.join(" · "));
    this.compare(traffic.foregone, traffic, look.processes);
    this.reasons.update(traffic.reasons);
    this.codes.update(traffic.requests);
    this.draw();
  }

  compare(foregone, traffic, processes) {
    const rows = [
      { name: "Our choice, predicted", of: foregone.chosen, tone: "ours" },
      { name: "Least queue, predicted", of: foregone.least_queue, tone: "theirs" },
      { name: "Observed, streamed answers", of: foregone.observed, tone: "seen" },
      { name: "The same answers, predicted", of: foregone.predicted_of_observed, tone: "ours" },
      { name: "Observed, since start", of: traffic.ttft, tone: "seen" },
    ].filter((row) => row.of);
    const most = Math.max(0, ...rows.map((row) => row.of.p99));
    this.compared.update(rows.map((row) => ({ ...row, most })));
    const when = foregone.saved_ms_each >= 0 ? "sooner" : "later";
    write(
      this.verdict,
      foregone.looked_at
        ? `On average an answer was predicted to begin ${ms(Math.abs(foregone.saved_ms_each))} ${when} than by the least queue; ` +
            `${share(foregone.dearer_share, 1)} of them later. In all ${span(foregone.saved_ms)} saved over this sample.`
        : "Nothing has ended so far.",
    );
    write(
      this.basis,
      `From ${count(foregone.looked_at)} choices that ended within the last ${span(foregone.span_ms)} (a sample: at most 64 a second), ` +
        `${count(foregone.streamed)} of them streamed. For the same request at the same moment, the candidate with the least queue has its own predicted ` +
        "queue, transfer and miss in the receipt. It is an estimate for single requests: a fleet that always went by the least queue would hit " +
        "less often than this, which only a replay shows (trunkline replay --policies)." +
        (processes > 1 ? ` Of ${count(processes)} processes, quantiles are those of the one where they are worst.` : ""),
    );
  }

  rateOf(look) {
    const looks = this.looks;
    if (looks[looks.length - 1]?.at === look.at_ms) looks.pop(); // a second glance at the same
    if (looks.length && look.traffic.decisions < looks[looks.length - 1].decisions) looks.length = 0; // begun anew
    looks.push({
      at: look.at_ms,
      decisions: look.traffic.decisions,
      tokens: look.traffic.prompt_tokens,
      hits: look.traffic.hit_tokens,
      observed: look.traffic.foregone.observed?.p95 ?? null,
      chosen: look.traffic.foregone.chosen?.p95 ?? null,
      least: look.traffic.foregone.least_queue?.p95 ?? null,
    });
    if (looks.length > KEPT_LOOKS) looks.shift();
    const from = looks[Math.max(0, looks.length - 11)];
    const to = looks[looks.length - 1];
    const seconds = Math.max(0.001, (to.at - from.at) / 1_000);
    const per = (name) => (to[name] - from[name]) / seconds;
    return { decisions: per("decisions"), tokens: per("tokens"), hits: per("hits") };
  }

  draw() {
    const seen = this.looks.filter((one) => one.least !== null);
    if (seen.length < 3) {
      this.chart.hidden = true;
      return;
    }
    this.chart.hidden = false;
    const most = Math.max(1, ...seen.flatMap((one) => [one.observed ?? 0, one.least, one.chosen]));
    const first = seen[0].at;
    const width = Math.max(1, seen[seen.length - 1].at - first);
    const line = (name) =>
      seen
        .filter((one) => one[name] !== null)
        .map((one) => `${((one.at - first) / width) * 600},${96 - (one[name] / most) * 88}`)
        .join(" ");
    const label =
      `TTFT p95 over ${span(width)}: observed ${ms(seen[seen.length - 1].observed)}, predicted ${ms(seen[seen.length - 1].chosen)}, ` +
      `least queue predicted ${ms(seen[seen.length - 1].least)}; the top is ${ms(most)}.`;
    this.chart.replaceChildren(
      svg(
        "svg",
        { viewBox: "0 0 600 100", role: "img", "aria-label": label, preserveAspectRatio: "none" },
        ...[8, 52, 96].map((y) => svg("polyline", { points: `0,${y} 600,${y}`, class: "line rule" })),
        svg("polyline", { points: line("least"), class: "line theirs" }),
        svg("polyline", { points: line("chosen"), class: "line ours" }),
        svg("polyline", { points: line("observed"), class: "line seen" }),
      ),
      el("p", { class: "scale", "aria-hidden": "true" }, ...[most, most / 2, 0].map((value) => el("span", {}, ms(value)))),
      el("p", { class: "span", "aria-hidden": "true" }, el("span", {}, `${span(width)} ago`), el("span", {}, "now")),
      el(
        "p",
        { class: "legend" },
        el("span", { class: "key seen" }, "━ observed"),
        el("span", { class: "key ours" }, "· · predicted"),
        el("span", { class: "key theirs" }, "– – least queue, predicted"),
        el("span", {}, "p95 of each"),
      ),
    );
  }
}

/** A small table of names and counts, the largest first. */
function counts(caption, label) {
  const table = new Table({
    caption,
    key: (row) => row.name,
    columns: [
      { label, text: (row) => row.name },
      { label: "Count", number: true, text: (row) => count(row.count) },
      { label: "Share", number: true, text: (row) => share(row.count, row.all) },
    ],
    empty: "None so far.",
  });
  return {
    node: table.node,
    update(given) {
      const all = Object.values(given).reduce((sum, one) => sum + one, 0);
      const rows = Object.entries(given).map(([name, number]) => ({ name, count: number, all }));
      table.update(rows.sort((one, other) => other.count - one.count || one.name.localeCompare(other.name)));
    },
  };
}
