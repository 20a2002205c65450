// The server's API: its state, and answers as they come. Addresses are relative, so that a proxy may put a path before.

import { authorization, keyRefused } from "./key.js";
import { dataOf } from "./events.js";

const PATIENCE = 10_000; // milliseconds after which a silent server is out of reach

/** The server refused or failed; the message is the server's. */
export class Refusal extends Error {}

/** The server cannot be reached, or its answer was cut off. */
export class Lost extends Error {}

/** GET /status. */
export const readStatus = () => read("status");

/** GET /status/history: the last hour. */
export const readHistory = async () => (await read("status/history")).samples;

async function read(address) {
  const signal = AbortSignal.timeout(PATIENCE);
  try {
    const reply = await fetch(address, { headers: authorization(), cache: "no-store", signal });
    return await (await accepted(reply)).json();
  } catch (error) {
    throw error instanceof Refusal ? error : new Lost("out of reach");
  }
}

/** The chunks of a streamed chat, each token with its origin. */
export async function* chat(body, signal) {
  try {
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
  } catch (error) {
    throw error instanceof TypeError ? new Lost("the connection to the server is lost") : error;
  }
  throw new Lost("the connection ended before the answer did");
}

async function accepted(reply) {
  if (reply.ok) return reply;
  if (reply.status === 401) keyRefused();
  const told = await reply.json().catch(() => null);
  throw new Refusal(told?.error?.message ?? `the server answered ${reply.status}`);
}
