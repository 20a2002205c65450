// What the dashboard draws: over time, and by depth.

import { QUEUE_FULL, acceptanceLength, errorsOf, quantile, tokensPerSecond } from "./flow.js";

const perMinute = (counts) => (flow) => (flow.seconds > 0 ? (60 * errorsOf(flow.errors, counts)) / flow.seconds : null);

const quantiles = (of) => (history, span) =>
  [0.5, 0.95].map((share) => history.flow((flow) => quantile(flow[of], share), span));

/** Moments (seconds before now) from which another drafter was at work. */
function drafterChanges({ latest }) {
  return latest.drafter_changes.map(({ at_seconds: at, kind, drafter }) => ({
    x: at - latest.at_seconds,
    name: `${kind === "rollback" ? "back to" : "now"} ${drafter ?? "no drafter"}`,
  }));
}

export const OVER_TIME = [
  {
    title: "Throughput",
    caption: "Tokens generated per second, over all answers.",
    names: ["tokens/s"],
    read: (history, span) => [history.flow(tokensPerSecond, span)],
    most: 10,
    digits: 1,
  },
  {
    title: "Time to first token",
    caption: "Milliseconds from the request to its first token: half of the requests, and 95 of 100, waited less.",
    names: ["median", "95th percentile"],
    read: quantiles("firstToken"),
    most: 50,
    digits: 0,
  },
  {
    title: "Time between tokens",
    caption: "Milliseconds from one token of an answer to the next; tokens of one pass share its time.",
    names: ["median", "95th percentile"],
    read: quantiles("betweenTokens"),
    most: 10,
    digits: 1,
  },
  {
    title: "Refusals and errors",
    caption: "A minute: requests refused because the queue was full (429), and all other errors.",
    names: ["429, queue full", "other errors"],
    read: (history, span) => [
      history.flow(perMinute((status) => status === QUEUE_FULL), span),
      history.flow(perMinute((status) => status !== QUEUE_FULL), span),
    ],
    most: 4,
    digits: 1,
  },
  {
    title: "Acceptance length",
    caption:
      "Tokens per verified draft, the target's own included: 1 means that nothing is accepted. Numbered lines: another drafter came to work.",
    marks: drafterChanges,
    names: ["tokens per draft"],
    read: (history, span) => [history.flow(acceptanceLength, span)],
    least: 1,
    most: 2,
    digits: 2,
  },
  {
    title: "Users",
    caption: "Answers that run, and answers that wait for a place.",
    names: ["running", "waiting"],
    read: (history, span) => [history.gauge((seen) => seen.load.running, span), history.gauge((seen) => seen.load.waiting, span)],
    most: 4,
    natural: true,
    digits: 0,
  },
  {
    title: "KV cache",
    caption: "KV blocks: held by answers, and free but cached for prompts that begin alike.",
    names: ["used", "cached"],
    read: (history, span) => [
      history.gauge((seen) => seen.kv_blocks.used, span),
      history.gauge((seen) => seen.kv_blocks.cached, span),
    ],
    most: 10,
    natural: true,
    digits: 0,
  },
];

export const BY_DEPTH = [
  {
    title: "Acceptance by depth",
    caption: "Share of verified drafts whose token at this depth was accepted.",
    most: 1,
    lately: (flow) => shares(flow.acceptedByDepth, flow.drafts),
    always: (counts) => shares(counts.accepted_by_depth, counts.drafts),
  },
  {
    title: "Depth chosen",
    caption: "How deep answers were to be drafted for, as a share of all choices; 0 is a plain step.",
    most: 1,
    first: 0,
    lately: (flow) => chosen(flow.rowsByDepth),
    always: (counts) => chosen(counts.rows_by_depth),
  },
];

const shares = (counts, of) => (of > 0 ? counts.map((count) => count / of) : []);

function chosen(rowsByDepth) {
  const depths = Object.keys(rowsByDepth).map(Number);
  const counts = Array.from({ length: Math.max(-1, ...depths) + 1 }, (_, depth) => rowsByDepth[depth] ?? 0);
  return shares(counts, counts.reduce((sum, count) => sum + count, 0));
}
