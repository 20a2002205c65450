// Copying, and folded parts that open when they are linked to or printed. A page without script lacks only this.
"use strict";
(() => {
  const said = document.querySelector(".said");
  const cells = (row) => [...row.cells].map((cell) => cell.innerText.replace(/\s+/g, " ").trim()).join("\t");
  const text = (part) => (part.tagName === "TABLE" ? [...part.rows].map(cells).join("\n") : part.textContent);

  // Where the clipboard is refused (an old browser, a frame), the browser's own copying of a selection is left.
  const select = (value) => {
    const area = document.createElement("textarea");
    area.value = value;
    area.className = "away";
    document.body.append(area);
    area.select();
    const done = document.execCommand("copy");
    area.remove();
    return done;
  };

  const copy = async (button) => {
    const value = text(document.getElementById(button.dataset.copy));
    let done = true;
    try {
      await navigator.clipboard.writeText(value);
    } catch {
      done = select(value);
    }
    button.focus();
    said.textContent = done ? "Copied" : "The browser refuses to copy: select the text instead";
    button.textContent = done ? "Copied" : "Not copied";
    setTimeout(() => {
      button.textContent = button.dataset.label;
      said.textContent = "";
    }, 2000);
  };

  for (const button of document.querySelectorAll("button[data-copy]")) {
    button.dataset.label = button.textContent;
    button.hidden = false;
    button.addEventListener("click", () => copy(button));
  }

  const reveal = () => {
    let part = document.getElementById(location.hash.slice(1));
    while (part) {
      if (part.tagName === "DETAILS") part.open = true;
      part = part.parentElement;
    }
  };
  addEventListener("hashchange", reveal);
  reveal();
  addEventListener("beforeprint", () => {
    for (const part of document.querySelectorAll("details")) part.open = true;
  });
})();
