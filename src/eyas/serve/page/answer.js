// An answer on the page: its text, painted by origin or as prose, live figures, a strip of passes, and all tokens.

import { element } from "./dom.js";
import { codeBlock, markdown } from "./markdown.js";
import { duration, fixed, percent, plural, whole } from "./numbers.js";
import { Painter, origin } from "./painting.js";
import { strip } from "./strip.js";

const PROSE_EVERY = 100; // milliseconds between renderings of a text that grows
const ENDS = {
  length: "cut at the longest answer allowed",
  aborted: "stopped",
};

export class AnswerView {
  /** `head` is the heading that gets the badge; `prose` whether the text is also rendered. */
  constructor(place, head, { prose = false } = {}) {
    this.badge = element("span", { class: "badge" });
    head.querySelector(".badge")?.remove();
    head.append(this.badge);
    this.thoughts = element("div", { class: "thoughts" });
    this.reasoning = element("details", { class: "reasoning" }, element("summary", {}, "Reasoning"), this.thoughts);
    this.reasoning.hidden = true;
    this.text = element("div", { class: "painted" });
    this.prose = prose ? element("div", { class: "prose" }) : null;
    this.rendered = 0;
    this.passes = element("div", { class: "passes" });
    this.figures = element("dl", { class: "figures" });
    this.note = element("p", { class: "wrong", role: "alert" });
    this.table = element("details", { class: "tokens" }, element("summary", {}, "Token by token"));
    this.table.hidden = true;
    const texts = this.prose ? [this.prose, this.text] : [this.text];
    place.replaceChildren(this.reasoning, ...texts, this.note, this.passes, this.figures, this.table);
  }

  /** Ask and show the answer. A refusal is shown, not thrown; the outcome says whether there is an answer. */
  async follow(run) {
    const painter = new Painter(this.text);
    const texts = [this.text, ...(this.prose ? [this.prose] : [])];
    for (const text of texts) text.classList.add("streaming");
    this.showState(run.state);
    let due = false;
    const refresh = () => {
      due = false;
      if (run.state !== "running") return;
      this.showFigures(run);
      if (performance.now() - this.rendered > PROSE_EVERY) this.showProse(run);
    };
    try {
      await run.go((fresh) => {
        painter.add(fresh);
        if (!due) requestAnimationFrame(refresh);
        due = true;
      });
    } catch (error) {
      this.note.textContent = run.tokens.length ? `The answer broke off: ${error.message}` : `No answer: ${error.message}`;
      return false;
    } finally {
      for (const text of texts) text.classList.remove("streaming");
      this.finish(run, painter);
    }
    return true;
  }

  /** Show a stored answer. */
  recall(record) {
    const painter = new Painter(this.text);
    if (record.tokens.length) painter.add(record.tokens);
    else this.text.textContent = record.text; // too long to keep its tokens
    this.finish(record, painter);
  }

  finish(run, painter) {
    if (run.finish === "stop") painter.end();
    this.showState(run.state);
    this.showProse(run);
    this.showFigures(run);
    if (run.tokens.length) this.showTable(run);
  }

  showState(state) {
    this.badge.dataset.state = state;
    this.badge.textContent = state;
  }

  showProse(run) {
    this.rendered = performance.now();
    this.reasoning.hidden = !run.reasoning;
    this.thoughts.textContent = run.reasoning ?? "";
    this.prose?.replaceChildren(...(run.structured ? [codeBlock(run.text, "json")] : markdown(run.text)));
  }

  showFigures(run) {
    const figures = [
      [fixed(run.speed), "tokens/s"],
      [duration(run.wait), "to first token"],
      [whole(run.tokens.length), "tokens"],
    ];
    if (run.mode !== "off") {
      figures.splice(1, 0, [fixed(run.acceptanceLength, 2), "acceptance length"]);
      figures.push([percent(run.tokens.length ? run.foreseen / run.tokens.length : null), "from drafts"]);
    }
    this.figures.replaceChildren(
      ...figures.map(([value, name]) => element("div", {}, element("dt", {}, name), element("dd", {}, value))),
    );
    const end = ENDS[run.finish];
    if (end) this.figures.append(element("div", { class: "ending" }, element("dt", {}, "ended"), element("dd", {}, end)));
    this.passes.replaceChildren(...(run.passes.length ? [strip(run.passes, run.tokens.length)] : []));
  }

  showTable(run) {
    const rows = run.tokens.map((token, i) =>
      element(
        "tr",
        {},
        element("td", {}, String(i + 1)),
        element("td", {}, element("code", {}, token.text ? JSON.stringify(token.text) : "no text of its own")),
        element("td", {}, String(token.id)),
        element("td", {}, origin(token.depth)),
      ),
    );
    const head = ["#", "text", "token id", "chosen by"].map((name) => element("th", { scope: "col" }, name));
    const table = element("table", {}, element("thead", {}, element("tr", {}, ...head)), element("tbody", {}, ...rows));
    const frame = element("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": "All tokens" }, table);
    this.table.append(frame);
    this.table.hidden = false;
  }
}

/** The summary of an answer, in a sentence. */
export function summary(run) {
  const drafted =
    run.acceptanceLength === null ? "" : `, ${run.foreseen} from drafts, acceptance length ${fixed(run.acceptanceLength, 2)}`;
  return `${plural(run.tokens.length, "token")}${drafted}, ${fixed(run.speed)} tokens per second.`;
}
