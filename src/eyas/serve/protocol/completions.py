"""Request bodies, field by field: OpenAI's names, vLLM's extensions, and `speculative`.

Only supported fields are listed. Any other field is refused by name, unless its value has no effect
(`NEUTRAL_VALUES`), such as `"echo": false`.
"""

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Discriminator, Field, Tag, model_validator

from eyas.serve.protocol import bounds
from eyas.serve.protocol.bounds import at_most

NEUTRAL_VALUES: dict[str, tuple[Any, ...]] = {
    "audio": (),
    "best_of": (1,),
    "echo": (False,),
    "function_call": ("none",),
    "functions": ([],),
    "modalities": (["text"],),
    "parallel_tool_calls": (True, False),
    "prediction": (),
    "suffix": ("",),
    "tool_choice": ("none",),
    "tools": ([],),
    "verbosity": ("medium",),
    "web_search_options": (),
}
"""Unsupported fields of OpenAI's API, and the values (beside null) that have no effect."""

Count = Annotated[int, Field(ge=1)]
JsonObjects = Annotated[list[dict[str, Any]], Field(fail_fast=True), at_most(bounds.MAX_OBJECTS)]


class WireModel(BaseModel):
    """Strict JSON: no coercion between types, no unknown fields."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)

    @model_validator(mode="before")
    @classmethod
    def _bound_fields(cls, given: Any) -> Any:
        """Limit the number of fields: each unknown one would be an error object."""
        return bounds.require_at_most(given, bounds.MAX_FIELDS)


class Speculative(WireModel):
    """Speculation for one request; the text is the same either way."""

    mode: Literal["auto", "off", "fixed"] = "auto"
    depth: Count | None = Field(None, description="Draft tokens in a row; with mode fixed alone.")
    method: Literal["auto", "eagle3", "suffix"] = Field(
        "auto", description="Who drafts: whatever pays of what is served, the drafter alone, or suffix drafts alone."
    )
    details: bool = Field(
        False,
        description="Report per choice, and in every chunk of a stream, tokens with the text that came with each and "
        "the depth it was accepted from, who proposed it, and the counts so far.",
    )
    learn: bool | None = Field(
        None,
        description="Whether a server that was started with --learn may keep the answer for drafters to learn from: "
        "false never; left out, if this key opted in, there is no cache_salt, and store is not false.",
    )


class StreamOptions(WireModel):
    """Options of a stream."""

    include_usage: bool = False
    continuous_usage_stats: bool = Field(False, description="vLLM's: counts so far in every chunk, with include_usage.")


class JsonSchemaFormat(WireModel):
    """A JSON schema in OpenAI's wrapper. It is enforced, strict or not."""

    name: str
    description: str | None = None
    schema_: dict[str, Any] = Field(alias="schema")
    strict: bool | None = None


class ResponseFormat(WireModel):
    """OpenAI's response_format."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchemaFormat | None = None


class StructuredOutputs(WireModel):
    """vLLM's structured_outputs: exactly one of these."""

    json_: dict[str, Any] | str | None = Field(None, alias="json", description="A JSON schema, or the text of one.")
    regex: str | None = None
    choice: list[str] | None = Field(None, min_length=1, fail_fast=True)
    grammar: str | None = Field(None, description="In Lark's syntax or GBNF.")
    json_object: bool | None = None


