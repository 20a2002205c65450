// An answer on the page: painted text, figures that live, the passes as a strip, and all tokens as a table.

import { drawn, element } from "./dom.js";
import { duration, fixed, percent, plural, whole } from "./numbers.js";
import { DEEPEST_COLOUR, Painter, origin } from "./painting.js";

const BLOCK = 6;
const ENDS = {
  length: "cut at the longest answer allowed",
  aborted: "stopped",
};

export class AnswerView {
  constructor(place) {
    this.text = element("div", { class: "painted" });
    this.passes = element("div", { class: "passes" });
    this.figures = element("dl", { class: "figures" });
    this.note = element("p", { class: "wrong", role: "alert" });
    this.table = element("details", { class: "tokens" }, element("summary", {}, "Token by token"));
    this.table.hidden = true;
    place.replaceChildren(this.text, this.note, this.passes, this.figures, this.table);
  }

  /** Ask and show what comes. A refusal is shown, not thrown; the outcome says whether there is an answer. */
  async follow(run) {
    const painter = new Painter(this.text);
    this.text.classList.add("streaming");
    let due = false;
    const refresh = () => {
      due = false;
      this.showFigures(run);
    };
    try {
      await run.go((fresh) => {
        painter.add(fresh);
        if (!due) requestAnimationFrame(refresh);
        due = true;
      });
    } catch (error) {
      this.note.textContent = `No answer: ${error.message}`;
      return false;
    } finally {
      this.text.classList.remove("streaming");
      if (run.finish === "stop") painter.end();
      this.showFigures(run);
      if (run.tokens.length) this.showTable(run);
    }
    return true;
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

/** What an answer came to, in a sentence. */
export function summary(run) {
  const drafted =
    run.acceptanceLength === null ? "" : `, ${run.foreseen} from drafts, acceptance length ${fixed(run.acceptanceLength, 2)}`;
  return `${plural(run.tokens.length, "token")}${drafted}, ${fixed(run.speed)} tokens per second.`;
}

/** A column for each pass of the target: what it confirmed of the draft, and its own token on top. */
function strip(passes, tokens) {
  const tallest = Math.max(2, ...passes.map((depths) => depths.length));
  const blocks = passes.flatMap((depths, column) =>
    depths.map((depth, row) =>
      drawn("rect", {
        class: `block d${Math.min(depth, DEEPEST_COLOUR)}`,
        x: column * BLOCK,
        y: (tallest - row - 1) * BLOCK,
        width: BLOCK - 1,
        height: BLOCK - 1,
      }),
    ),
  );
  const width = passes.length * BLOCK;
  const label = `${plural(passes.length, "pass").replace("passs", "passes")} of the target gave ${plural(tokens, "token")}`;
  const picture = drawn(
    "svg",
    { viewBox: `0 0 ${width} ${tallest * BLOCK}`, preserveAspectRatio: "none", role: "img", "aria-label": label },
    drawn("title", {}, `${label}: a column for each pass, a block for each token`),
    ...blocks,
  );
  picture.style.width = `min(100%, ${1.35 * width}px)`;
  picture.style.height = `${1.35 * tallest * BLOCK}px`;
  return picture;
}
