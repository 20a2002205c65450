// Copying texts. Plain HTTP from another machine has no clipboard API, so there the old way is used.

import { announce, element } from "./dom.js";

/** A button that copies what `read` gives when it is pressed, and says whether it could. */
export function copyButton(read, label = "Copy", kind = "small") {
  const button = element("button", { type: "button", class: kind }, label);
  button.addEventListener("click", async () => {
    const said = (await copy(read())) ? "Copied" : "Cannot copy";
    announce(said);
    button.textContent = said;
    setTimeout(() => (button.textContent = label), 1500);
  });
  return button;
}

async function copy(text) {
  try {
    await navigator.clipboard.writeText(text);
    return true;
  } catch {
    return copyBySelection(text);
  }
}

function copyBySelection(text) {
  const before = document.activeElement;
  const field = element("textarea", { class: "hidden", "aria-hidden": "true", tabindex: "-1" });
  field.value = text;
  (document.querySelector("dialog[open]") ?? document.body).append(field);
  field.select();
  try {
    return document.execCommand("copy");
  } finally {
    field.remove();
    before?.focus({ preventScroll: true });
  }
}
