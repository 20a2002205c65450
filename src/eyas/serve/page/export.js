// A conversation as a file: JSON with every token and its origin, or Markdown to read.

import { element } from "./dom.js";

export const asJson = ({ id, turns }) => `${JSON.stringify({ id, model: document.body.dataset.model, turns }, null, 2)}\n`;

export function asMarkdown({ title, turns }) {
  const parts = turns.map(({ question, answer }) => `## You\n\n${question}\n\n## Answer\n\n${answer?.text ?? "(no answer)"}`);
  return `${[`# ${title}`, ...parts].join("\n\n")}\n`;
}

/** Hand a text to the browser as a download; it does not leave this machine. */
export function download(text, ending, type) {
  const address = URL.createObjectURL(new Blob([text], { type }));
  element("a", { href: address, download: `conversation.${ending}` }).click();
  setTimeout(() => URL.revokeObjectURL(address), 10_000);
}
