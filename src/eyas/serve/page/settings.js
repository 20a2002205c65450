// What requests are told beside their messages, from the form all views share.

import { byId } from "./dom.js";
import { scale } from "./painting.js";

/** The fields of a request. */
export function requestFields() {
  const fields = {
    temperature: Number(byId("temperature").value),
    max_tokens: Math.max(1, Math.floor(Number(byId("max-tokens").value)) || 1),
  };
  return { ...fields, speculative: speculation(byId("speculation").value) };
}

/** How to draft, if it is to be drafted at all. */
export function drafting() {
  const mode = byId("speculation").value;
  return speculation(mode === "off" ? "auto" : mode);
}

/** The conversation's beginning. */
export function systemMessages() {
  const content = byId("system").value.trim();
  return content ? [{ role: "system", content }] : [];
}

/** What the server serves decides what can be asked for. */
export function adaptTo(served) {
  byId("max-tokens").max = served.max_model_len;
  byId("depth").max = Math.max(1, served.max_depth);
  for (const option of byId("speculation").options) option.disabled = served.max_depth === 0 && option.value !== "off";
  if (served.max_depth === 0) byId("speculation").value = "off";
  byId("scale").replaceChildren(...scale(Math.max(1, served.max_depth)));
  refresh();
}

function speculation(mode) {
  return mode === "fixed" ? { mode, depth: Number(byId("depth").value) } : { mode };
}

function refresh() {
  byId("depth-field").hidden = byId("speculation").value !== "fixed";
  byId("depth-value").textContent = byId("depth").value;
  const temperature = Number(byId("temperature").value);
  byId("temperature-value").textContent = temperature === 0 ? "0, greedy" : String(temperature);
}

export function setUpSettings() {
  byId("settings").addEventListener("input", refresh);
  byId("numbers").addEventListener("change", (event) => {
    document.body.classList.toggle("numbered", event.target.checked);
  });
  refresh();
}
