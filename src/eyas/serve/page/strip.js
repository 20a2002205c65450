// Draws the passes of an answer: a column for each pass of the target, a block for each token.

import { drawn } from "./dom.js";
import { plural } from "./numbers.js";
import { DEEPEST_COLOUR } from "./painting.js";

const BLOCK = 6;

/** The accepted draft tokens of each pass, and the target's own token on top. */
export function strip(passes, tokens) {
  const tallest = Math.max(2, ...passes.map((depths) => depths.length));
  const blocks = passes.flatMap((depths, column) =>
    depths.map((depth, row) =>
      drawn("rect", {
        class: `block d${Math.min(depth, DEEPEST_COLOUR)}`,
        x: column * BLOCK,
        y: (tallest - row - 1) * BLOCK,
        width: BLOCK - 1,
        height: BLOCK - 1,
      }),
    ),
  );
  const width = passes.length * BLOCK;
  const label = `${plural(passes.length, "pass").replace("passs", "passes")} of the target gave ${plural(tokens, "token")}`;
  const picture = drawn(
    "svg",
    { viewBox: `0 0 ${width} ${tallest * BLOCK}`, preserveAspectRatio: "none", role: "img", "aria-label": label },
    drawn("title", {}, `${label}: a column for each pass, a block for each token`),
    ...blocks,
  );
  picture.style.width = `min(100%, ${1.35 * width}px)`;
  picture.style.height = `${1.35 * tallest * BLOCK}px`;
  return picture;
}
