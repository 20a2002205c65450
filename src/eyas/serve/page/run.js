// One streaming answer: its tokens with their origins, its text, and times as measured by the client.

import { Lost, chat } from "./api.js";

const listeners = [];

/** Call `then` whenever an answer begins or ends. */
export const onRun = (then) => listeners.push(then);

export class Run {
  constructor(body) {
    this.body = { ...body, speculative: { ...body.speculative, details: true } };
    this.tokens = []; // {id, text, depth}; a depth of 0 is the target's own choice
    this.passes = []; // the depths of what each pass of the target gave
    this.text = "";
    this.reasoning = ""; // what a reasoning parser set apart
    this.counts = null; // how speculation goes, as the server counts
    this.finish = null; // why it ended: stop, length, aborted
    this.state = "running"; // then done, stopped, error or disconnected
    this.started = this.first = this.last = null;
    this.aborter = new AbortController();
  }

  /** Ask, and call `onPiece` with the new tokens whenever some came. An aborted run ends without an error. */
  async go(onPiece) {
    this.started = performance.now();
    tellListeners();
    try {
      for await (const chunk of chat(this.body, this.aborter.signal)) {
        const choice = chunk.choices[0];
        if (choice?.speculative) onPiece(this.take(choice));
      }
      this.state = "done";
    } catch (error) {
      if (error.name !== "AbortError") {
        this.state = error instanceof Lost ? "disconnected" : "error";
        throw error;
      }
      this.finish = "aborted";
      this.state = "stopped";
    } finally {
      tellListeners();
    }
  }

  abort() {
    this.aborter.abort();
  }

  take(choice) {
    const { tokens, texts, depths, ...counts } = choice.speculative;
    const fresh = tokens.map((id, i) => ({ id, text: texts[i], depth: depths[i] }));
    this.last = performance.now();
    if (this.first === null) {
      this.first = this.last;
      this.headStart = fresh.length;
    }
    this.tokens.push(...fresh);
    this.passes.push(depths);
    this.text += choice.delta.content ?? "";
    this.reasoning += choice.delta.reasoning ?? "";
    this.counts = counts;
    this.finish = choice.finish_reason;
    return fresh;
  }

  /** The shown data, for storage. */
  record() {
    const { tokens, passes, text, reasoning, finish, state, wait, speed, acceptanceLength, mode, foreseen, structured } = this;
    return { tokens, passes, text, reasoning, finish, state, wait, speed, acceptanceLength, mode, foreseen, structured };
  }

  /** Milliseconds until the first token. */
  get wait() {
    return this.first === null ? null : this.first - this.started;
  }

  /** Tokens per second after the first ones came. */
  get speed() {
    const seconds = (this.last - this.first) / 1000;
    return this.first === null || seconds <= 0 ? null : (this.tokens.length - this.headStart) / seconds;
  }

  get acceptanceLength() {
    return this.counts?.acceptance_length ?? null;
  }

  get mode() {
    return this.body.speculative.mode;
  }

  /** Whether the text is JSON by a schema, not prose. */
  get structured() {
    return this.body.response_format !== undefined;
  }

  /** The number of tokens from accepted drafts. */
  get foreseen() {
    return this.tokens.filter((token) => token.depth > 0).length;
  }
}

const tellListeners = () => listeners.forEach((then) => then());
