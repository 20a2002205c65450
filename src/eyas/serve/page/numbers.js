// Numbers as people read them; a dash where there is none.

const DASH = "–";

export const known = (value) => typeof value === "number" && Number.isFinite(value);

export const fixed = (value, digits = 1) => (known(value) ? value.toFixed(digits) : DASH);

export const percent = (value) => (known(value) ? `${Math.round(100 * value)} %` : DASH);

export const whole = (value) => (known(value) ? Math.round(value).toLocaleString("en") : DASH);

/** A duration given in milliseconds. */
export function duration(ms) {
  if (!known(ms)) return DASH;
  return ms < 1000 ? `${Math.round(ms)} ms` : `${(ms / 1000).toFixed(2)} s`;
}

export const plural = (count, word) => `${whole(count)} ${word}${count === 1 ? "" : "s"}`;
