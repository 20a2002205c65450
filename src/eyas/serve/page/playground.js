// The current conversation: all messages are sent with every question.

import { summary } from "./answer.js";
import { Conversation } from "./conversation.js";
import { announce, byId, element } from "./dom.js";
import { Run } from "./run.js";
import { requestFields, settingsFit, systemMessages } from "./settings.js";
import { keep, rememberOpen, reopened } from "./store.js";
import { TurnView } from "./turn.js";

const EXAMPLES = [
  "Name three birds of prey.",
  "Explain in a few sentences why the sky is blue.",
  "Write a Python function that reverses a string.",
  "Count from one to twenty in words.",
];

let conversation = new Conversation();
let views = []; // of its turns
let current = null; // the run under way
let editing = null; // the turn that the next message replaces, with all after it
const listeners = []; // told whenever something is kept, begun or ended

/** Call `then` whenever an answer begins or ends, or another conversation is open. */
export const onChange = (then) => listeners.push(then);

export const openConversation = () => conversation;

/** The request that the message box would send now; with an empty box, the last one. */
export function nextRequest() {
  const written = byId("message").value.trim();
  const last = Math.max(0, conversation.turns.length - 1);
  const at = written ? editing ?? conversation.turns.length : last;
  const content = written || conversation.turns[last]?.question || EXAMPLES[0];
  return { messages: [...systemMessages(), ...conversation.messagesBefore(at), { role: "user", content }], ...requestFields() };
}

function ask(question) {
  if (editing !== null) cutTo(editing);
  edit(null);
  conversation.turns.push({ question, answer: null });
  showTurn(conversation.turns.length - 1);
  answer(conversation.turns.length - 1);
}

async function answer(at) {
  const [asked, turn, view] = [conversation, conversation.turns[at], views[at].newAnswer()];
  turn.answer = null;
  const messages = [...systemMessages(), ...conversation.messagesBefore(at), { role: "user", content: turn.question }];
  const run = new Run({ ...requestFields(), messages });
  busy(run);
  announce("Answering.");
  const keepInSight = setInterval(scrollAlong, 100);
  const answered = await view.follow(run);
  clearInterval(keepInSight);
  if (asked !== conversation) return; // another one is open by now
  scrollAlong();
  busy(null);
  if (run.text) turn.answer = run.record();
  byId("kept-wrong").textContent = keep(conversation) ? "" : "This browser does not let the page keep conversations.";
  tellListeners();
  // Screen readers get the complete answer, not its pieces.
  announce(answered ? `${run.finish === "aborted" ? "Stopped" : "Answer"}: ${run.text} ${summary(run)}` : "No answer.");
  byId("message").focus({ preventScroll: true });
}

function showTurn(at) {
  const view = new TurnView(conversation.turns[at], {
    onEdit: () => edit(at),
    onAgain: () => !current && settingsFit() && (cutTo(at + 1), answer(at)),
  });
  views.push(view);
  byId("conversation").append(...view.nodes);
  byId("welcome").hidden = true;
}

/** Leave out all turns from this one on. */
function cutTo(at) {
  for (const view of views.splice(at)) view.remove();
  conversation.turns.length = at;
}

/** Begin or end (null) the edit of a question: it changes when it is sent, not before. */
function edit(at) {
  if (at !== null) byId("message").value = conversation.turns[at].question;
  else if (editing !== null) byId("message").value = "";
  editing = at;
  byId("editing").hidden = at === null;
  byId("message").focus();
}

function busy(run) {
  current = run;
  byId("send").hidden = run !== null;
  byId("stop").hidden = run === null;
  byId("conversation").setAttribute("aria-busy", String(run !== null));
  tellListeners();
}

const tellListeners = () => listeners.forEach((then) => then());

/** Pixels of the conversation's end that are below the window or behind the message box. */
const hiddenBelow = () =>
  byId("conversation").getBoundingClientRect().bottom + byId("composer").offsetHeight - window.innerHeight;

/** Scroll to the end of the conversation. */
export function showEnd() {
  if (conversation.turns.length && hiddenBelow() > 0) window.scrollBy(0, hiddenBelow());
  byId("message").focus({ preventScroll: true });
}

/** Follow the answer's end, unless its reader has scrolled away from it. */
function scrollAlong() {
  const below = hiddenBelow();
  if (below > 0 && below < 160) window.scrollBy(0, below);
}

/** Open a kept conversation, or a new one. */
export function open(kept = null) {
  current?.abort();
  conversation = new Conversation(kept ?? {});
  rememberOpen(conversation.id);
  views = [];
  byId("conversation").replaceChildren();
  byId("welcome").hidden = false;
  conversation.turns.forEach((_, at) => showTurn(at));
  byId("message").value = "";
  edit(null);
  busy(null);
}

export function setUpPlayground() {
  const message = byId("message");
  byId("composer").addEventListener("submit", (event) => {
    event.preventDefault();
    const text = message.value.trim();
    if (!text || current || !settingsFit()) return;
    ask(text);
    message.value = "";
    if (hiddenBelow() > 0) window.scrollBy(0, hiddenBelow());
  });
  message.addEventListener("keydown", (event) => {
    if (event.key === "Escape") current ? current.abort() : edit(null);
    if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
    event.preventDefault();
    byId("composer").requestSubmit();
  });
  byId("stop").addEventListener("click", () => current?.abort());
  byId("edit-cancel").addEventListener("click", () => edit(null));
  byId("anew").addEventListener("click", () => (open(), announce("A new conversation.")));
  for (const example of EXAMPLES) {
    const chip = element("button", { type: "button", class: "chip" }, example);
    chip.addEventListener("click", () => ((message.value = example), byId("composer").requestSubmit()));
    byId("examples").append(chip);
  }
  open(reopened());
}
