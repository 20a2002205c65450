// The server's figures now, in tiles.

import { byId, element } from "./dom.js";
import { QUEUE_FULL, acceptanceLength, errorsOf, quantile, tokensPerSecond } from "./flow.js";
import { RECENT } from "./history.js";
import { duration, fixed, percent, whole } from "./numbers.js";

const INSTANT = 6; // seconds: what "now" is for throughput

export function showTiles(history) {
  const [recent, instant] = [history.recent(), history.recent(INSTANT)];
  const { load, kv_blocks: blocks, counts, latency } = history.latest;
  const since = counts.drafts ? 1 + counts.accepted_tokens / counts.drafts : null;
  const errors = errorsOf(counts.errors_by_status, () => true);
  const full = errorsOf(counts.errors_by_status, (status) => status === QUEUE_FULL);
  const failed = errorsOf(counts.errors_by_status, (status) => status >= 500);
  const tiles = [
    ["Throughput", `${fixed(tokensPerSecond(instant))}`, "tokens/s now"],
    waiting("To first token", recent?.firstToken, latency.time_to_first_token),
    waiting("Between tokens", recent?.betweenTokens, latency.inter_token_latency),
    ["Acceptance length", fixed(acceptanceLength(recent), 2), `last ${RECENT} s; ${fixed(since, 2)} since the start`],
    ["Users", `${load.running}`, `running; ${load.waiting} waiting, at most ${load.capacity}`],
    ["KV cache", percent(blocks.used / Math.max(1, blocks.total)), `${whole(blocks.used)} of ${whole(blocks.total)} blocks used`],
    ["Tokens", whole(counts.tokens), `${fixed(counts.tokens / Math.max(1, counts.passes), 2)} for each pass of the target${sources(counts)}`],
    ["Errors", whole(errors), `since the start: ${whole(full)} of 429, ${whole(failed)} of 5xx`],
  ];
  byId("tiles").replaceChildren(
    ...tiles.map(([name, value, more]) =>
      element("div", { class: "card" }, element("dt", {}, name), element("dd", {}, value), element("dd", { class: "soft" }, more)),
    ),
  );
}

/** The sources of accepted tokens, if there are several. */
function sources(counts) {
  const suffix = counts.suffix_accepted_tokens ?? 0;
  return suffix ? `; ${whole(counts.accepted_tokens - suffix)} by the drafter, ${whole(suffix)} by suffix drafts` : "";
}

/** Recent values; without recent activity, values since the start. */
function waiting(name, lately, always) {
  const quiet = quantile(lately, 0.5) === null;
  const histogram = quiet ? always : lately;
  const when = quiet ? "since the start" : `last ${RECENT} s`;
  return [name, duration(quantile(histogram, 0.5)), `median; 95 % below ${duration(quantile(histogram, 0.95))}, ${when}`];
}
