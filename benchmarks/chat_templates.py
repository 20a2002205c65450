"""Checks for every chat template (*.jinja) of a folder that training sees conversations as they were served.

Each case is a conversation with scripted answers. Served are the ids of a prompt, as the server has it, of the answer
in its raw form, and of the stop token. Trained are the ids that the chat encoder makes of the messages. The raw form is
written down here by rules of its own, from a rendering of the very texts. A case is accepted if both are the same and
everything served is masked.

    python benchmarks/chat_templates.py FOLDER [--least 44] [--target smollm2]
"""

import argparse
import copy
import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerBase

from eyas.data.chat_encoder import ChatEncoder, message_forms
from eyas.data.conversations import Conversation
from eyas.errors import UserError
from eyas.target.chat_template import TEMPLATE_ERRORS, ChatTemplateOptions, render_chat
from eyas.target.text import load_tokenizer

PARIS, ROME, THOUGHT = "The capital is Paris.", "It is sunny in Rome.", "Let me see: the user asks."
USER = {"role": "user", "content": "What is the capital of France?"}
ANSWER = {"role": "assistant", "content": PARIS}
CALL = {"id": "call_1", "type": "function", "function": {"name": "get_weather", "arguments": '{"city": "Rome"}'}}
WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "The weather in a city.",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string", "description": "Its name."}},
            "required": ["city"],
        },
    },
}
CASES: dict[str, list[dict[str, Any]]] = {
    "one turn": [USER, ANSWER],
    "system prompt": [{"role": "system", "content": "Be brief."}, USER, ANSWER],
    "two turns": [USER, ANSWER, {"role": "user", "content": "And Rome?"}, {"role": "assistant", "content": ROME}],
    "thinking in the answer": [USER, {**ANSWER, "content": f"<think>\n{THOUGHT}\n</think>\n\n{PARIS}"}],
    "reasoning_content": [USER, {**ANSWER, "reasoning_content": THOUGHT}],
    "tool turns": [
        USER,
        {"role": "assistant", "content": "", "tool_calls": [CALL]},
        {"role": "tool", "content": '{"sky": "clear"}', "tool_call_id": "call_1"},
        {"role": "assistant", "content": ROME},
    ],
    "cut while thinking": [USER, {**ANSWER, "content": f"<think>\n{THOUGHT}"}],
}

CALL_STOPS = ("<|return|>", "<|call|>", "<|eom_id|>", "<|tool_response>", "<|observation|>", "<|tools_suffix|>")
"""Further stop tokens of models whose templates know them; their generation configs name them."""

MARKER = re.compile(r"<[^<>\s{}'\"]+>|\[/?[A-Z_]+\]|\[e~\[|\]~b\]")
THINK = re.compile(r"<[\w:]*think[\w:]*>|\[THINK\]|<\|START_THINKING\|>|<\|channel>thought", re.IGNORECASE)
END_THINK = re.compile(r"</[\w:]*think[\w:]*>|\[/THINK\]|<\|END_THINKING\|>|<channel\|>", re.IGNORECASE)


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """Outcome of a case."""

    verdict: str
    reason: str = ""


