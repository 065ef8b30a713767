// Puts the page together: who is asking, which view is shown, and what is said when nothing comes.

import { clock, el, write } from "./elements.js";
import { Stream, ask, key } from "./stream.js";
import { Fleet, Prefixes } from "./fleet.js";
import { Figures, Traffic } from "./traffic.js";
import { Decisions } from "./decisions.js";
import { Audit, Revocations, Tenants } from "./records.js";

const byId = (id) => document.getElementById(id);
const FLEET_ACTS = ["workers.read", "decisions.read", "metrics.read"];

/** What the page says when it begins anew. */
const said = {
  keep: (text) => sessionStorage.setItem("trunkline.said", text),
  take: () => {
    const text = sessionStorage.getItem("trunkline.said") ?? "";
    sessionStorage.removeItem("trunkline.said");
    return text;
  },
};

class Page {
  constructor() {
    this.figures = new Figures();
    const open = (title, body) => this.openDetail(title, body);
    this.views = [
      ["fleet", "Fleet", FLEET_ACTS, new Fleet(open)],
      ["traffic", "Traffic", FLEET_ACTS, new Traffic()],
      ["prefixes", "Prefixes", FLEET_ACTS, new Prefixes()],
      ["decisions", "Decisions", FLEET_ACTS, new Decisions(open)],
      ["tenants", "Tenants", ["tenants.read"], new Tenants()],
      ["revocations", "Revocations", ["revocations.read"], new Revocations()],
      ["audit", "Audit", ["audit.read"], new Audit()],
    ].map(([name, title, acts, view]) => ({ name, title, acts, view, ...this.place(name, title, view) }));
    this.may = "";
    this.stream = new Stream({
      look: (told) => this.look(told),
      gone: (since, next, why) => this.gone(since, next, why),
      refused: (status, why) => this.refused(status, why),
    });
    this.listen();
  }

  place(name, title, view) {
    const link = el("a", { href: `#${name}`, hidden: true }, title);
    const section = el("section", { id: `view-${name}`, "aria-labelledby": `title-${name}`, hidden: true });
    section.append(el("h2", { id: `title-${name}` }, title), view.node);
    byId("views").append(link);
    byId("main").append(section);
    return { link, section };
  }

  listen() {
    addEventListener("hashchange", () => this.route());
    byId("door").addEventListener("submit", (event) => {
      event.preventDefault();
      key.set(byId("key").value.trim());
      byId("key").value = "";
      this.openDoor(false);
      this.stream.start();
    });
    byId("door-close").addEventListener("click", () => this.openDoor(false));
    byId("sign").addEventListener("click", () => this.sign());
    byId("detail-close").addEventListener("click", () => byId("detail").close());
    byId("detail").addEventListener("click", (event) => {
      if (event.target === byId("detail")) byId("detail").close();
    });
    document.querySelector(".skip").addEventListener("click", (event) => {
      event.preventDefault();
      byId("main").focus();
    });
    addEventListener("keydown", (event) => this.pressed(event));
  }

  pressed(event) {
    const isTyping = event.target.closest?.("input, select, textarea");
    if (event.key === "/" && !isTyping && !event.ctrlKey && !event.metaKey && !byId("detail").open) {
      const filter = this.shown?.section.querySelector("input.filter");
      if (filter) {
        event.preventDefault();
        filter.focus();
      }
    } else if (event.key === "Escape" && isTyping && event.target.matches("input.filter")) {
      event.target.value = "";
      event.target.dispatchEvent(new Event("input"));
      event.target.blur();
    } else if (event.key === "Escape" && event.target.closest?.("tr")) {
      event.target.blur();
    }
  }

  async start() {
    const door = await ask("dashboard/door");
    const isShut = Boolean(door.told?.key) && !key.get();
    const why = said.take();
    if (isShut || why) this.openDoor(true, why, !isShut);
    if (!isShut) this.stream.start();
  }

  // -- who is asking -----------------------------------------------------------------------------

  sign() {
    if (!key.get()) {
      this.openDoor(true, "Another key than none: one with a role sees what that role may.", true);
      return;
    }
    this.leave();
  }

  openDoor(isOpen, why = "", mayClose = false) {
    byId("door").hidden = !isOpen;
    byId("door-close").hidden = !mayClose;
    if (why) write(byId("door-why"), why);
    if (isOpen) {
      if (!mayClose) this.say("signed out", "idle");
      byId("key").focus();
    }
  }

  refused(status, why) {
    const text =
      status === 401
        ? "This key is not good here (any more). Whose else?"
        : `This key may not see the dashboard: ${why}. Another one?`;
    this.leave(text);
  }

  /** Nothing of what somebody saw stays for whoever comes next: the page begins anew. */
  leave(text = "") {
    this.stream.stop();
    key.drop();
    said.keep(text);
    if (this.may) location.reload();
    else this.openDoor(true, said.take());
  }

  // -- what comes --------------------------------------------------------------------------------

  look(told) {
    this.banner("");
    this.say(`live, ${clock(Date.now())}, ${told.actor}`, "good");
    document.body.classList.remove("stale");
    byId("all").hidden = false;
    byId("sign").hidden = false;
    write(byId("sign"), key.get() ? "Sign out" : "Sign in");
    const may = told.may.join(" ");
    if (may !== this.may) this.permit(told.may);
    this.may = may || "nothing";
    this.told = told;
    byId("figures").hidden = told.look === null;
    if (told.look) this.figures.update(told.look);
    if (told.look?.processes > 1) write(byId("link-text"), `live, ${clock(Date.now())}, ${told.actor}, ${told.look.processes} processes`);
    this.feed();
  }

  permit(may) {
    for (const view of this.views) {
      view.isOpen = view.acts.every((act) => may.includes(act));
      view.link.hidden = !view.isOpen;
    }
    this.route();
  }

  route() {
    const open = this.views.filter((view) => view.isOpen);
    const named = open.find((view) => `#${view.name}` === location.hash);
    const next = named ?? (this.shown?.isOpen ? this.shown : open[0]);
    if (next === this.shown) return;
    for (const view of this.views) {
      view.section.hidden = view !== next;
      if (view === next) view.link.setAttribute("aria-current", "page");
      else view.link.removeAttribute("aria-current");
    }
    this.shown = next;
    document.title = next ? `${next.title} · trunkline` : "trunkline";
    this.feed();
  }

  feed() {
    const { shown, told } = this;
    if (!told || !shown) return;
    // What is not shown is not drawn; rates are taken from each look all the same.
    if (told.look) for (const { name, view } of this.views) if (name === "traffic" && shown.name !== name) view.rateOf(told.look);
    if (told.look || !FLEET_ACTS.includes(shown.acts[0])) shown.view.update(told.look);
  }

  gone(sinceMs, nextMs, why) {
    const wait = Math.max(1, Math.round(nextMs / 1_000));
    this.banner(`Gateway not answering since ${clock(sinceMs)}, trying again (in ${wait} s)${why ? `: ${why}` : ""}`);
    this.say("not connected", "bad");
    document.body.classList.add("stale");
  }

  // -- what is said ------------------------------------------------------------------------------

  banner(text) {
    write(byId("banner"), text);
    byId("banner").hidden = !text;
  }

  say(text, tone) {
    write(byId("link-text"), text);
    byId("link").className = tone;
  }

  openDetail(title, body) {
    write(byId("detail-title"), title);
    byId("detail-body").replaceChildren(body);
    if (!byId("detail").open) byId("detail").showModal();
    byId("detail").scrollTop = 0;
  }
}

new Page().start();
