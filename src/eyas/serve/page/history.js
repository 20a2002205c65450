// Snapshots of the server in the last hour, and the differences of counts between them, by the server's clock.

import { between } from "./flow.js";

export const RECENT = 60; // seconds that "now" means where a single interval would say too little
const KEPT = 3600; // seconds
const FINE = 300; // seconds that are kept look by look; what is older is thinned
const COARSE = 10; // seconds between looks that are older
const POINTS = 150; // of a line: more would be noise

export class History {
  constructor() {
    this.samples = [];
  }

  /** Add a snapshot. One with the same time is ignored; one older than the last comes from another server. */
  add(status) {
    const last = this.samples.at(-1);
    if (last && status.at_seconds === last.at_seconds) return;
    if (last && status.at_seconds < last.at_seconds) this.samples = [];
    this.samples.push(status);
    const [oldest, fine] = [status.at_seconds - KEPT, status.at_seconds - FINE];
    let before = -Infinity;
    this.samples = this.samples.filter(({ at_seconds: at }) => {
      const stays = at >= oldest && (at >= fine || at - before >= COARSE - 1);
      if (stays) before = at;
      return stays;
    });
  }

  /** Add the server's samples from before the page was open, or while it was hidden. */
  merge(samples) {
    const known = new Set(this.samples.map((sample) => sample.at_seconds));
    const missed = samples.filter((sample) => !known.has(sample.at_seconds) && sample.at_seconds < this.latest.at_seconds);
    this.samples = [...this.samples, ...missed].sort((a, b) => a.at_seconds - b.at_seconds);
  }

  /** Whether the server has samples that the page lacks before this snapshot. */
  misses(status) {
    return !this.latest || status.at_seconds - this.latest.at_seconds > 2 * COARSE;
  }

  get latest() {
    return this.samples.at(-1) ?? null;
  }

  /** Points (seconds before now, value) of a value in a single snapshot. */
  gauge(read, span) {
    const now = this.latest?.at_seconds;
    return this.thinned(span).map((sample) => ({ x: sample.at_seconds - now, y: read(sample) }));
  }

  /** Points of a value between two snapshots. */
  flow(read, span) {
    const now = this.latest?.at_seconds;
    const looks = this.thinned(span);
    return looks.slice(1).map((sample, i) => ({ x: sample.at_seconds - now, y: read(between(looks[i], sample)) }));
  }

  /** The differences of the latest snapshots. */
  recent(seconds = RECENT) {
    const last = this.latest;
    if (this.samples.length < 2) return null;
    const from = this.samples.findLast((sample) => sample.at_seconds <= last.at_seconds - seconds) ?? this.samples[0];
    return between(from, last);
  }

  /** Snapshots of the last seconds, including the latest, at most as many as a line shows. */
  thinned(span) {
    const found = [];
    for (const sample of this.samples.toReversed()) {
      if (sample.at_seconds < this.latest.at_seconds - span) break;
      if (!found.length || found.at(-1).at_seconds - sample.at_seconds >= span / POINTS) found.push(sample);
    }
    return found.reverse();
  }
}
