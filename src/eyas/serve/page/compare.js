// One prompt twice, without and with speculation: how much sooner, and whether the text is the same.
//
// Both runs have one seed. A token is a function of the target's distribution and the request's own chance, so the
// texts are the same at any temperature, up to rounding where two tokens are all but equally likely.

import { AnswerView } from "./answer.js";
import { byId, element } from "./dom.js";
import { fixed, known, plural } from "./numbers.js";
import { Run } from "./run.js";
import { drafting, requestFields, systemMessages } from "./settings.js";

const HINTS = {
  one:
    "One machine answers both, so they take turns: this is the timing of each alone. The prompt is read once before, " +
    "untimed, so that neither pays for it.",
  both:
    "Both share the machine at this moment, so each is slower than alone; this shows two users, not a fair race. The " +
    "prompt is read once before, untimed.",
};

let running = null; // the runs under way

async function compare(prompt) {
  const order = chosenOrder();
  const messages = [...systemMessages(), { role: "user", content: prompt }];
  const common = { ...requestFields(), messages, seed: Math.floor(Math.random() * 2 ** 31) };
  const plain = new Run({ ...common, speculative: { mode: "off" } });
  const drafted = new Run({ ...common, speculative: drafting() });
  // The second token is drafted for, so that both target and drafter have read the prompt when the clock starts.
  const first = new Run({ ...common, max_tokens: 2, speculative: { mode: "fixed", depth: 1 } });
  const views = { plain: new AnswerView(byId("plain-side")), drafted: new AnswerView(byId("drafted-side")) };
  busy([first, plain, drafted]);
  showSpeeds(0, 0);
  tell("Reading the prompt…");
  const follow = {
    plain: () => (tell("Answering without speculation…"), views.plain.follow(plain)),
    drafted: () => (tell("Answering with speculation…"), views.drafted.follow(drafted)),
  };
  const read = await views.plain.follow(first);
  const stopped = () => [first, plain, drafted].some((run) => run.finish === "aborted");
  if (read && !stopped()) {
    views.plain = new AnswerView(byId("plain-side"));
    const answered =
      order === "both"
        ? (await Promise.all([follow.plain(), follow.drafted()])).every(Boolean)
        : (await follow.plain()) && !stopped() && (await follow.drafted());
    if (answered && !stopped()) showVerdict(plain, drafted, order);
    else tell(stopped() ? "Stopped." : "One side has no answer, so there is nothing to compare.");
  } else {
    tell(stopped() ? "Stopped." : "No answer.");
  }
  busy(null);
}

function showVerdict(plain, drafted, order) {
  const same = plain.text === drafted.text;
  const ratio = drafted.speed / plain.speed;
  const parts = [
    same
      ? element("strong", { class: "same" }, `✓ Same text, ${plural(plain.tokens.length, "token")}.`)
      : element("strong", { class: "differs" }, `≠ The texts differ from character ${firstDifference(plain, drafted)} on.`),
  ];
  if (known(ratio)) {
    showSpeeds(Math.min(1, 1 / ratio), Math.min(1, ratio));
    const words = ratio >= 1 ? `${fixed(ratio, 2)} times as fast` : `${fixed(1 / ratio, 2)} times slower`;
    const speeds = `${fixed(drafted.speed)} against ${fixed(plain.speed)} tokens/s`;
    parts.push(element("span", {}, ` With speculation ${words}: ${speeds}${order === "both" ? ", sharing the machine" : ""}.`));
  }
  if (!same) {
    parts.push(
      element("span", { class: "soft" }, " Where two tokens are all but equally likely, rounding may decide either way; " +
        "everything after such a place is another text."),
    );
  }
  byId("verdict").replaceChildren(...parts);
}

/** Bars, each a share of the faster one. */
function showSpeeds(plain, drafted) {
  byId("plain-speed").style.width = `${100 * plain}%`;
  byId("drafted-speed").style.width = `${100 * drafted}%`;
}

function firstDifference(plain, drafted) {
  const [left, right] = [[...plain.text], [...drafted.text]];
  const at = left.findIndex((character, i) => character !== right[i]);
  return (at < 0 ? left.length : at) + 1;
}

const tell = (words) => byId("verdict").replaceChildren(words);

const chosenOrder = () => byId("compare-form").elements.order.value;

function busy(runs) {
  running = runs;
  byId("compare-run").hidden = runs !== null;
  byId("compare-stop").hidden = runs === null;
}

export function setUpCompare() {
  const form = byId("compare-form");
  const explain = () => (byId("order-hint").textContent = HINTS[chosenOrder()]);
  form.addEventListener("change", explain);
  form.addEventListener("submit", (event) => {
    event.preventDefault();
    const prompt = byId("compare-prompt").value.trim();
    if (prompt && !running) compare(prompt);
  });
  byId("compare-stop").addEventListener("click", () => running?.forEach((run) => run.abort()));
  explain();
}

/** Without a drafter there is nothing to compare. */
export function allowCompare(possible) {
  byId("compare-run").disabled = !possible;
  if (!possible) tell("This server has no drafter, so there is nothing to compare.");
}
