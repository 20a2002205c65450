"""What clients may send, field by field: OpenAI's names, vLLM's additions, and `speculative`.

Only what is honoured is a field here. Anything else is refused by name, unless its value asks for nothing
(`NEUTRAL`): a client that spells out `"echo": false` gets what it wants.
"""

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

NEUTRAL: dict[str, tuple[Any, ...]] = {
    "audio": (),
    "best_of": (1,),
    "echo": (False,),
    "function_call": ("none",),
    "functions": ([],),
    "metadata": ({},),
    "modalities": (["text"],),
    "parallel_tool_calls": (True, False),
    "prediction": (),
    "reasoning_effort": (),
    "response_format": ({"type": "text"},),
    "guided_json": (),
    "guided_regex": (),
    "guided_grammar": (),
    "service_tier": ("auto", "default"),
    "store": (False,),
    "structured_outputs": (),
    "suffix": ("",),
    "tool_choice": ("none",),
    "tools": ([],),
    "web_search_options": (),
}
"""Fields of the API that are not honoured, and the values (beside null) that ask for nothing."""

Count = Annotated[int, Field(ge=1)]


class Wire(BaseModel):
    """JSON as it is: a number is no string, an unknown field no comment."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)


class Speculative(Wire):
    """How a request is drafted for; its text is the same either way."""

    mode: Literal["auto", "off", "fixed"] = "auto"
    depth: Count | None = Field(None, description="Draft tokens in a row; with mode fixed alone.")
    details: bool = Field(
        False,
        description="Report per choice, and in every chunk of a stream, tokens with the text that came with each and "
        "the depth it was accepted from, and the counts so far.",
    )


class StreamOptions(Wire):
    """What a stream carries beside the text."""

    include_usage: bool = False


class Common(Wire):
    """Fields of both endpoints."""

    model: str | None = Field(None, description="The served name; may be left out, as there is one model.")
    max_tokens: Count | None = None
    min_tokens: int = Field(0, ge=0)
    temperature: float = Field(1.0, ge=0)
    top_p: float = Field(1.0, gt=0, le=1)
    top_k: int = Field(0, ge=-1, description="0 or -1 keeps all.")
    min_p: float = Field(0.0, ge=0, le=1)
    presence_penalty: float = Field(0.0, ge=-2, le=2)
    frequency_penalty: float = Field(0.0, ge=-2, le=2)
    repetition_penalty: float = Field(1.0, gt=0)
    logit_bias: dict[Annotated[int, Field(strict=False)], float] | None = None
    n: int = Field(1, ge=1, le=128)
    seed: int | None = Field(None, ge=-(2**63), lt=2**63)
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    ignore_eos: bool = False
    stream: bool = False
    stream_options: StreamOptions | None = None
    speculative: Speculative | None = None
    user: str | None = Field(None, description="Goes to the server's log, so that an operator can tell users apart.")

    @model_validator(mode="before")
    @classmethod
    def _drop_what_asks_for_nothing(cls, given: Any) -> Any:
        if not isinstance(given, dict):
            return given
        kept = {}
        for name, value in given.items():
            known = name in cls.model_fields
            if value is None and (known or name in NEUTRAL):
                continue  # null is what a field is that was not given
            if not known and name in NEUTRAL and any(_same(value, neutral) for neutral in NEUTRAL[name]):
                continue
            kept[name] = value
        return kept


class TextPart(Wire):
    """A part of a message."""

    type: Literal["text"]
    text: str


class Message(Wire):
    """One turn. The developer's instructions are the system's, for templates that know no other."""

    role: Literal["system", "developer", "user", "assistant"]
    content: str | list[TextPart]

    @property
    def text(self) -> str:
        """The whole content."""
        return self.content if isinstance(self.content, str) else "".join(part.text for part in self.content)


class ChatRequest(Common):
    """The body of /v1/chat/completions."""

    messages: list[Message] = Field(min_length=1)
    max_completion_tokens: Count | None = None
    logprobs: bool = False
    top_logprobs: int | None = Field(None, ge=0, le=20)


class CompletionRequest(Common):
    """The body of /v1/completions."""

    prompt: str | list[str] | list[int] | list[list[int]]
    logprobs: int | None = Field(None, ge=0, le=20)


def _same(value: Any, neutral: Any) -> bool:
    """Equal and of one type: 1 is not True."""
    return type(value) is type(neutral) and value == neutral
