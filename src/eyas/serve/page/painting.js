// Paints tokens by origin. Depth shows as colour, as the thickness of the line below, in the title, and as a number.
//
// A token may be half a character. Its text is then empty and comes with the token that completes it, so a painted
// stretch stands for one token or several: its title names them all, its colour is that of the last.

import { element } from "./dom.js";

export const DEEPEST_COLOUR = 7;
const characters = new Intl.Segmenter(undefined, { granularity: "grapheme" });

export const origin = (depth) => (depth > 0 ? `draft depth ${depth}` : "the target");

export class Painter {
  constructor(place) {
    this.place = place;
    this.waiting = []; // tokens whose text has not come yet
    this.stretch = null; // the last one painted
  }

  add(tokens) {
    for (const token of tokens) {
      this.waiting.push(token);
      if (token.text) this.paint(token.text);
    }
  }

  /** The end of the answer: tokens without text by now ended it. */
  end() {
    if (!this.waiting.length) return;
    this.stretch = null;
    this.paint("");
    this.stretch.node.classList.add("end");
    this.stretch.node.setAttribute("aria-hidden", "true");
    this.stretch.node.title = `end of the answer: ${this.stretch.node.title}`;
  }

  paint(text) {
    const before = this.stretch;
    if (before && growTogether(before.node.textContent, text)) {
      before.tokens.push(...this.waiting);
      before.node.textContent += text;
    } else {
      this.stretch = { node: element("span"), tokens: this.waiting };
      this.stretch.node.textContent = text;
      this.place.append(this.stretch.node);
    }
    this.waiting = [];
    show(this.stretch);
  }
}

function show({ node, tokens }) {
  const depth = tokens.at(-1).depth;
  const blank = /^\n+$/.test(node.textContent) ? " newline" : "";
  node.className = `tok d${Math.min(depth, DEEPEST_COLOUR)}${blank}`;
  node.dataset.depth = depth;
  const origins = tokens.map((token) => origin(token.depth));
  node.title = tokens.length > 1 ? `${tokens.length} tokens: ${origins.join(", ")}` : origins[0];
}

/** Whether two texts meet within a character, such as a letter and its accent, which two boxes would tear apart. */
function growTogether(left, right) {
  const ends = [...left.slice(-16)].slice(-8).join("");
  const count = (text) => [...characters.segment(text)].length;
  return right !== "" && ends !== "" && count(ends + right) < count(ends) + count(right);
}

/** The scale of the legend. */
export function scale(deepest) {
  const depths = Array.from({ length: Math.min(deepest, DEEPEST_COLOUR) }, (_, i) => i + 1);
  return depths.map((depth) =>
    element("span", { class: `tok d${depth}` }, depth === DEEPEST_COLOUR ? ` ${depth}+ ` : ` ${depth} `),
  );
}
