// A question and its answer on the page, with what can be done to them.

import { AnswerView } from "./answer.js";
import { copyButton } from "./copy.js";
import { element } from "./dom.js";

export class TurnView {
  constructor(turn, { onEdit, onAgain }) {
    this.turn = turn;
    const asked = element("div", { class: "body" }, turn.question);
    this.answerBody = element("div", { class: "body" });
    this.answerHead = element("h3", {}, "Answer");
    const actions = (...buttons) => element("div", { class: "turn-actions" }, ...buttons);
    const answer = copyButton(() => this.turn.answer?.text ?? "");
    const nodes = [
      ["question", element("h3", {}, "You"), asked, actions(copyButton(() => turn.question), button("Edit", onEdit))],
      ["answer", this.answerHead, this.answerBody, actions(answer, button("Regenerate", onAgain, "again"))],
    ];
    this.nodes = nodes.map(([kind, ...parts]) => element("article", { class: `turn ${kind}` }, ...parts));
    if (turn.answer) this.newAnswer().recall(turn.answer);
  }

  /** An empty answer in place of the one before. */
  newAnswer() {
    return new AnswerView(this.answerBody, this.answerHead, { prose: true });
  }

  remove() {
    for (const node of this.nodes) node.remove();
  }
}

function button(label, onClick, kind = "") {
  const made = element("button", { type: "button", class: `small ${kind}` }, label);
  made.addEventListener("click", onClick);
  return made;
}
