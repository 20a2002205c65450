// The server's API: its state, and answers as they come. Addresses are relative, so that a proxy may put a path before.

import { authorization, keyRefused } from "./key.js";
import { dataOf } from "./events.js";

/** The server said no, or failed; the message is its own. */
export class Refusal extends Error {}

/** GET /status. */
export async function readStatus() {
  const reply = await fetch("status", { headers: authorization(), cache: "no-store" });
  return (await accepted(reply)).json();
}

/** The chunks of a streamed chat, each token with its origin. */
export async function* chat(body, signal) {
  const reply = await fetch("v1/chat/completions", {
    method: "POST",
    headers: { "content-type": "application/json", ...authorization() },
    body: JSON.stringify({ ...body, stream: true }),
    signal,
  });
  await accepted(reply);
  for await (const data of dataOf(reply.body)) {
    if (data === "[DONE]") return;
    const chunk = JSON.parse(data);
    if (chunk.error) throw new Refusal(chunk.error.message);
    yield chunk;
  }
  throw new Refusal("the connection ended before the answer did");
}

async function accepted(reply) {
  if (reply.ok) return reply;
  if (reply.status === 401) keyRefused();
  const told = await reply.json().catch(() => null);
  throw new Refusal(told?.error?.message ?? `the server answered ${reply.status}`);
}
