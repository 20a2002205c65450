// Polls the server while the page is visible, and passes on the snapshots.

import { readStatus } from "./api.js";

const EVERY = 2000;

export class Watch {
  constructor(onSeen, onLost) {
    this.onSeen = onSeen;
    this.onLost = onLost;
    this.timer = null;
    document.addEventListener("visibilitychange", () => this.lookSoon());
  }

  /** Poll now, and from now on. */
  async lookSoon() {
    clearTimeout(this.timer);
    this.timer = null;
    if (document.hidden) return;
    const turn = (this.turn = {});
    try {
      const status = await readStatus();
      if (this.turn === turn) this.onSeen(status);
    } catch (error) {
      if (this.turn === turn) this.onLost(error);
    }
    if (this.turn === turn) this.timer = setTimeout(() => this.lookSoon(), EVERY);
  }
}
