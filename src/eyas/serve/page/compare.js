// Runs one prompt without and with speculation, twice each, and compares speed and text.
//
// All runs have one seed. A token is a function of the target's distribution and the request's own noise, so the
// texts are the same at any temperature, up to rounding where two tokens are all but equally likely.

import { AnswerView } from "./answer.js";
import { readStatus } from "./api.js";
import { byId, element } from "./dom.js";
import { fixed, known, plural } from "./numbers.js";
import { Run } from "./run.js";
import { drafting, requestFields, settingsFit, systemMessages } from "./settings.js";
import { judge, median } from "./verdict.js";

const SIDES = ["plain", "drafted"];
const NAMES = { plain: "without speculation", drafted: "with speculation" };
// The first run may be faster or slower, so each side goes first once.
const ORDERS = { one: [["plain"], ["drafted"], ["drafted"], ["plain"]], both: [SIDES, SIDES] };
const HINTS = {
  one:
    "One machine answers both, so they take turns: without, with, with, without. Speeds are the median of each side's " +
    "two runs. The prompt is read once before, untimed, so that neither pays for it.",
  both:
    "Both share the machine at this moment, so each is slower than alone; this shows two users, not a fair race. Each " +
    "side runs twice; the prompt is read once before, untimed.",
};

let firstDraft = { mode: "auto" }; // how the second token of an answer is surely drafted for, if there is a drafter
let running = null; // {runs, stopped}: all runs begun so far, and whether to begin no more

async function compare(prompt) {
  const order = chosenOrder();
  const messages = [...systemMessages(), { role: "user", content: prompt }];
  const fields = requestFields();
  const common = { ...fields, messages, seed: fields.seed ?? Math.floor(Math.random() * 2 ** 31) };
  // Six answers to one prompt are no data to learn from.
  const ways = { plain: { mode: "off", learn: false }, drafted: { ...drafting(), learn: false } };
  const runs = { plain: [], drafted: [] };
  begin();
  const others = await answersInFlight();
  tell("Reading the prompt…");
  // The second token is drafted for, so that both target and drafter have read the prompt when the clock starts.
  const reading = { ...common, max_tokens: 2, speculative: { ...firstDraft, learn: false } };
  let answered = await follow("plain", new Run(reading));
  for (const [step, sides] of ORDERS[order].entries()) {
    if (!answered || running.stopped) break;
    tell(`Run ${step + 1} of ${ORDERS[order].length}: ${sides.map((side) => NAMES[side]).join(" and ")}…`);
    const outcomes = sides.map((side) => {
      const run = new Run({ ...common, speculative: ways[side] });
      runs[side].push(run);
      return follow(side, run);
    });
    answered = (await Promise.all(outcomes)).every(Boolean);
  }
  if (running.stopped) tell("Stopped.");
  else if (!answered) tell("One run has no answer, so there is nothing to compare.");
  else showVerdict(runs, order, others);
  end();
}

/** Show a run on its side, in place of the one before. */
function follow(side, run) {
  running.runs.push(run);
  return new AnswerView(byId(`${side}-side`), byId(`${side}-title`)).follow(run);
}

/** Answers to other clients, which share the machine. */
async function answersInFlight() {
  try {
    return (await readStatus()).load.in_flight;
  } catch {
    return 0; // the first run will tell what is wrong
  }
}

function showVerdict(runs, order, others) {
  const speeds = Object.fromEntries(SIDES.map((side) => [side, runs[side].map((run) => run.speed)]));
  const { ratio, words } = judge(speeds.plain, speeds.drafted);
  const all = [...runs.plain, ...runs.drafted];
  const differs = all.find((run) => run.text !== all[0].text);
  const parts = [
    differs
      ? element("strong", { class: "differs" }, `≠ The texts differ from character ${firstDifference(all[0], differs)} on.`)
      : element("strong", { class: "same" }, `✓ Same text, ${plural(all[0].tokens.length, "token")}.`),
    element("span", {}, ` ${words}`),
  ];
  if (known(ratio)) showSpeeds(speeds, Math.min(1, 1 / ratio), Math.min(1, ratio));
  if (order === "both") parts.push(element("span", { class: "soft" }, " Both shared the machine."));
  if (others) {
    const told = ` ${plural(others, "answer")} of others ran at the start, so these are not the speeds of a free machine.`;
    parts.push(element("span", { class: "soft" }, told));
  }
  if (differs) {
    const told = " Where two tokens are all but equally likely, rounding may decide either way; the rest is another text then.";
    parts.push(element("span", { class: "soft" }, told));
  }
  byId("verdict").replaceChildren(...parts);
}

/** Bars relative to the faster side, and their parts. */
function showSpeeds(speeds, ...shares) {
  SIDES.forEach((side, i) => {
    byId(`${side}-speed`).style.width = `${100 * shares[i]}%`;
    const each = speeds[side].map((speed) => fixed(speed)).join(" and ");
    byId(`${side}-median`).textContent = speeds[side].length ? `median ${fixed(median(speeds[side]))} tokens/s of ${each}` : "";
  });
}

function firstDifference(one, other) {
  const [left, right] = [[...one.text], [...other.text]];
  const at = left.findIndex((character, i) => character !== right[i]);
  return (at < 0 ? left.length : at) + 1;
}

const tell = (words) => byId("verdict").replaceChildren(words);

const chosenOrder = () => byId("compare-form").elements.order.value;

function begin() {
  running = { runs: [], stopped: false };
  showButtons();
  showSpeeds({ plain: [], drafted: [] }, 0, 0);
}

function end() {
  running = null;
  showButtons();
}

function showButtons() {
  byId("compare-run").hidden = running !== null;
  byId("compare-stop").hidden = running === null;
}

function stop() {
  if (!running) return;
  running.stopped = true;
  for (const run of running.runs) run.abort();
}

export function setUpCompare() {
  const form = byId("compare-form");
  const explain = () => (byId("order-hint").textContent = HINTS[chosenOrder()]);
  form.addEventListener("change", explain);
  form.addEventListener("submit", (event) => {
    event.preventDefault();
    const prompt = byId("compare-prompt").value.trim();
    if (prompt && !running && settingsFit()) compare(prompt);
  });
  byId("compare-stop").addEventListener("click", stop);
  explain();
}

/** Without drafting, or if requests cannot choose it, there is nothing to compare. */
export function allowCompare(served) {
  const drafts = served.max_depth > 0 || served.suffix;
  firstDraft = served.max_depth > 0 ? { mode: "fixed", depth: 1 } : { mode: "auto" };
  const why = !drafts ? "Nobody drafts on this server" : served.per_request ? "" : "This server drafts alike for all requests";
  const button = byId("compare-run");
  if (why || button.disabled) tell(why && `${why}, so there is nothing to compare.`);
  button.disabled = Boolean(why);
}
