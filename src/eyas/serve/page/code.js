// A request as code that gives the same answer without this page. The key is read from a variable.

const address = () => new URL("v1", document.baseURI).href;

/** For a shell. */
export function asCurl(body) {
  const json = JSON.stringify(body, null, 2).replaceAll("'", String.raw`'\''`);
  return [
    `curl ${address()}/chat/completions \\`,
    `  -H "Content-Type: application/json" \\`,
    `  -H "Authorization: Bearer $EYAS_API_KEY" \\`,
    `  -d '${json}'`,
  ].join("\n");
}

/** For OpenAI's Python client; other fields go into `extra_body`. */
export function asPython({ speculative, ...known }) {
  const fields = { ...known, extra_body: { speculative } };
  const lines = Object.entries(fields).map(([name, value]) => `    ${name}=${literal(value, "    ")},`);
  return [
    "import os",
    "",
    "from openai import OpenAI",
    "",
    `client = OpenAI(base_url=${literal(address())}, api_key=os.environ.get("EYAS_API_KEY", "none"))`,
    "answer = client.chat.completions.create(",
    ...lines,
    ")",
    "print(answer.choices[0].message.content)",
  ].join("\n");
}

/** A JSON value as Python writes it. */
function literal(value, indent = "") {
  if (value === null) return "None";
  if (typeof value === "boolean") return value ? "True" : "False";
  if (typeof value !== "object") return JSON.stringify(value);
  const [open, close] = Array.isArray(value) ? "[]" : "{}";
  const inner = `${indent}    `;
  const parts = Array.isArray(value)
    ? value.map((one) => literal(one, inner))
    : Object.entries(value).map(([name, one]) => `${JSON.stringify(name)}: ${literal(one, inner)}`);
  const line = open + parts.join(", ") + close;
  return line.length + indent.length < 90 && !line.includes("\n") ? line : `${open}\n${parts.map((part) => `${inner}${part},\n`).join("")}${indent}${close}`;
}
