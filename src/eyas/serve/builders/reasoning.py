"""Reasoning in the target's own format: told apart from the content, and free of the grammar that the content keeps to.

Which parser to use is the operator's choice, as with vLLM. Whether an answer begins with reasoning is seen from the end
of its prompt, so that whatever turned thinking off in the template is respected.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from transformers import PreTrainedTokenizerBase

from eyas.engine.grammar import Grammar
from eyas.grammar.after_reasoning import AfterReasoningGrammar
from eyas.serve.api_error import ApiError
from eyas.serve.parsers import harmony
from eyas.serve.parsers.base import AnswerParser, ToolParser
from eyas.serve.parsers.harmony import HarmonyParser
from eyas.serve.parsers.registry import ReasoningFormat
from eyas.serve.parsers.think_tags import ReasoningStart, ThinkTagFormat

PROMPT_END = 8
"""Tokens at the end of a prompt in which a template may open or close the reasoning."""


@dataclass(frozen=True, kw_only=True)
class ReasoningSupport:
    """What one target supports of reasoning."""

    tokenizer: PreTrainedTokenizerBase
    format: ReasoningFormat | None
    """None if reasoning is not told apart."""

    def new_parser(self, prompt: Sequence[int], tool_parser: ToolParser | None) -> AnswerParser | None:
        """A parser of one answer to a prompt; None if there is nothing to parse."""
        if self.format is None:
            return tool_parser
        if isinstance(self.format, ThinkTagFormat):
            return self.format.new_parser(self._start_of(self.format, prompt), tool_parser)
        return tool_parser or HarmonyParser(max_calls=None, calls_allowed=False)

    def after_reasoning(self, grammar: Grammar, prompt: Sequence[int], field: str) -> Grammar:
        """The grammar, applied behind the reasoning of an answer to this prompt."""
        if self.format is None:
            return grammar
        if not isinstance(self.format, ThinkTagFormat):
            final = harmony.CHANNEL + "final"
            constrained = f"{final} {harmony.CONSTRAIN}json"
            return AfterReasoningGrammar(
                grammar, ends=[self._encode(header + harmony.MESSAGE) for header in (final, constrained)]
            )
        begins = self._start_of(self.format, prompt)
        if begins is ReasoningStart.CLOSED:
            return grammar
        start, end = self._encode(self.format.begin), self._encode(self.format.end)
        if begins is ReasoningStart.UNSAID and len(start) != 1:
            message = (
                f"{field}: {self.format.begin} is not one token here, so nothing tells whether the answer begins with "
                "reasoning; turn thinking off by chat_template_kwargs"
            )
            raise ApiError(400, message, field=field, code="unsupported_parameter")
        return AfterReasoningGrammar(grammar, ends=[end], start=start[0] if begins is ReasoningStart.UNSAID else None)

    def _start_of(self, format_: ThinkTagFormat, prompt: Sequence[int]) -> ReasoningStart:
        return format_.start_of(str(self.tokenizer.decode(list(prompt[-PROMPT_END:]), skip_special_tokens=False)))

    def _encode(self, text: str) -> list[int]:
        ids: list[int] = self.tokenizer.encode(text, add_special_tokens=False)
        return ids