class Server:
    """Renders and tokenises as the server does, with one template."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, source: str) -> None:
        self.tokenizer, self.source = copy.deepcopy(tokenizer), source
        self.tokenizer.chat_template = source
        self.tokenizer.bos_token, self.tokenizer.eos_token = "<s>", "</s>"
        texts = set(MARKER.findall(source)) | {"<s>", "</s>"}
        for messages in CASES.values():
            try:
                texts |= set(MARKER.findall(self.render(next(iter(message_forms(messages))), opening=True)))
            except TEMPLATE_ERRORS:
                continue
        self.tokenizer.add_special_tokens({"additional_special_tokens": sorted(texts)})
        self.stop = self._stop()
        self.stops = {"</s>", self.stop, *(text for text in CALL_STOPS if text in texts)}
        self.stop_ids = {self.tokenizer.convert_tokens_to_ids(text) for text in self.stops}

    def render(self, messages: Sequence[dict[str, Any]], *, opening: bool = False, tools: bool = False) -> str:
        """Render messages as text."""
        options = ChatTemplateOptions(add_generation_prompt=opening)
        return render_chat(self.tokenizer, messages, [WEATHER] if tools else None, options)

    def ids(self, text: str) -> list[int]:
        """Tokenise a text that contains its special tokens."""
        ids: list[int] = self.tokenizer.encode(text, add_special_tokens=False)
        return ids

    def _stop(self) -> str:
        """The first marker after an answer, in its own turn or after it."""
        for end in (2, 3):
            text = self.render(CASES["two turns"][:end])
            markers = MARKER.findall(text.split(PARIS, 1)[1].split("And Rome?")[0])
            # <|END_TEXT|> and its like close the content, not the turn.
            if found := [marker for marker in markers if "TEXT" not in marker]:
                return found[0]
        return "</s>"

    def stop_of_call(self, messages: Sequence[dict[str, Any]], name: str) -> tuple[str, str]:
        """Whitespace and stop token after the tool call in the last message but one."""
        for end in (len(messages) - 1, len(messages)):
            text = self.render(messages[:end], tools=True)
            behind = text[text.rindex(name) :].split('"sky"')[0]
            places = [(place, stop) for stop in self.stops if (place := behind.find(stop)) >= 0]
            if places:
                place, stop = min(places)
                return behind[len(behind[:place].rstrip()) : place], stop
        return "", "</s>"


def raw_answer(server: Server, before: list[dict[str, Any]], message: dict[str, Any], *, tools: bool) -> str | None:
    """The text that the target generates for the message, without its stop token; None if the template omits it."""
    prompt = server.render(before, opening=True, tools=tools)
    written = server.render([*before, message], tools=tools)
    end = prompt.rstrip()
    opened = next((mark for mark in THINK.findall(prompt) if end.endswith(mark)), "")
    closed = any(end.endswith(mark) for mark in END_THINK.findall(prompt))
    content, thought = message.get("content") or "", message.get("reasoning_content", "")
    if message.get("tool_calls"):
        name = message["tool_calls"][0]["function"]["name"]
        if name not in written[len(server.render(before, tools=tools)) :]:
            return None
        turn = written[_common(prompt, written) :]
        turn = re.sub(rf"\A\s*({THINK.pattern})?\s*({END_THINK.pattern})\s*", "", turn, flags=re.IGNORECASE)
        at = turn.index(name)
        stops = [place for text in server.stops if (place := turn.find(text, at)) >= 0]
        return turn[: min(stops)] if stops else turn
    if opened and content.startswith(opened):
        content = content[len(opened) :].removeprefix("\n" if prompt.endswith("\n") else "")
    # Text of the template around the content that the target generates.
    lead, tail = "", ""
    for text, before_it, behind_it in (
        ("<|channel|>final<|message|>", "<|channel|>final<|message|>", ""),
        (">>>all", "all\n", ""),
        ("<|START_TEXT|>", "<|START_TEXT|>", "<|END_TEXT|>"),
    ):
        if text in server.source or text in written:
            lead, tail = before_it, behind_it
    history = server.render([*before, {"role": "assistant", "content": PARIS}, USER], tools=tools)
    blanks = re.match(r"\s*", history.rsplit(PARIS, 1)[1])
    tail += blanks[0] if blanks and history.rsplit(PARIS, 1)[1].startswith(blanks[0] + server.stop) else ""
    if not thought or closed:
        return lead + content + tail
    return _thinking(server, prompt, written, thought, opened=opened, lead=lead) + content + tail


def _thinking(server: Server, prompt: str, written: str, thought: str, *, opened: str, lead: str) -> str:
    """Reasoning in the template's tags; empty if it has none."""
    if thought in written:
        head, rest = written.split(thought, 1)
        return ("" if opened or not head.startswith(prompt) else head[len(prompt) :]) + thought + rest.split(PARIS)[0]
    closing = END_THINK.search(server.source)
    if closing is None:
        return lead
    mark = closing[0].replace("/", "")
    blank = "\n" if f"{mark}\\n" in server.source or f"{mark}\n" in server.source else ""
    return ("" if opened else mark + blank) + f"{thought}{blank}{closing[0]}{blank}{blank}{lead}"


def _common(one: str, other: str) -> int:
    size = next((i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))
    torn = re.search(r"[<\[][^<>\[\]\s]*$", one[:size]) if size < len(one) else None
    return torn.start() if torn else size


