// The API key: in sessionStorage and nowhere else, so that it is gone with the tab.

import { byId } from "./dom.js";

const NAME = "eyas-key";
const listeners = [];
let asked = false;

/** The headers that carry it. */
export function authorization() {
  const key = sessionStorage.getItem(NAME);
  return key ? { authorization: `Bearer ${key}` } : {};
}

/** Call `then` whenever another key is given. */
export const onKey = (then) => listeners.push(then);

/** The server needs a key, or another one: ask for it once. */
export function keyRefused() {
  byId("key-wrong").textContent = sessionStorage.getItem(NAME) ? "The server does not know this key." : "";
  if (!asked) open();
}

function open() {
  asked = true;
  byId("key").value = sessionStorage.getItem(NAME) ?? "";
  if (!byId("key-dialog").open) byId("key-dialog").showModal();
}

export function setUpKey() {
  const dialog = byId("key-dialog");
  byId("open-key").addEventListener("click", open);
  byId("key-cancel").addEventListener("click", () => dialog.close());
  byId("key-form").addEventListener("submit", (event) => {
    event.preventDefault();
    const key = byId("key").value.trim();
    if (key) sessionStorage.setItem(NAME, key);
    else sessionStorage.removeItem(NAME);
    asked = false; // a new key that is refused is worth asking about
    byId("key-wrong").textContent = "";
    dialog.close();
    for (const then of listeners) then();
  });
}
