// Markdown within a line: code, emphasis, links. Nodes are made, markup never: a model cannot write HTML here.

import { element } from "./dom.js";

const LONGEST = 20_000; // characters of one block that are worth searching for pairs
const SCHEMES = ["http:", "https:", "mailto:"];
const PAIRS = new RegExp(
  [
    String.raw`\\([!-\/:-@\[-\x60\{-~])`, // 1: an escaped character
    String.raw`(\x60+)([\s\S]*?[^\x60])\2(?!\x60)`, // 3: code
    String.raw`!?\[([^\[\]]*)\]\(([^()\s]*(?:\([^()\s]*\)[^()\s]*)*)(?:\s+"[^"]*")?\)`, // 4, 5: a link or picture
    String.raw`\*\*(?=\S)([\s\S]*?\S)\*\*(?!\*)`, // 6: strong
    String.raw`\*(?=[^\s*])([\s\S]*?[^\s*])\*(?!\*)`, // 7: emphasis
    String.raw`~~(?=\S)([\s\S]*?\S)~~`, // 8: deleted
    String.raw`(?<![\p{L}\p{N}_])(__?)(?=\S)([\s\S]*?\S)\9(?![\p{L}\p{N}_])`, // 10: the same by underscores
  ].join("|"),
  "gu",
);

/** The nodes of one block's text; a new line stays one. */
export function inline(text, level = 0) {
  if (text.length > LONGEST || level > 8) return [text];
  const nodes = [];
  let at = 0;
  for (const match of text.matchAll(PAIRS)) {
    nodes.push(...plain(text.slice(at, match.index)), node(match, level + 1));
    at = match.index + match[0].length;
  }
  return [...nodes, ...plain(text.slice(at))];
}

function node(match, level) {
  const [all, escaped, , code, label, address, strong, emphasis, deleted, underscores, underscored] = match;
  if (escaped) return escaped;
  if (code !== undefined) return element("code", {}, code.replace(/^ (.*\S.*) $/s, "$1"));
  if (address !== undefined) return link(all, label, address, level);
  if (strong) return element("strong", {}, ...inline(strong, level));
  if (emphasis) return element("em", {}, ...inline(emphasis, level));
  if (deleted) return element("del", {}, ...inline(deleted, level));
  return element(underscores === "__" ? "strong" : "em", {}, ...inline(underscored, level));
}

/** A link without referrer; links of other schemes stay text. */
function link(all, label, address, level) {
  const url = URL.canParse(address) ? new URL(address) : null;
  if (!url || !SCHEMES.includes(url.protocol)) return all;
  const attributes = { href: url.href, target: "_blank", rel: "noopener noreferrer" };
  return element("a", attributes, ...(label ? inline(label, level) : [address]));
}

function plain(text) {
  return text.split("\n").flatMap((line, i) => (i ? [element("br"), line] : line ? [line] : []));
}
