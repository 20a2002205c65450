// "Show as code": the request that the message box would send, as curl or Python.

import { asCurl, asPython } from "./code.js";
import { copyButton } from "./copy.js";
import { byId } from "./dom.js";
import { nextRequest } from "./playground.js";
import { settingsFit } from "./settings.js";

const WAYS = { curl: asCurl, python: asPython };

function show() {
  const way = document.querySelector('input[name="way"]:checked').value;
  byId("code-text").textContent = WAYS[way]({ model: document.body.dataset.model, ...nextRequest() });
}

export function setUpCodeDialog() {
  const dialog = byId("code-dialog");
  byId("open-code").addEventListener("click", () => {
    if (!settingsFit()) return;
    show();
    dialog.showModal();
  });
  dialog.addEventListener("change", show);
  byId("code-close").addEventListener("click", () => dialog.close());
  byId("code-close").before(copyButton(() => byId("code-text").textContent, "Copy", "quiet"));
}
