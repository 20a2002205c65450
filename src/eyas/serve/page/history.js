// What was seen of the server lately, and what happened between two looks: counts differenced over the server's clock.

export const WINDOW = 300; // seconds that are kept
export const RECENT = 60; // seconds that "now" means where a single interval would say too little

export class History {
  constructor() {
    this.samples = [];
  }

  /** Keep a look. One that the server took earlier already is no news; one before the last is another server. */
  add(status) {
    const last = this.samples.at(-1);
    if (last && status.at_seconds === last.at_seconds) return;
    if (last && status.at_seconds < last.at_seconds) this.samples = [];
    this.samples.push(status);
    const oldest = status.at_seconds - WINDOW;
    while (this.samples[0].at_seconds < oldest) this.samples.shift();
  }

  get latest() {
    return this.samples.at(-1) ?? null;
  }

  /** Seconds worth showing: a minute at first, more as there is more. */
  get span() {
    const covered = this.samples.length ? this.latest.at_seconds - this.samples[0].at_seconds : 0;
    return [60, 120].find((seconds) => covered <= seconds) ?? WINDOW;
  }

  /** Points (seconds before now, value) of something a single look tells. */
  gauge(read) {
    const now = this.latest?.at_seconds;
    return this.samples.map((sample) => ({ x: sample.at_seconds - now, y: read(sample) }));
  }

  /** Points of something that happened between two looks. */
  flow(read) {
    const now = this.latest?.at_seconds;
    return this.samples.slice(1).map((sample, i) => ({
      x: sample.at_seconds - now,
      y: read(between(this.samples[i], sample)),
    }));
  }

  /** What happened lately. */
  recent(seconds = RECENT) {
    const last = this.latest;
    if (this.samples.length < 2) return null;
    const from = this.samples.findLast((sample) => sample.at_seconds <= last.at_seconds - seconds) ?? this.samples[0];
    return between(from, last);
  }
}

/** What happened from one look to another. */
function between(earlier, later) {
  const [a, b] = [earlier.counts, later.counts];
  const depths = [...new Set([...Object.keys(a.rows_by_depth), ...Object.keys(b.rows_by_depth)])];
  return {
    seconds: later.at_seconds - earlier.at_seconds,
    tokens: b.tokens - a.tokens,
    passes: b.passes - a.passes,
    drafts: b.drafts - a.drafts,
    accepted: b.accepted_tokens - a.accepted_tokens,
    acceptedByDepth: b.accepted_by_depth.map((count, i) => count - (a.accepted_by_depth[i] ?? 0)),
    rowsByDepth: Object.fromEntries(depths.map((depth) => [depth, increase(a, b, depth)])),
  };
}

/** A replaced engine counts its choices anew: less than before means all of it is new. */
function increase(a, b, depth) {
  const [before, after] = [a.rows_by_depth[depth] ?? 0, b.rows_by_depth[depth] ?? 0];
  return after < before ? after : after - before;
}

export const acceptanceLength = (flow) => (flow && flow.drafts > 0 ? 1 + flow.accepted / flow.drafts : null);

export const tokensPerSecond = (flow) => (flow && flow.seconds > 0 ? flow.tokens / flow.seconds : null);
