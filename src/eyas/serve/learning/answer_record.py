"""A finished answer as a line of the file that `eyas data answer` writes, so that `eyas adapt` takes it as it is.

Tokens are what a drafter learns from; the messages beside them are for people and for the doctor's prompts. States of
the target are not kept: they are thousands of bytes a token where the tokens are ten, and one pass of the target over
the answers gives them again (`train/sources/live.py`).
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
    """One answer that its client has got to the end."""

    body: GenerationRequest
    prompt: tuple[int, ...]
    choice: ChoiceOutput
    key: str | None
    """The key's name in logs; None without one."""

    @property
    def tokens(self) -> tuple[int, ...]:
        """What the target said, a stop token included."""
        return tuple(token for delta in self.choice.deltas for token in delta.tokens)


class AnswerRecorder:
    """Writes the answers of one target."""

    def __init__(self, target: TargetText, request_builder: RequestBuilder, author: Mapping[str, str]) -> None:
        """`author` names the target, and its weights if they can be seen."""
        self._target, self._builder, self._author = target, request_builder, dict(author)

    def line(self, answer: FinishedAnswer) -> bytes | None:
        """The answer as JSON with a line break; None if it says nothing."""
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
        """The conversation as the chat template got it; a bare prompt as a question."""
        if isinstance(answer.body, ChatCompletionRequest):
            return self._builder.messages(answer.body)
        return [{"role": "user", "content": self._target.decode(answer.prompt, skip_special_tokens=False)}]


def _message(choice: ChoiceOutput) -> dict[str, Any]:
    """The assistant's message under the names that files of conversations have."""
    message = choice.message
    said: dict[str, Any] = {"role": "assistant", "content": message["content"] or ""}
    if choice.parser is not None and choice.parser.reasoning:
        said["reasoning_content"] = choice.parser.reasoning
    return said | ({"tool_calls": message["tool_calls"]} if "tool_calls" in message else {})
