"""Writes finished answers as lines of the format of `eyas data answer`, so that `eyas adapt` can read them.

A drafter learns from the tokens; the messages beside them are for people and for the doctor's prompts. States of the
target are not kept: they take thousands of bytes per token where the tokens take ten, and one pass of the target over
the answers computes them again (`train/sources/live.py`).
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from eyas.engine.request import FinishReason
from eyas.serve.builders.request_builder import RequestBuilder
from eyas.serve.builders.response_builder import ChoiceOutput
from eyas.serve.protocol.completions import ChatCompletionRequest, GenerationRequest
from eyas.target.text import TargetText


@dataclass(frozen=True, kw_only=True)
class FinishedAnswer:
    """A complete answer that its client has received."""

    body: GenerationRequest
    prompt: tuple[int, ...]
    choice: ChoiceOutput
    key: str | None
    """The key's name in logs; None without one."""

    @property
    def tokens(self) -> tuple[int, ...]:
        """The tokens of the answer, stop token included."""
        return tuple(token for delta in self.choice.deltas for token in delta.tokens)


class AnswerRecorder:
    """Writes the answers of one target."""

    def __init__(self, target: TargetText, request_builder: RequestBuilder, author: Mapping[str, str]) -> None:
        """`author` names the target, and its weights if they can be seen."""
        self._target, self._builder, self._author = target, request_builder, dict(author)

    def line(self, answer: FinishedAnswer) -> bytes | None:
        """The answer as JSON with a line break; None if it is empty."""
        said, tokens = _message(answer.choice), answer.tokens
        if not tokens or not (said.get("tool_calls") or (said["content"] + said.get("reasoning_content", "")).strip()):
            return None
        record: dict[str, Any] = {"messages": [*self._asked(answer), said]}
        if isinstance(answer.body, ChatCompletionRequest):
            tools = [tool.model_dump(exclude_none=True) for tool in self._builder.tool_support.offered(answer.body)]
            variables = {**self._target.template_variables, **(answer.body.chat_template_kwargs or {})}
            record |= {"tools": tools} if tools else {}
            record |= {"chat_template_kwargs": variables} if variables else {}
        record |= {
            "finished": answer.choice.deltas[-1].finished is FinishReason.STOP,
            **self._author,
            "key": answer.key,
            "samples": [{"prompt_token_ids": answer.prompt, "token_ids": tokens}],
        }
        return json.dumps(record, ensure_ascii=False, separators=(",", ":")).encode() + b"\n"

    def _asked(self, answer: FinishedAnswer) -> list[dict[str, Any]]:
        """The conversation as the chat template gets it; a bare prompt as a user's message."""
        if isinstance(answer.body, ChatCompletionRequest):
            return self._builder.messages(answer.body)
        return [{"role": "user", "content": self._target.decode(answer.prompt, skip_special_tokens=False)}]


def _message(choice: ChoiceOutput) -> dict[str, Any]:
    """The assistant's message, with the field names of conversation files."""
    message = choice.message
    said: dict[str, Any] = {"role": "assistant", "content": message["content"] or ""}
    if choice.parser is not None and choice.parser.reasoning:
        said["reasoning_content"] = choice.parser.reasoning
    return said | ({"tool_calls": message["tool_calls"]} if "tool_calls" in message else {})