def try_case(server: Server, name: str) -> Outcome:
    """Compare served and trained token ids."""
    messages, tools, finished = CASES[name], name == "tool turns", not name.startswith("cut")
    encoder = ChatEncoder(server.tokenizer, server.stop_ids)
    conversation = Conversation(
        messages=tuple(messages), where=name, tools=(WEATHER,) if tools else (), finished=finished
    )
    try:
        samples, rows = encoder.samples(conversation), encoder.encode(conversation)
    except UserError as error:
        return Outcome(verdict="refused", reason=str(error).split("(", 1)[-1].split("); change")[0])
    expected: list[tuple[list[int], list[int]]] = []
    for form in message_forms(messages):
        try:
            expected = _served(server, form, tools=tools, finished=finished)
        except TEMPLATE_ERRORS:
            continue
        if len(expected) == sum(message["role"] == "assistant" for message in messages):
            break
    trained = [(list(sample.prompt_ids), list(sample.answer_ids)) for sample in samples]
    for (prompt, answer), (prompt_served, answer_served) in zip(trained, expected, strict=False):
        if (prompt, answer) != (prompt_served, answer_served):
            texts = [server.tokenizer.decode(ids) for ids in (answer, answer_served)]
            return Outcome(verdict="ids differ", reason=f"trained {texts[0]!r}, served {texts[1]!r}")
    if len(trained) != len(expected):
        return Outcome(verdict="ids differ", reason=f"{len(trained)} answers trained, {len(expected)} served")
    for prompt, answer in expected:
        size = len(prompt) + len(answer)
        if not any(list(row.ids[:size]) == prompt + answer and all(row.mask[len(prompt) : size]) for row in rows):
            return Outcome(verdict="ids differ", reason="an answer is in no row")
    left_out = len(expected) < sum(message["role"] == "assistant" for message in messages)
    return Outcome(verdict="accepted", reason="without the calls, which it leaves out" if left_out else "")


def _served(
    server: Server, messages: list[dict[str, Any]], *, tools: bool, finished: bool
) -> list[tuple[list[int], list[int]]]:
    made = []
    for i, message in enumerate(messages):
        if message["role"] != "assistant":
            continue
        raw = raw_answer(server, messages[:i], message, tools=tools)
        if raw is None:
            continue
        stop = server.stop
        if message.get("tool_calls"):
            blanks, stop = server.stop_of_call(messages[: i + 2], message["tool_calls"][0]["function"]["name"])
            raw += "" if raw.endswith(blanks) else blanks
        if not finished:
            raw, stop = raw[: raw.index(message["content"][-20:]) + 20], ""
        prompt = server.render(messages[:i], opening=True, tools=tools)
        made.append((server.ids(prompt), server.ids(raw) + (server.ids(stop) if stop else [])))
    return made


def main() -> int:
    """Print how many templates accept each case, and the errors of the others."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--least", type=int, default=0, help="templates that every case needs; fewer are an error")
    parser.add_argument("--target", default="smollm2", help="whose tokenizer is used")
    arguments = parser.parse_args()
    tokenizer, _ = load_tokenizer(arguments.target)
    templates = sorted(arguments.folder.glob("*.jinja"))
    counts: dict[str, dict[str, int]] = {name: {} for name in CASES}
    for path in templates:
        try:
            server = Server(tokenizer, path.read_text(encoding="utf-8"))
        except TEMPLATE_ERRORS as error:  # not even two turns
            server, reason = None, str(error)
        for name in CASES:
            outcome = try_case(server, name) if server else Outcome(verdict="refused", reason=reason)
            counts[name][outcome.verdict] = counts[name].get(outcome.verdict, 0) + 1
            if outcome.reason:
                print(f"{path.stem}: {name}: {outcome.verdict}: {outcome.reason[:400]}")
    print(f"\n{'of ' + str(len(templates)) + ' templates':<24}{'accepted':>10}{'refused':>10}{'ids differ':>12}")
    for name, found in counts.items():
        print(
            f"{name:<24}"
            + "".join(f"{found.get(v, 0):>{w}}" for v, w in (("accepted", 10), ("refused", 10), ("ids differ", 12)))
        )
    return int(any(found.get("accepted", 0) < arguments.least for found in counts.values()))


if __name__ == "__main__":
    sys.exit(main())