class GenerationRequest(WireModel):
    """The fields that chat and text completions share."""

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
    logit_bias: Annotated[dict[Annotated[int, Field(strict=False)], float] | None, at_most(bounds.MAX_LOGIT_BIAS)] = (
        None
    )
    prompt_logprobs: int | None = Field(
        None, ge=0, le=20, description="Logprobs of the prompt's tokens, beside so many of the most likely ones."
    )
    n: int = Field(1, ge=1, le=128)
    seed: int | None = Field(None, ge=-(2**63), lt=2**63)
    stop: str | Annotated[list[str], Field(fail_fast=True)] | None = None
    stop_token_ids: Annotated[list[int] | None, at_most(bounds.MAX_STOP_TOKEN_IDS)] = None
    include_stop_str_in_output: bool = Field(
        False, description="Return the stop string, or the stop token's text, that ended the answer."
    )
    ignore_eos: bool = False
    bad_words: list[Annotated[str, Field(min_length=1, max_length=256)]] | None = Field(
        None, max_length=128, description="Texts that the answer does not have, by their tokens."
    )
    allowed_token_ids: Annotated[list[int] | None, Field(fail_fast=True), at_most(bounds.MAX_ALLOWED_TOKEN_IDS)] = (
        Field(None, min_length=1, description="The only tokens that may come.")
    )
    skip_special_tokens: bool = Field(True, description="Leave special tokens out of the text.")
    spaces_between_special_tokens: bool = Field(True, description="Has an effect with slow tokenizers only.")
    truncate_prompt_tokens: int | None = Field(
        None, ge=-1, description="Keep so many last tokens of a prompt; -1: as many as leave room for the answer."
    )
    return_token_ids: bool = Field(False, description="Return prompt_token_ids and token_ids.")
    return_tokens_as_token_ids: bool = Field(False, description='Write tokens of logprobs as "token_id:7".')
    stream: bool = False
    stream_options: StreamOptions | None = None
    speculative: Speculative | None = None
    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    guided_json: dict[str, Any] | str | None = None
    guided_regex: str | None = None
    guided_choice: list[str] | None = Field(None, min_length=1, fail_fast=True)
    guided_grammar: str | None = None
    cache_salt: str | None = Field(
        None, min_length=1, description="Only requests with the same salt, and the same key, share cached prefixes."
    )
    priority: int = Field(0, ge=-(2**31), lt=2**31, description="Lower goes first. Needs --scheduling-policy priority.")
    user: str | None = Field(
        None, max_length=512, description="Goes to the server's log, so that an operator can tell users apart."
    )
    store: bool = Field(
        False, description='Nothing can be fetched later. false keeps the answer from --learn unless "learn" is true.'
    )
    # These fields are checked and have no effect on the text.
    metadata: Annotated[
        dict[Annotated[str, Field(max_length=64)], Annotated[str, Field(max_length=512)]] | None, at_most(16)
    ] = Field(None, description="Not kept.")
    safety_identifier: str | None = Field(None, max_length=512)
    prompt_cache_key: str | None = Field(None, max_length=512, description="The prefix cache needs no hint.")
    prompt_cache_retention: Literal["in-memory", "in_memory", "24h"] | None = None
    service_tier: Literal["auto", "default", "flex", "scale", "priority"] | None = Field(
        None, description="There is one tier."
    )

    @model_validator(mode="before")
    @classmethod
    def _drop_neutral_values(cls, given: Any) -> Any:
        if not isinstance(given, dict):
            return given
        kept = {}
        for name, value in given.items():
            known = name in cls.model_fields
            neutral = () if known else NEUTRAL_VALUES.get(name, ())
            if value is None and (known or name in NEUTRAL_VALUES):
                continue  # null means that the field was not given
            if not any(type(value) is type(one) and value == one for one in neutral):  # 1 is not True
                kept[name] = value
        return kept


class TextPart(WireModel):
    """A text part of a message."""

    type: Literal["text"]
    text: str


class FunctionCall(WireModel):
    """A function call."""

    name: str
    arguments: str = Field(description="JSON.")


class ToolCall(WireModel):
    """A tool call in an assistant message."""

    id: str
    type: Literal["function"] = "function"
    function: FunctionCall


Content = str | Annotated[list[TextPart], at_most(bounds.MAX_PARTS)]
"""The text of a message."""


class TextMessage(WireModel):
    """A message of text. The role developer is rendered as system, which every chat template knows."""

    role: Literal["system", "developer", "user"]
    content: Content
    name: str | None = Field(None, description="Who speaks; goes to the chat template.")


