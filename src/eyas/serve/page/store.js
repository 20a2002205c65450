// Conversations in localStorage: the latest ones, within a bound, in this browser alone. Never the API key.
//
// The list is read anew before each change, since another tab may have changed it. Which one a tab has open is in
// sessionStorage, so that a reload comes back to it.

const NAME = "eyas-conversations";
const OPEN = "eyas-conversation";
export const MOST = 20; // conversations
const ROOM = 2_000_000; // characters of JSON in all

/** The stored conversations, the latest first: {id, at, turns}. */
export function kept() {
  try {
    const list = JSON.parse(localStorage.getItem(NAME) ?? "[]");
    return Array.isArray(list) ? list.filter(sound) : [];
  } catch {
    return []; // forbidden, or not ours
  }
}

/** Store a conversation as the latest. Returns whether that was possible. */
export function keep({ id, turns }) {
  const others = kept().filter((one) => one.id !== id);
  return write([{ id, at: Date.now(), turns }, ...others].slice(0, MOST));
}

/** Forget one conversation, or all. */
export function forget(id = null) {
  write(id === null ? [] : kept().filter((one) => one.id !== id));
}

/** The conversation that this tab had open. */
export function reopened() {
  try {
    return kept().find((one) => one.id === sessionStorage.getItem(OPEN)) ?? null;
  } catch {
    return null;
  }
}

export function rememberOpen(id) {
  try {
    sessionStorage.setItem(OPEN, id);
  } catch {
    // forbidden: a reload begins anew
  }
}

/** Write as many as fit; the only one that is too long goes without its tokens, which are most of it. */
function write(list) {
  try {
    let text = JSON.stringify(list);
    while (text.length > ROOM && list.length > 1) text = JSON.stringify((list = list.slice(0, -1)));
    if (text.length > ROOM) text = JSON.stringify([withoutTokens(list[0])]);
    if (list.length) localStorage.setItem(NAME, text);
    else localStorage.removeItem(NAME);
    return true;
  } catch {
    return false; // full or forbidden
  }
}

const withoutTokens = (one) => ({
  ...one,
  turns: one.turns.map((turn) => ({ ...turn, answer: turn.answer && { ...turn.answer, tokens: [], passes: [] } })),
});

const sound = (one) =>
  typeof one?.id === "string" &&
  Array.isArray(one.turns) &&
  one.turns.every(
    ({ question, answer }) =>
      typeof question === "string" &&
      (answer === null || (typeof answer?.text === "string" && Array.isArray(answer.tokens) && Array.isArray(answer.passes))),
  );
