"""All formats by name, and which of them a chat template uses."""

from collections.abc import Sequence
from typing import TypeVar

from eyas.errors import UserError
from eyas.serve.parsers.delimited import DeepSeekV3Format, DeepSeekV31Format, KimiK2Format
from eyas.serve.parsers.formats import AnswerFormat, ReasoningFormat, ToolCallFormat
from eyas.serve.parsers.harmony import HarmonyFormat, HarmonyReasoning
from eyas.serve.parsers.json_calls import HERMES, LLAMA3_JSON, MISTRAL
from eyas.serve.parsers.pythonic import PythonicFormat
from eyas.serve.parsers.tagged import Glm45Format, Qwen3CoderFormat
from eyas.serve.parsers.think_tags import THINK_END, ThinkTagFormat

TOOL_CALL_FORMATS: tuple[ToolCallFormat, ...] = (
    HarmonyFormat(),
    KimiK2Format(),
    DeepSeekV3Format(),
    DeepSeekV31Format(),
    Glm45Format(),
    Qwen3CoderFormat(),
    HERMES,
    MISTRAL,
    LLAMA3_JSON,
    PythonicFormat(),
)
"""A template may match several: the first one counts, so those with rarer markers come first."""
REASONING_FORMATS: tuple[ReasoningFormat, ...] = (
    HarmonyReasoning(),
    ThinkTagFormat(
        name="glm45", aliases=("glm47", "glm"), template_markers=(THINK_END, "<arg_key>"), calls_end_it=True
    ),
    ThinkTagFormat(name="deepseek_r1", template_markers=(THINK_END, "<｜Assistant｜>"), always_thinks=True),
    ThinkTagFormat(name="qwen3", template_markers=(THINK_END,), calls_end_it=True),
    *(
        ThinkTagFormat(name=name, template_markers=(begin, end), begin=begin, end=end)
        for name, begin, end in (
            ("mistral", "[THINK]", "[/THINK]"),
            ("gemma4", "<|channel>thought", "<channel|>"),
            ("seed_oss", "<seed:think>", "</seed:think>"),
            ("minimax_m3", "<mm:think>", "</mm:think>"),
        )
    ),
)
AUTO = "auto"
Format = TypeVar("Format", bound=AnswerFormat)


def by_name(formats: Sequence[Format], name: str, what: str) -> Format:
    """The format of that name or alias."""
    for one in formats:
        if name == one.name or name in one.aliases:
            return one
    names = ", ".join(one.name for one in formats)
    raise UserError(f"{what} {name!r} is unknown; use one of {names}")


def by_template(formats: Sequence[Format], template: str) -> Format | None:
    """The format that a chat template asks for."""
    return next(
        (one for one in formats if one.template_markers and all(mark in template for mark in one.template_markers)),
        None,
    )


def choose_formats(
    template: str, tool_parser: str | None, reasoning_parser: str | None
) -> tuple[ToolCallFormat | None, ReasoningFormat | None]:
    """The formats of a target: as the operator named them, else by its chat template.

    Harmony is one format for both. It is used wherever a template has it: its answers cannot be parsed otherwise.
    """
    named_tool = None if tool_parser in (None, AUTO) else by_name(TOOL_CALL_FORMATS, tool_parser, "tool-call parser")
    tool = named_tool or by_template(TOOL_CALL_FORMATS, template)
    reasoning: ReasoningFormat | None = None
    if reasoning_parser == AUTO:
        reasoning = by_template(REASONING_FORMATS, template)
    elif reasoning_parser is not None:
        reasoning = by_name(REASONING_FORMATS, reasoning_parser, "reasoning parser")
    elif tool is not None and tool.partner:
        reasoning = by_name(REASONING_FORMATS, tool.partner, "reasoning parser")
    partner = reasoning.partner if reasoning is not None else ""
    if partner and named_tool is None:
        tool = by_name(TOOL_CALL_FORMATS, partner, "tool-call parser")
    if tool is not None and (tool.partner or partner) and tool.name != partner:
        raise UserError(
            f"tool-call parser {tool.name!r} and reasoning parser {reasoning.name if reasoning else 'none'!r} do not "
            "go together: harmony is one format for both; leave --reasoning-parser or --tool-call-parser out"
        )
    return tool, reasoning
