// A table that is kept up to date in place: rows by key, cells written only where they changed. Rows
// are reached by keyboard: one stop for the whole table, arrows within it, Enter opens one.

import { el, write } from "./elements.js";

export class Table {
  /** `columns`: [{label, text(row), number, fill(cell, row)}]; `fill` instead of `text` makes its
   *  own nodes, again when `text` changes. */
  constructor({ caption, columns, key, open = null, empty = "" }) {
    this.columns = columns;
    this.keyOf = key;
    this.open = open;
    this.rows = new Map();
    this.body = el("tbody", { role: "rowgroup" });
    const heads = columns.map((column) =>
      el("th", { scope: "col", role: "columnheader", class: column.number ? "number" : "" }, column.label),
    );
    const head = el("thead", { role: "rowgroup" }, el("tr", { role: "row" }, ...heads));
    this.table = el("table", { role: "table" }, el("caption", {}, caption), head, this.body);
    this.empty = el("p", { class: "empty", hidden: true }, empty);
    this.node = el("div", { class: "table" }, this.table, this.empty);
    if (open) this.listen();
  }

  listen() {
    this.table.classList.add("opens");
    this.body.addEventListener("click", (event) => this.openAt(event.target.closest("tr")));
    this.body.addEventListener("focusin", (event) => this.stopAt(event.target.closest("tr")));
    this.body.addEventListener("keydown", (event) => {
      const row = event.target.closest("tr");
      const rows = this.body.rows;
      const to = {
        ArrowDown: row?.nextElementSibling,
        ArrowUp: row?.previousElementSibling,
        Home: rows[0],
        End: rows[rows.length - 1],
      }[event.key];
      if (to) {
        event.preventDefault();
        to.focus();
      } else if (event.key === "Enter" && row) {
        event.preventDefault();
        this.openAt(row);
      }
    });
  }

  openAt(row) {
    if (row) this.open(row.shown, row);
  }

  stopAt(row) {
    if (!row || row === this.stop) return;
    if (this.stop) this.stop.tabIndex = -1;
    row.tabIndex = 0;
    this.stop = row;
  }

  get hasFocus() {
    return this.body.contains(document.activeElement);
  }

  update(shown, emptyText = null) {
    const kept = new Set();
    let place = this.body.firstElementChild;
    for (const one of shown) {
      const key = String(this.keyOf(one));
      if (kept.has(key)) continue;
      kept.add(key);
      let row = this.rows.get(key);
      if (!row) this.rows.set(key, (row = this.makeRow()));
      this.fillRow(row, one);
      if (row === place) place = place.nextElementSibling;
      else this.body.insertBefore(row, place);
    }
    for (const [key, row] of this.rows) {
      if (kept.has(key)) continue;
      row.remove();
      this.rows.delete(key);
    }
    if (this.open && (!this.stop || !this.stop.isConnected)) this.stopAt(this.body.rows[0]);
    if (emptyText !== null) write(this.empty, emptyText);
    this.table.hidden = kept.size === 0;
    this.empty.hidden = kept.size > 0;
  }

  makeRow() {
    const cells = this.columns.map((column, index) =>
      el(index === 0 ? "th" : "td", {
        role: index === 0 ? "rowheader" : "cell",
        scope: index === 0 ? "row" : null,
        class: [column.number ? "number" : "", column.wide ? "wide" : ""].join(" ").trim(),
        "data-label": column.label,
      }),
    );
    const row = el("tr", { role: "row", tabindex: this.open ? "-1" : null }, ...cells);
    row.texts = this.columns.map(() => null);
    return row;
  }

  fillRow(row, one) {
    row.shown = one;
    this.columns.forEach((column, index) => {
      const text = column.text(one);
      if (row.texts[index] === text) return;
      row.texts[index] = text;
      const cell = row.children[index];
      if (column.fill) column.fill(cell, one, text);
      else cell.textContent = text;
    });
  }
}
