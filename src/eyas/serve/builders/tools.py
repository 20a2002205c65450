"""Tool calling in the target's own format: parse its calls and, where required, enforce them by a grammar.

The formats are in `parsers`. Which one a target uses is detected from its chat template, or set by the operator.
"""

from collections.abc import Callable, Mapping
from functools import partial

from eyas.serve.api_error import ApiError
from eyas.serve.grammar.structured_outputs import GrammarSpec
from eyas.serve.parsers.base import ToolParser
from eyas.serve.parsers.formats import ToolCallFormat
from eyas.serve.protocol.completions import ChatCompletionRequest, Tool


class ToolSupport:
    """What one target supports of tool calling."""

    def __init__(
        self, model: str, template: str, format_: ToolCallFormat | None, special_tokens: Mapping[str, int]
    ) -> None:
        self._model, self._knows_tools = model, "tools" in template
        self.format = format_
        self._special_tokens = special_tokens
        """Markers that are special tokens, by their text."""

    def require(self, field: str, fix: str) -> ToolCallFormat:
        """The format, or an error for the field that needs one."""
        if not self._knows_tools:
            message = f"the chat template of {self._model} does not mention tools; {fix}"
            raise ApiError(400, f"{field}: {message}", field=field, code="unsupported_parameter")
        if self.format is None:
            message = f"how {self._model} writes calls is not known; serve it with --tool-call-parser, or {fix}"
            raise ApiError(400, f"{field}: {message}", field=field, code="unsupported_parameter")
        return self.format

    def offered(self, body: ChatCompletionRequest) -> list[Tool]:
        """The tools that go into the prompt: those that the model may call."""
        if not body.tools:
            if body.tool_choice not in (None, "none", "auto"):
                raise ApiError(
                    400, "tool_choice asks for a call and there are no tools; give some", field="tool_choice"
                )
            return []
        if body.tool_choice == "none":
            return []  # on any template: nothing is asked of it
        self.require("tools", "leave them out, use tool_choice none or serve another model")
        names = [tool.function.name for tool in body.tools]
        if len(set(names)) < len(names):
            twice = next(name for name in names if names.count(name) > 1)
            raise ApiError(400, f"tools has two functions called {twice!r}; rename one", field="tools")
        chosen = _chosen(body)
        if chosen is not None and chosen not in names:
            raise ApiError(
                400, f"tool_choice names {chosen!r}; there are {', '.join(names)}", field="tool_choice.function.name"
            )
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

    def new_parser(self, body: ChatCompletionRequest) -> Callable[[], ToolParser] | None:
        """Creates parsers for the answers; None if there are no tools to call."""
        tools = self.offered(body)
        if not tools or self.format is None:
            return None
        return partial(self.format.new_parser, tools, max_calls=None if body.parallel_tool_calls else 1)


def _chosen(body: ChatCompletionRequest) -> str | None:
    """The function that tool_choice names, if any."""
    choice = body.tool_choice
    return None if choice is None or isinstance(choice, str) else choice.function.name
