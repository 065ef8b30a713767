// Tenants, revocations and the end of the audit log: asked for while they are looked at, by those
// who may. The gateway refuses them to all others, whatever this page shows.

import { NONE, brief, bytes, count, el, ms, moment, write } from "./elements.js";
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
    write(this.said, `${count(rows.length)} shown.`);
  }
}

function limit(value, shown = brief) {
  return value === null || value === undefined ? "none" : shown(value);
}

export class Tenants extends Asked {
  constructor() {
    super({
      path: "tenants?limit=1000",
      everyMs: 10_000,
      rowsOf: (told) => told.tenants,
      note: "Tenants within your reach, with their policies. They are changed by the command trunkline tenants.",
      table: new Table({
        caption: "Tenants",
        key: (row) => row.id,
        columns: [
          { label: "Tenant", text: (row) => row.tenant },
          { label: "Organisation", text: (row) => row.org },
          {
            label: "State",
            text: (row) => (row.state === "active" ? "● active" : `▲ ${row.state}`),
            fill: (cell, row, text) => cell.replaceChildren(el("span", { class: `state ${row.state === "active" ? "good" : "bad"}` }, text)),
          },
          { label: "Shares by", text: (row) => row.effective_scope },
          { label: "Weight", number: true, text: (row) => String(row.policy.weight) },
          { label: "Priority", text: (row) => row.policy.priority },
          { label: "Requests a second", number: true, text: (row) => limit(row.policy.requests_per_s) },
          { label: "Tokens a second", number: true, text: (row) => limit(row.policy.tokens_per_s) },
          { label: "Cache floor", number: true, text: (row) => limit(row.policy.cache_floor_bytes || null, bytes) },
          { label: "Cache cap", number: true, text: (row) => limit(row.policy.cache_cap_bytes, bytes) },
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
