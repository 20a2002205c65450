// Markdown as models write it: headings, lists, quotes, tables, fenced code. Anything else is a paragraph.

import { copyButton } from "./copy.js";
import { element } from "./dom.js";
import { inline } from "./inline.js";

const DEEPEST = 8; // quotes and lists within each other; deeper ones are text
const FENCE = /^ {0,3}(`{3,}|~{3,}) *([^\s`]*)[^`]*$/;
const HEADING = /^ {0,3}(#{1,6})\s+(.*?)\s*#*\s*$/;
const RULE = /^ {0,3}([-*_])(?: *\1){2,} *$/;
const QUOTE = /^ {0,3}> ?/;
const ITEM = /^( *)([-*+]|(\d{1,9})[.)])( +|$)/;
const DELIMITER = /^ *\|?(?: *:?-+:? *\|)+ *(?::?-+:? *)?$/;

/** A text's blocks. */
export function markdown(text, level = 0) {
  const lines = text.replaceAll("\r\n", "\n").split("\n");
  const blocks = [];
  for (let at = 0; at < lines.length; ) {
    if (!lines[at].trim()) at += 1;
    else {
      const read = level < DEEPEST ? READERS.find((one) => one.begins(lines, at)).read : paragraph;
      const [block, next] = read(lines, at, level + 1);
      blocks.push(block);
      at = next;
    }
  }
  return blocks;
}

/** Code with its language and a button that copies it. */
export function codeBlock(code, language = "") {
  const head = element("div", { class: "code-head" }, element("span", {}, language || "text"), copyButton(() => code, "Copy code"));
  return element("div", { class: "code" }, head, element("pre", { tabindex: "0" }, element("code", {}, code)));
}

const READERS = [
  { begins: (lines, at) => FENCE.test(lines[at]), read: fenced },
  { begins: (lines, at) => HEADING.test(lines[at]), read: heading },
  { begins: (lines, at) => RULE.test(lines[at]), read: (_, at) => [element("hr"), at + 1] },
  { begins: (lines, at) => QUOTE.test(lines[at]), read: quote },
  { begins: (lines, at) => ITEM.test(lines[at]), read: list },
  { begins: (lines, at) => lines[at].includes("|") && DELIMITER.test(lines[at + 1] ?? ""), read: table },
  { begins: () => true, read: paragraph },
];

/** The code up to the closing fence, or up to the end of a streaming answer. */
function fenced(lines, at) {
  const [, fence, language] = FENCE.exec(lines[at]);
  const closes = (line) => line.trim().startsWith(fence) && !line.trim().replaceAll(fence[0], "");
  const end = lines.findIndex((line, i) => i > at && closes(line));
  const last = end < 0 ? lines.length : end;
  return [codeBlock(lines.slice(at + 1, last).join("\n"), language), last + 1];
}

/** Headings start at the fourth level: the page uses the first three. */
function heading(lines, at) {
  const [, marks, text] = HEADING.exec(lines[at]);
  return [element(`h${Math.min(6, marks.length + 3)}`, {}, ...inline(text)), at + 1];
}

function quote(lines, at, level) {
  const end = endOf(lines, at, (line) => QUOTE.test(line));
  const inner = lines.slice(at, end).map((line) => line.replace(QUOTE, ""));
  return [element("blockquote", {}, ...markdown(inner.join("\n"), level)), end];
}

function list(lines, at, level) {
  const [, indent, , number] = ITEM.exec(lines[at]);
  const ordered = number !== undefined;
  const made = element(ordered ? "ol" : "ul", ordered && Number(number) !== 1 ? { start: Number(number) } : {});
  const sibling = (line) => {
    const match = ITEM.exec(line ?? "");
    return match && !RULE.test(line) && match[1].length <= indent.length + 1 && (match[3] !== undefined) === ordered;
  };
  while (at < lines.length && sibling(lines[at])) {
    const [mark] = ITEM.exec(lines[at]);
    const inside = (line) => line.startsWith(" ".repeat(Math.min(mark.length, indent.length + 2)));
    const rest = [];
    let next = at + 1;
    while (next < lines.length && (inside(lines[next]) || continues(lines, next))) rest.push(lines[next++]);
    const text = [lines[at].slice(mark.length), ...rest.map((line) => dedent(line, mark.length))].join("\n");
    const blocks = markdown(text, level);
    if (blocks[0]?.tagName === "P") blocks.splice(0, 1, ...blocks[0].childNodes);
    made.append(element("li", {}, ...blocks));
    at = next;
    const following = lines.findIndex((line, i) => i >= at && line.trim());
    if (following >= 0 && sibling(lines[following])) at = following;
  }
  return [made, at];
}

const dedent = (line, most) => line.slice(Math.min(most, line.length - line.trimStart().length));

/** A blank line within an item, or a line of its paragraph that is not indented. */
function continues(lines, at) {
  if (!lines[at].trim()) return /^ {2,}\S/.test(lines[at + 1] ?? "");
  return lines[at - 1].trim() !== "" && !interrupts(lines, at);
}

function table(lines, at) {
  const cells = (line) => line.trim().replace(/^\||\|$/g, "").split("|").map((cell) => cell.trim());
  const row = (tag) => (line) => element("tr", {}, ...cells(line).map((cell) => element(tag, {}, ...inline(cell))));
  const end = endOf(lines, at + 2, (line) => line.includes("|"));
  const [head, body] = [row("th")(lines[at]), lines.slice(at + 2, end).map(row("td"))];
  const made = element("table", {}, element("thead", {}, head), element("tbody", {}, ...body));
  return [element("div", { class: "wide", tabindex: "0", role: "region", "aria-label": "Table" }, made), end];
}

function paragraph(lines, at) {
  const end = endOf(lines, at + 1, (line, i) => line.trim() && !interrupts(lines, i));
  return [element("p", {}, ...inline(lines.slice(at, end).map((line) => line.trim()).join("\n"))), end];
}

const interrupts = (lines, at) => READERS.slice(0, -1).some((one) => one.begins(lines, at));

/** The first line from here on that is not part of the block. */
function endOf(lines, at, belongs) {
  const end = lines.findIndex((line, i) => i >= at && !belongs(line, i));
  return end < 0 ? lines.length : end;
}
