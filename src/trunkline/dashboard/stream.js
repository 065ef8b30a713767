// The gateway's snapshots, as they come; and questions to it beside them. The key goes in a header,
// which an EventSource cannot send: hence the reading of the stream by hand.

const KEPT = "trunkline.key";
const SILENT_MS = 5_000; // of one snapshot a second
const FIRST_PAUSE_MS = 500;
const LONGEST_PAUSE_MS = 10_000;

export const key = {
  get: () => sessionStorage.getItem(KEPT) ?? "",
  set: (text) => sessionStorage.setItem(KEPT, text),
  drop: () => sessionStorage.removeItem(KEPT),
};

function headers() {
  const given = key.get();
  return given ? { authorization: `Bearer ${given}` } : {};
}

/** What the gateway answers: its status (0 where it does not) and what it says. */
export async function ask(path) {
  try {
    const answer = await fetch(path, { headers: headers(), cache: "no-store" });
    const told = await answer.json().catch(() => null);
    return { status: answer.status, told };
  } catch {
    return { status: 0, told: null };
  }
}

export function problemOf(answer) {
  if (answer.status === 0) return "The gateway does not answer.";
  return answer.told?.error?.message ?? `The gateway answers ${answer.status}.`;
}

/** Watches until told to stop: `on.look(snapshot)`, `on.gone(sinceMs, nextMs, why)`,
 *  `on.refused(status, why)`. */
export class Stream {
  constructor(on) {
    this.on = on;
    this.run = 0;
    this.wake = () => {};
    addEventListener("online", () => this.wake());
    document.addEventListener("visibilitychange", () => {
      if (!document.hidden) this.wake();
    });
  }

  async start() {
    const run = ++this.run;
    this.abort?.abort();
    let lastSeenMs = Date.now();
    let pauseMs = FIRST_PAUSE_MS;
    while (run === this.run) {
      const outcome = await this.once(run, () => {
        lastSeenMs = Date.now();
        pauseMs = FIRST_PAUSE_MS;
      });
      if (run !== this.run) return;
      if (outcome.refused) {
        this.on.refused(outcome.status, outcome.why);
        return;
      }
      this.on.gone(lastSeenMs, pauseMs, outcome.why);
      await this.pause(pauseMs * (0.8 + 0.4 * Math.random()));
      pauseMs = Math.min(pauseMs * 2, LONGEST_PAUSE_MS);
    }
  }

  stop() {
    this.run++;
    this.abort?.abort();
    this.wake();
  }

  pause(forMs) {
    return new Promise((done) => {
      const timer = setTimeout(done, forMs);
      this.wake = () => {
        clearTimeout(timer);
        done();
      };
    });
  }

  /** One connection, to its end: why it ended. */
  async once(run, seen) {
    const abort = (this.abort = new AbortController());
    let watchdog = setTimeout(() => abort.abort(), SILENT_MS);
    const alive = () => {
      clearTimeout(watchdog);
      watchdog = setTimeout(() => abort.abort(), SILENT_MS);
    };
    try {
      const answer = await fetch("dashboard/events", {
        headers: headers(),
        cache: "no-store",
        signal: abort.signal,
      });
      if (!answer.ok) {
        const told = await answer.json().catch(() => null);
        const why = told?.error?.message ?? `it answers ${answer.status}`;
        const refused = answer.status === 401 || answer.status === 403;
        return { refused, status: answer.status, why };
      }
      const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
      let text = "";
      for (;;) {
        const { value, done } = await reader.read();
        if (done) return { why: "" };
        alive();
        text += value;
        const frames = text.split("\n\n");
        text = frames.pop();
        for (const frame of frames) {
          const [head, data] = frame.split("\n");
          if (head === "event: over") return { refused: true, status: 401, why: "its key ended" };
          if (head !== "event: look" || !data.startsWith("data: ") || run !== this.run) continue;
          const look = JSON.parse(data.slice(6));
          seen();
          this.on.look(look);
        }
      }
    } catch {
      return { why: "" };
    } finally {
      clearTimeout(watchdog);
      abort.abort();
    }
  }
}
