// A conversation: what was said goes back with every message, so that the model knows of it.

import { AnswerView, summary } from "./answer.js";
import { announce, byId, element } from "./dom.js";
import { Run } from "./run.js";
import { requestFields, systemMessages } from "./settings.js";

const EXAMPLES = [
  "Name three birds of prey.",
  "Explain in a few sentences why the sky is blue.",
  "Write a Python function that reverses a string.",
  "Count from one to twenty in words.",
];

let said = []; // messages so far, without the system's
let current = null; // the run under way

async function send(text) {
  byId("welcome").hidden = true;
  const question = turn("You", "question");
  question.body.textContent = text;
  const answer = turn("Answer", "answer");
  const view = new AnswerView(answer.body);
  const asked = { role: "user", content: text };
  const run = new Run({ ...requestFields(), messages: [...systemMessages(), ...said, asked] });
  busy(run);
  announce("Answering.");
  const keepInSight = setInterval(scrollAlong, 100);
  const answered = await view.follow(run);
  clearInterval(keepInSight);
  scrollAlong();
  if (current !== run) return; // started anew meanwhile
  busy(null);
  if (answered && run.text) said.push(asked, { role: "assistant", content: run.text });
  // Listened to, an answer is of use when it is complete: piece by piece it would be stammered.
  announce(answered ? `${run.finish === "aborted" ? "Stopped" : "Answer"}: ${run.text} ${summary(run)}` : "No answer.");
  byId("message").focus({ preventScroll: true });
}

function turn(who, kind) {
  const body = element("div", { class: "body" });
  byId("conversation").append(element("article", { class: `turn ${kind}` }, element("h3", {}, who), body));
  return { body };
}

function busy(run) {
  current = run;
  byId("send").hidden = run !== null;
  byId("stop").hidden = run === null;
}

/** Follow the answer's end, unless its reader has scrolled away from it. */
function scrollAlong() {
  const page = document.documentElement;
  const below = page.scrollHeight - window.innerHeight - window.scrollY;
  if (below > 0 && below < 160) window.scrollTo({ top: page.scrollHeight });
}

function startAnew() {
  current?.abort();
  busy(null);
  said = [];
  byId("conversation").replaceChildren();
  byId("welcome").hidden = false;
  byId("message").value = "";
  byId("message").focus();
  announce("A new conversation.");
}

export function setUpPlayground() {
  const message = byId("message");
  byId("composer").addEventListener("submit", (event) => {
    event.preventDefault();
    const text = message.value.trim();
    if (!text || current) return;
    message.value = "";
    send(text);
    window.scrollTo({ top: document.documentElement.scrollHeight });
  });
  message.addEventListener("keydown", (event) => {
    if (event.key === "Escape") current?.abort();
    if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
    event.preventDefault();
    byId("composer").requestSubmit();
  });
  byId("stop").addEventListener("click", () => current?.abort());
  byId("anew").addEventListener("click", startAnew);
  for (const example of EXAMPLES) {
    const chip = element("button", { type: "button", class: "chip" }, example);
    chip.addEventListener("click", () => {
      message.value = example;
      byId("composer").requestSubmit();
    });
    byId("examples").append(chip);
  }
}
