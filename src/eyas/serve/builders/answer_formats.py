"""Tool calls and reasoning in the target's own format: parsed from its answers, and enforced or left free by grammars.

The formats are in `parsers`. Which ones a target uses is the operator's choice, as in vLLM, or seen from its template.
Whether an answer begins with reasoning is seen from the end of its prompt, so whatever turned thinking off in the
template is respected.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

from transformers import PreTrainedTokenizerBase

from eyas.engine.grammar import Grammar
from eyas.grammar.after_reasoning import AfterReasoningGrammar
from eyas.serve.api_error import invalid, unsupported
from eyas.serve.grammar.structured_outputs import GrammarSpec
from eyas.serve.parsers.base import AnswerParser
from eyas.serve.parsers.formats import ReasoningFormat, ToolCallFormat
from eyas.serve.protocol.completions import ChatCompletionRequest, Tool
from eyas.target.text import TargetText

PROMPT_END = 8
"""Tokens at the end of a prompt in which a template may open or close the reasoning."""


def template_of(target: TargetText) -> str:
    """The chat template for conversations with tools."""
    tokenizer = target.tokenizer
    try:
        return str(tokenizer.get_chat_template(tools=[{}])) if tokenizer.chat_template else ""
    except ValueError:  # there are several templates and no default; a chat request gets the error
        return ""


class ToolSupport:
    """Tool calling for one target."""

    def __init__(
        self, model: str, template: str, format_: ToolCallFormat | None, special_tokens: Mapping[str, int]
    ) -> None:
        """`special_tokens` are the markers that are special tokens, by their text."""
        self._model, self._knows_tools = model, "tools" in template
        self.format, self._special_tokens = format_, special_tokens

    def require(self, field: str, fix: str) -> ToolCallFormat:
        """The format, or an error for the field that needs one."""
        if not self._knows_tools:
            raise unsupported(field, f"{field}: the chat template of {self._model} does not mention tools; {fix}")
        if self.format is None:
            problem = f"how {self._model} writes calls is not known; serve it with --tool-call-parser, or {fix}"
            raise unsupported(field, f"{field}: {problem}")
        return self.format

    def offered(self, body: ChatCompletionRequest) -> list[Tool]:
        """The tools that go into the prompt: those that the model may call."""
        if not body.tools:
            if body.tool_choice not in (None, "none", "auto"):
                raise invalid("tool_choice", "tool_choice asks for a call and there are no tools; give some")
            return []
        if body.tool_choice == "none":
            return []  # with any template: no tools are rendered
        self.require("tools", "leave them out, use tool_choice none or serve another model")
        names = [tool.function.name for tool in body.tools]
        if len(set(names)) < len(names):
            twice = next(name for name in names if names.count(name) > 1)
            raise invalid("tools", f"tools has two functions called {twice!r}; rename one")
        chosen = _chosen(body)
        if chosen is not None and chosen not in names:
            message = f"tool_choice names {chosen!r}; there are {', '.join(names)}"
            raise invalid("tool_choice.function.name", message)
        return body.tools

    def requires_call(self, body: ChatCompletionRequest) -> bool:
        """Whether the answer must be a call."""
        return bool(self.offered(body)) and (body.tool_choice == "required" or _chosen(body) is not None)

    def grammar_spec(self, body: ChatCompletionRequest) -> GrammarSpec | None:
        """The grammar of the calls, if tool_choice requires one."""
        if not self.requires_call(body):
            return None
        tools, chosen = self.offered(body), _chosen(body)
        called = [tool for tool in tools if chosen in (None, tool.function.name)]
        parallel = body.parallel_tool_calls and chosen is None
        text = self.require("tools", "").lark_grammar(called, parallel=parallel, special_tokens=self._special_tokens)
        return GrammarSpec(field="tools", kind="lark", text=text)

    def new_parser(self, body: ChatCompletionRequest) -> Callable[[], AnswerParser] | None:
        """Creates parsers for the answers; None if there are no tools to call."""
        tools = self.offered(body)
        if not tools or self.format is None:
            return None
        return partial(self.format.new_parser, tools, max_calls=None if body.parallel_tool_calls else 1)


def _chosen(body: ChatCompletionRequest) -> str | None:
    """The function that tool_choice names, if any."""
    choice = body.tool_choice
    return None if choice is None or isinstance(choice, str) else choice.function.name


@dataclass(frozen=True, kw_only=True)
class ReasoningSupport:
    """Reasoning for one target."""

    tokenizer: PreTrainedTokenizerBase
    format: ReasoningFormat | None
    """None if reasoning is not told apart from content."""

    def new_parser(self, prompt: Sequence[int], tool_parser: AnswerParser | None) -> AnswerParser | None:
        """A parser of one answer to a prompt; None if there is nothing to parse."""
        return tool_parser if self.format is None else self.format.new_parser(self._end_of(prompt), tool_parser)

    def after_reasoning(self, grammar: Grammar, prompt: Sequence[int], field: str) -> Grammar:
        """The grammar, applied behind the reasoning of an answer to this prompt."""
        end = None if self.format is None else self.format.reasoning_end(self._end_of(prompt))
        if end is None:
            return grammar
        begin = None if end.begin is None else self._encode(end.begin)
        if begin is not None and len(begin) != 1:
            message = (
                f"{field}: {end.begin} is not one token here, so nothing tells whether the answer begins with "
                "reasoning; turn thinking off by chat_template_kwargs"
            )
            raise unsupported(field, message)
        return AfterReasoningGrammar(
            grammar, ends=[self._encode(text) for text in end.ends], start=None if begin is None else begin[0]
        )

    def _end_of(self, prompt: Sequence[int]) -> str:
        return str(self.tokenizer.decode(list(prompt[-PROMPT_END:]), skip_special_tokens=False))

    def _encode(self, text: str) -> list[int]:
        ids: list[int] = self.tokenizer.encode(text, add_special_tokens=False)
        return ids
