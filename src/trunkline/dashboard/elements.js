// Elements, and how numbers are written. Data only ever becomes text: nothing here parses markup.

export function el(tag, given = {}, ...children) {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(given)) {
    if (value === undefined || value === null || value === false) continue;
    if (name === "class") made.className = value;
    else if (name.startsWith("on")) made.addEventListener(name.slice(2), value);
    else made.setAttribute(name, value === true ? "" : value);
  }
  made.append(...children.filter((child) => child !== null && child !== undefined));
  return made;
}

export function svg(tag, given = {}, ...children) {
  const made = document.createElementNS("http://www.w3.org/2000/svg", tag);
  for (const [name, value] of Object.entries(given)) made.setAttribute(name, value);
  made.append(...children);
  return made;
}

/** Writes a text only where it is another one, so that a page at rest costs nothing. */
export function write(node, text) {
  if (node.textContent !== text) node.textContent = text;
}

const whole = new Intl.NumberFormat("en", { maximumFractionDigits: 0 });
const tenths = new Intl.NumberFormat("en", { minimumFractionDigits: 1, maximumFractionDigits: 1 });
const short = new Intl.NumberFormat("en", { notation: "compact", maximumFractionDigits: 1 });

export const NONE = "–";

export function count(value) {
  return value === null || value === undefined ? NONE : whole.format(value);
}

export function brief(value) {
  if (value === null || value === undefined) return NONE;
  return Math.abs(value) < 10_000 ? whole.format(value) : short.format(value);
}

const UNITS = ["B", "kB", "MB", "GB", "TB", "PB"];

export function bytes(value) {
  let [left, place] = [value, 0];
  while (left >= 1_000 && place < UNITS.length - 1) [left, place] = [left / 1_000, place + 1];
  return `${left < 10 && place ? tenths.format(left) : whole.format(left)} ${UNITS[place]}`;
}

export function share(part, all) {
  return all ? `${tenths.format((100 * part) / all)} %` : NONE;
}

export function percent(value) {
  return value === null || value === undefined ? NONE : `${whole.format(value * 100)} %`;
}

export function ms(value) {
  if (value === null || value === undefined) return NONE;
  return Math.abs(value) < 10 ? `${tenths.format(value)} ms` : `${whole.format(value)} ms`;
}

/** A length of time that may be long: 640 ms, 3.4 s, 12 min, 5.1 h. */
export function span(value) {
  if (value === null || value === undefined) return NONE;
  const size = Math.abs(value);
  if (size < 1_000) return ms(value);
  if (size < 120_000) return `${tenths.format(value / 1_000)} s`;
  if (size < 7_200_000) return `${tenths.format(value / 60_000)} min`;
  return `${tenths.format(value / 3_600_000)} h`;
}

export function clock(atMs) {
  const at = new Date(atMs);
  return at.toLocaleTimeString("en-GB", { hour12: false });
}

export function moment(atMs) {
  return new Date(atMs).toISOString().replace("T", " ").slice(0, 19) + "Z";
}

/** A bar of some share of its place; what it stands for is written beside it. */
export function bar(value, tone = "") {
  const inner = el("span", { class: `bar-in ${tone}` });
  inner.style.width = `${Math.max(0, Math.min(1, value || 0)) * 100}%`;
  return el("span", { class: "bar", "aria-hidden": "true" }, inner);
}

export function pairs(...given) {
  const list = el("dl", { class: "pairs" });
  for (const [name, value] of given) {
    if (value === undefined || value === null || value === "") continue;
    list.append(el("div", {}, el("dt", {}, name), el("dd", {}, value)));
  }
  return list;
}
