// Alarms shown as questions and answers: "Drafter useful: yes".

import { byId, element } from "./dom.js";
import { QUEUE_FULL, errorsOf } from "./flow.js";
import { RECENT } from "./history.js";
import { plural, whole } from "./numbers.js";

const QUESTIONS = { collapsed: "Drafter useful", drift: "Drafter steady with depth" };

/** The questions: whether all is well (null: unknown), the answer in a word, and its meaning. */
export function checks(status, recent) {
  return [requests(recent), engine(status), ...status.alarms.map((alarm) => drafter(alarm, status))];
}

function requests(recent) {
  const question = "Requests taken";
  const full = recent ? errorsOf(recent.errors, (code) => code === QUEUE_FULL) : 0;
  const failed = recent ? errorsOf(recent.errors, (code) => code >= 500) : 0;
  if (!full && !failed) return { question, well: true, answer: "yes", text: `no 429 and no 5xx in the last ${RECENT} s` };
  const text = `${full} refused with 429 because the queue was full, ${failed} failed with 5xx, in the last ${RECENT} s`;
  return { question, well: false, answer: "not all", text };
}

function engine({ state, counts: { failed_steps: failed, replaced_engines: replaced } }) {
  const question = "Engine healthy";
  if (state === "failed") return { question, well: false, answer: "no", text: "it failed and could not be replaced: restart the server" };
  if (!failed) return { question, well: true, answer: "yes", text: "no step has failed since the start" };
  const text = `${plural(failed, "step")} failed, ${plural(replaced, "engine")} replaced since the start; see the log`;
  return { question, well: false, answer: "again", text };
}

function drafter({ name, raised, text }, { served, counts }) {
  const question = QUESTIONS[name] ?? name;
  const alone = served.suffix ? "there are suffix drafts alone" : "the target decodes alone";
  if (!served.drafter) return { question, well: null, answer: "no drafter", text: alone };
  if (raised) return { question, well: false, answer: "no", text };
  if (!counts.drafts) return { question, well: null, answer: "unknown", text: "nothing has been drafted yet" };
  return { question, well: true, answer: "yes", text: `the alarm "${name}" is quiet; ${text}` };
}

export function showAlarms(status, recent) {
  byId("alarm-list").replaceChildren(
    ...checks(status, recent).map(({ question, well, answer, text }) =>
      element(
        "li",
        { class: well === false ? "raised" : well ? "quiet-alarm" : null },
        element("b", {}, `${well === false ? "▲" : well ? "✓" : "·"} ${question}: ${answer}`),
        element("span", { class: well === false ? null : "soft" }, text),
      ),
    ),
  );
  byId("notice-list").replaceChildren(
    ...status.notices.map((notice) => {
      const ago = `${whole(status.at_seconds - notice.at_seconds)} s ago`;
      return element("li", {}, element("b", { class: "soft" }, ago), element("span", {}, notice.text));
    }),
  );
}