class AssistantMessage(WireModel):
    """A message of the assistant: text, tool calls or both."""

    role: Literal["assistant"]
    content: Content | None = None
    tool_calls: Annotated[list[ToolCall] | None, at_most(bounds.MAX_TOOLS)] = None
    reasoning: str | None = Field(None, description="What the model thought, as an answer has it.")
    reasoning_content: str | None = Field(None, description="An older name of reasoning.")
    refusal: None = None
    name: str | None = Field(None, description="Who speaks; goes to the chat template.")
    # Clients send answers back, with the fields that were empty.
    audio: None = None
    function_call: None = None
    annotations: list[Any] | None = Field(None, max_length=0)


class ToolMessage(WireModel):
    """The result of a tool call."""

    role: Literal["tool"]
    content: Content
    tool_call_id: str
    name: str | None = Field(None, description="The function; without it, that of the call with this id.")


Message = Annotated[TextMessage | AssistantMessage | ToolMessage, Field(discriminator="role")]
Messages = Annotated[list[Message], at_most(bounds.MAX_MESSAGES)]


class FunctionDefinition(WireModel):
    """A function that the model may call."""

    name: str = Field(pattern=r"^[a-zA-Z0-9_.-]{1,64}$")
    description: str | None = None
    parameters: dict[str, Any] | None = Field(None, description="A JSON schema of its arguments.")
    strict: bool | None = Field(None, description="Required calls keep to the schema either way.")


class Tool(WireModel):
    """A tool. Functions are the only kind."""

    type: Literal["function"]
    function: FunctionDefinition


Tools = Annotated[list[Tool], at_most(bounds.MAX_TOOLS)]


class NamedFunction(WireModel):
    """The name of a function."""

    name: str


class NamedToolChoice(WireModel):
    """A tool_choice that names a function."""

    type: Literal["function"]
    function: NamedFunction


def _kind_of_prompt(given: Any) -> str | None:
    """The kind of a prompt, by its first item: trying one kind after the other takes many times longer."""
    first = given[0] if isinstance(given, list) and given else ""
    kinds: dict[type, str] = {str: "texts", int: "ids", list: "id_lists"}
    return "text" if isinstance(given, str) else kinds.get(type(first)) if isinstance(given, list) else None


TokenIds = Annotated[list[int], Field(fail_fast=True)]
Prompt = Annotated[
    Annotated[str, Tag("text")]
    | Annotated[list[str], Field(fail_fast=True), Tag("texts")]
    | Annotated[TokenIds, Tag("ids")]
    | Annotated[list[TokenIds], Field(fail_fast=True), Tag("id_lists")],
    Discriminator(_kind_of_prompt),
]


class ChatCompletionRequest(GenerationRequest):
    """The body of /v1/chat/completions."""

    messages: Messages = Field(min_length=1)
    max_completion_tokens: Count | None = None
    logprobs: bool = False
    top_logprobs: int | None = Field(None, ge=0, le=20)
    tools: Tools | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedToolChoice | None = None
    parallel_tool_calls: bool = True
    chat_template_kwargs: dict[str, Any] | None = Field(
        None, max_length=32, description="Variables of the chat template; one that it does not use has no effect."
    )
    reasoning_effort: Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"] | None = Field(
        None, description="Goes to the chat template as the variable reasoning_effort."
    )
    chat_template: str | None = Field(None, description="Refused, unless the operator allows it.")
    add_generation_prompt: bool = Field(True, description="End the prompt where the assistant answers.")
    continue_final_message: bool = Field(
        False, description="Continue the last message instead of answering it; add_generation_prompt is false then."
    )


class CompletionRequest(GenerationRequest):
    """The body of /v1/completions."""

    prompt: Prompt
    max_tokens: int | None = Field(None, ge=0, description="0 only with echo: the prompt alone comes back.")
    echo: bool = Field(
        False, description="Return the prompt before the answer; with logprobs also those of its tokens."
    )
    logprobs: int | None = Field(None, ge=0, le=20)
