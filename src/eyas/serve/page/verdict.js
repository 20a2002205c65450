// The verdict of a comparison, limited to what its runs show.

import { fixed, known } from "./numbers.js";

const NOTICEABLE = 0.03; // a smaller difference is none

/** The median of a few numbers. */
export function median(values) {
  const sorted = values.toSorted((a, b) => a - b);
  const middle = sorted.length / 2;
  return (sorted[Math.ceil(middle) - 1] + sorted[Math.floor(middle)]) / 2;
}

/** How the speeds of both sides compare: the ratio of medians, and in words whether it is more than chance. */
export function judge(plain, drafted) {
  if (![...plain, ...drafted].every(known)) return { ratio: null, words: "The answers were too short to tell a speed." };
  const ratio = median(drafted) / median(plain);
  const apart = Math.min(...drafted) > Math.max(...plain) || Math.max(...drafted) < Math.min(...plain);
  const speeds = `${fixed(median(drafted))} against ${fixed(median(plain))} tokens/s`;
  if (!apart || Math.abs(ratio - 1) < NOTICEABLE) {
    return { ratio, words: `No clear difference in speed: ${speeds}. Runs of one side differ as much as the sides do.` };
  }
  if (ratio > 1) return { ratio, words: `With speculation ${fixed(ratio, 2)} times as fast: ${speeds}.` };
  return {
    ratio,
    words: `Speculation lost here: ${fixed(1 / ratio, 2)} times slower, ${speeds}. Too few guesses were right to pay for the guessing.`,
  };
}
