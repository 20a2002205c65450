// Server-sent events out of a stream of bytes. A chunk of bytes may end anywhere, even within a character.

/** The data of each event. */
export async function* dataOf(bytes) {
  let rest = "";
  for await (const text of texts(bytes)) {
    const events = (rest + text).split("\n\n");
    rest = events.pop();
    for (const event of events) {
      const lines = event.split("\n").filter((line) => line.startsWith("data: "));
      if (lines.length) yield lines.map((line) => line.slice("data: ".length)).join("\n");
    }
  }
}

async function* texts(bytes) {
  const reader = bytes.getReader();
  const decoder = new TextDecoder();
  try {
    for (;;) {
      const { done, value } = await reader.read();
      if (done) return;
      yield decoder.decode(value, { stream: true });
    }
  } finally {
    await reader.cancel().catch(() => {}); // whoever stops listening hangs up, and the server stops answering
  }
}
