// A conversation: questions with their answers, and the messages that are sent with the next question.

export class Conversation {
  constructor({ id = newId(), turns = [] } = {}) {
    this.id = id;
    this.turns = turns; // {question, answer}; the answer is a run's record, null if none came
  }

  /** The messages before a turn. A question without an answer is left out: templates want them in turns. */
  messagesBefore(index) {
    return this.turns.slice(0, index).flatMap(({ question, answer }) =>
      answer?.text
        ? [
            { role: "user", content: question },
            { role: "assistant", content: answer.text },
          ]
        : [],
    );
  }

  get title() {
    const words = (this.turns[0]?.question ?? "").replace(/\s+/g, " ");
    return words.length > 60 ? `${words.slice(0, 59)}…` : words;
  }
}

const newId = () => `${Date.now().toString(36)}-${Math.random().toString(36).slice(2, 8)}`;
