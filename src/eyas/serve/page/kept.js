// The list of kept conversations, and a conversation as a file.

import { announce, byId, element } from "./dom.js";
import { asJson, asMarkdown, download } from "./export.js";
import { onChange, open, openConversation } from "./playground.js";
import { Conversation } from "./conversation.js";
import { forget, kept } from "./store.js";

function show() {
  const list = kept();
  byId("kept-list").replaceChildren(...list.map(item));
  byId("forget").disabled = list.length === 0;
  for (const id of ["export-json", "export-markdown"]) byId(id).disabled = openConversation().turns.length === 0;
}

function item(one) {
  const conversation = new Conversation(one);
  const isOpen = one.id === openConversation().id;
  const title = element("button", { type: "button", class: "kept-title", "aria-current": isOpen ? "true" : null }, conversation.title);
  title.addEventListener("click", () => (open(kept().find(({ id }) => id === one.id) ?? null), announce("Opened.")));
  const gone = element("button", { type: "button", class: "small", "aria-label": `Forget: ${conversation.title}` }, "×");
  gone.addEventListener("click", () => {
    forget(one.id);
    if (isOpen) open();
    else show();
    byId("message").focus();
  });
  return element("li", {}, title, gone);
}

export function setUpKept() {
  byId("forget").addEventListener("click", () => {
    forget();
    open();
    announce("All conversations are forgotten.");
  });
  byId("export-json").addEventListener("click", () => download(asJson(openConversation()), "json", "application/json"));
  byId("export-markdown").addEventListener("click", () => download(asMarkdown(openConversation()), "md", "text/markdown"));
  onChange(show);
  show();
}
