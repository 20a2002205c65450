// The options of requests, from the form that all views share.

import { byId } from "./dom.js";
import { scale } from "./painting.js";

/** The fields of a request. */
export function requestFields() {
  const fields = {
    temperature: Number(byId("temperature").value),
    top_p: Number(byId("top-p").value),
    max_tokens: Math.max(1, Math.floor(Number(byId("max-tokens").value)) || 1),
  };
  if (byId("seed").value.trim()) fields.seed = Number(byId("seed").value);
  const stop = byId("stop-texts").value.split("\n").filter(Boolean);
  if (stop.length) fields.stop = stop;
  const schema = byId("schema").value.trim();
  if (schema) fields.response_format = { type: "json_schema", json_schema: { name: "answer", schema: JSON.parse(schema) } };
  return { ...fields, speculative: speculation(byId("speculation").value) };
}

/** Whether the settings make a request; otherwise the first wrong one says why. */
export function settingsFit() {
  byId("schema").setCustomValidity(wrongInSchema(byId("schema").value.trim()));
  const wrong = [...byId("settings").querySelectorAll("input, textarea")].find((field) => !field.checkValidity());
  if (!wrong) return true;
  wrong.closest("details")?.setAttribute("open", "");
  wrong.reportValidity();
  return false;
}

function wrongInSchema(text) {
  if (!text) return "";
  try {
    const schema = JSON.parse(text);
    return schema !== null && typeof schema === "object" && !Array.isArray(schema) ? "" : "A JSON schema is an object, such as {\"type\": \"object\"}.";
  } catch (error) {
    return `Not JSON: ${error.message}`;
  }
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

/** Offer the options that the server supports. */
export function adaptTo(served) {
  byId("max-tokens").max = served.max_model_len;
  byId("depth").max = Math.max(1, served.max_depth);
  // With suffix drafts alone a fixed depth is of no use: it depends on the text that can be copied.
  const possible = { off: true, auto: served.max_depth > 0 || served.suffix, fixed: served.max_depth > 0 };
  for (const option of byId("speculation").options) option.disabled = !possible[option.value];
  if (!possible[byId("speculation").value]) byId("speculation").value = possible.auto ? "auto" : "off";
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
  byId("top-p-value").textContent = byId("top-p").value;
  byId("schema").setCustomValidity(""); // judged anew when something is sent
}

export function setUpSettings() {
  byId("settings").addEventListener("input", refresh);
  byId("numbers").addEventListener("change", (event) => {
    document.body.classList.toggle("numbered", event.target.checked);
  });
  refresh();
}
