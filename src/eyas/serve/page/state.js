// The badge on top: the server's state, or why it is unknown.

import { Lost } from "./api.js";
import { byId } from "./dom.js";

const WORDS = { draining: "shutting down", failed: "engine failed" };

export function showState({ state, load, alarms }) {
  const alarm = alarms.some(({ raised }) => raised);
  // Answers in flight are counted as they come and go; the engine's own count may be a step old.
  const running = Math.max(0, load.in_flight - load.waiting);
  const work = [running && `${running} running`, load.waiting && `${load.waiting} waiting`].filter(Boolean).join(", ");
  const words = WORDS[state] ?? (work || "ready");
  show(alarm && state === "ok" ? "alarm" : state, alarm ? `alarm, ${words}` : words);
}

/** Disconnected, or refused such as for want of a key. */
export function showLost(error) {
  show("lost", error instanceof Lost ? "disconnected" : error.message);
}

function show(state, words) {
  const badge = byId("state");
  badge.dataset.state = state;
  badge.textContent = badge.title = words;
}
