// Differences between two snapshots of the server, and rates from them.

export function between(earlier, later) {
  const [a, b] = [earlier.counts, later.counts];
  return {
    seconds: later.at_seconds - earlier.at_seconds,
    tokens: b.tokens - a.tokens,
    passes: b.passes - a.passes,
    drafts: b.drafts - a.drafts,
    accepted: b.accepted_tokens - a.accepted_tokens,
    acceptedByDepth: b.accepted_by_depth.map((count, i) => count - (a.accepted_by_depth[i] ?? 0)),
    rowsByDepth: increases(a.rows_by_depth, b.rows_by_depth),
    errors: increases(a.errors_by_status, b.errors_by_status),
    firstToken: increaseOf(earlier.latency.time_to_first_token, later.latency.time_to_first_token),
    betweenTokens: increaseOf(earlier.latency.inter_token_latency, later.latency.inter_token_latency),
  };
}

/** Differences by name. A replaced engine counts from zero: a smaller count is all new. */
function increases(before, after) {
  return Object.fromEntries(
    Object.entries(after).map(([name, count]) => [name, count - (count < (before[name] ?? 0) ? 0 : before[name] ?? 0)]),
  );
}

const increaseOf = (before, after) => ({
  upper_seconds: after.upper_seconds,
  counts: after.counts.map((count, i) => count - before.counts[i]),
});

export const acceptanceLength = (flow) => (flow && flow.drafts > 0 ? 1 + flow.accepted / flow.drafts : null);

export const tokensPerSecond = (flow) => (flow && flow.seconds > 0 ? flow.tokens / flow.seconds : null);

/** A quantile of a histogram in milliseconds, interpolated within its bucket. */
export function quantile(histogram, share) {
  const total = histogram?.counts.reduce((sum, count) => sum + count, 0) ?? 0;
  if (!total) return null;
  const bounds = histogram.upper_seconds;
  let left = share * total;
  for (const [i, count] of histogram.counts.entries()) {
    if (i >= bounds.length) break; // beyond all bounds: at least the last one
    const low = i ? bounds[i - 1] : 0;
    if (count >= left && count) return 1000 * (low + (left / count) * (bounds[i] - low));
    left -= count;
  }
  return 1000 * bounds.at(-1);
}

/** Errors of all statuses that `counts`. */
export const errorsOf = (errors, counts) =>
  Object.entries(errors).reduce((sum, [status, count]) => (counts(Number(status)) ? sum + count : sum), 0);

export const QUEUE_FULL = 429;
