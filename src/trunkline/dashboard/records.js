// Tenants, revocations and the end of the audit log: asked for while they are looked at, by those
// who may. The gateway refuses them to all others, whatever this page shows.

import { NONE, brief, bytes, count, el, ms, moment, share, write } from "./elements.js";
import { ask, problemOf } from "./stream.js";
import { Table } from "./table.js";

/** A view that asks one path again and again while it is shown. */
class Asked {
  constructor({ path, everyMs, rowsOf, note, table }) {
    this.path = path;
    this.everyMs = everyMs;
    this.rowsOf = rowsOf;
    this.table = table;
    this.said = el("p", { class: "summary", role: "status" });
    this.node = el("div", {}, el("p", { class: "note" }, note), this.said, table.node);
  }

  update() {
    if (Date.now() - (this.askedAt ?? 0) >= this.everyMs) this.ask();
  }

  async ask() {
    this.askedAt = Date.now();
    const answer = await ask(this.path);
    if (answer.status !== 200) {
      write(this.said, problemOf(answer));
      return;
    }
    const rows = this.rowsOf(answer.told);
    this.table.update(rows);
    write(this.said, `${count(rows.length)} shown${answer.told.next ? "; there are more" : ""}.`);
  }
}

/** Limits, each with what it is of; those that are not set are left out. */
function listed(...limits) {
  const set = limits.filter(([value]) => value !== null && value !== undefined);
  return set.map(([value, what, shown = brief]) => `${shown(value)} ${what}`).join(", ") || "no limit";
}

/** The tenant that has asked for most first; behind all, those that are not counted one by one. */
function tenantsOf(told) {
  const asked = (row) => row.usage?.prompt_tokens ?? 0;
  const rows = [...told.tenants].sort((one, other) => asked(other) - asked(one));
  const hasOthers = told.others && Object.values(told.others).some((number) => number > 0);
  return hasOthers ? [...rows, { id: "others", tenant: "all others", usage: told.others }] : rows;
}

function used(shown) {
  return (row) => (row.usage ? shown(row.usage) : NONE);
}

function ruled(shown) {
  return (row) => (row.policy ? shown(row.policy) : NONE);
}

function stateOf(row) {
  if (!row.state) return NONE;
  return row.state === "active" ? "● active" : `▲ ${row.state}`;
}

export class Tenants extends Asked {
  constructor() {
    super({
      path: "tenants?limit=1000",
      everyMs: 10_000,
      rowsOf: tenantsOf,
      note: "Tenants within your reach, with what they asked for since this gateway started and their policies. These are changed by the command trunkline tenants.",
      table: new Table({
        caption: "Tenants",
        key: (row) => row.id,
        columns: [
          { label: "Tenant", text: (row) => row.tenant },
          { label: "Organisation", text: (row) => row.org ?? NONE },
          {
            label: "State",
            text: stateOf,
            fill: (cell, row, text) => cell.replaceChildren(el("span", { class: `state ${{ active: "good", revoked: "bad" }[row.state] ?? ""}` }, text)),
          },
          { label: "Requests", number: true, text: used((usage) => brief(usage.requests)) },
          { label: "Prompt tokens", number: true, text: used((usage) => brief(usage.prompt_tokens)) },
          { label: "Hits", number: true, text: used((usage) => share(usage.hit_tokens, usage.reported_tokens)) },
          { label: "Shares by", text: (row) => row.effective_scope ?? NONE },
          { label: "Priority", text: ruled((policy) => (policy.weight === 1 ? policy.priority : `${policy.priority}, weight ${policy.weight}`)) },
          { label: "At most, a second", text: ruled((policy) => listed([policy.requests_per_s, "requests"], [policy.tokens_per_s, "tokens"])) },
          { label: "Cache", text: ruled((policy) => listed([policy.cache_floor_bytes || null, "kept", bytes], [policy.cache_cap_bytes, "at most", bytes])) },
        ],
        empty: "No tenant is within your reach.",
      }),
    });
  }
}

export class Revocations extends Asked {
  constructor() {
    super({
      path: "revocations?limit=50",
      everyMs: 3_000,
      rowsOf: (told) => told.revocations,
      note: "Receipts of this life of the gateway, the newest first. Each was in force everywhere before its command was answered.",
      table: new Table({
        caption: "Revocations and invalidations",
        key: (row) => `${row.process ?? ""} ${row.rev}`,
        columns: [
          { label: "Revision", text: (row) => count(row.rev) },
          { label: "What", text: (row) => row.verb },
          { label: "Of", text: (row) => row.subject },
          { label: "In force after", number: true, text: (row) => ms(row.ms) },
          { label: "Acknowledged", number: true, text: (row) => count(row.acked_count) },
          { label: "Fenced", number: true, text: (row) => count(row.fenced_count) },
          { label: "Streams ended", number: true, text: (row) => count(row.aborted) },
          { label: "Blocks condemned", number: true, text: (row) => count(row.condemned_blocks) },
          { label: "Erased", text: (row) => erased(row) },
          { label: "Audit", text: (row) => row.audit },
        ],
        empty: "Nothing was revoked or invalidated in this life of the gateway.",
      }),
    });
  }
}

function erased(row) {
  const done = row.erasures.filter((one) => one.done).length;
  return row.erasures.length ? `${row.erase}: ${done} of ${row.erasures.length} holders` : row.erase;
}

export class Audit extends Asked {
  constructor() {
    super({
      path: "audit?limit=50",
      everyMs: 3_000,
      rowsOf: (told) => [...told.records].reverse(),
      note: "The end of the audit log, the newest first. The command trunkline audit verify checks all of it.",
      table: new Table({
        caption: "Audit records",
        key: (row) => row.seq,
        columns: [
          { label: "Record", text: (row) => count(row.seq) },
          { label: "At", text: (row) => (row.ts_wall ? moment(row.ts_wall) : NONE) },
          { label: "Kind", text: (row) => row.kind ?? NONE },
          { label: "Act", text: (row) => row.action ?? NONE },
          { label: "Of", text: (row) => row.subject ?? NONE },
          { label: "By", text: (row) => row.actor ?? NONE },
          { label: "Result", text: (row) => row.result ?? NONE },
          { label: "Revision", number: true, text: (row) => (row.rev ? count(row.rev) : NONE) },
          { label: "Reason", wide: true, text: (row) => row.reason ?? NONE },
        ],
        empty: "No record is within your reach.",
      }),
    });
  }
}
