"""Structured outputs: from the fields that ask for a format to a compiled grammar.

OpenAI's `response_format`, vLLM's `structured_outputs` and its older `guided_*` are equivalent; a request may use one.
Grammars compile off the event loop. `LlGuidance` bounds their size, this module their compile time.
"""

import asyncio
import json
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Literal

from eyas.engine.grammar.llguidance import LlGuidance, LlGuidanceGrammar
from eyas.errors import UserError
from eyas.serve.api_error import ApiError
from eyas.serve.protocol import GenerationRequest
from eyas.target.model import Target

Kind = Literal["json", "regex", "grammar", "choice", "lark"]
COMPILE_SECONDS = 10.0
COMPILE_THREADS = 2
"""Several, so one slow grammar does not block the next."""
CACHED_GRAMMARS = 64
"""Compiled grammars that are kept."""
ANY_OBJECT = {"type": "object"}


@dataclass(frozen=True, kw_only=True)
class GrammarSpec:
    """A grammar that a request asks for, and the field that asks."""

    field: str
    kind: Kind
    text: str
    """A schema or choices as JSON; otherwise the regex or the grammar itself."""


def grammar_spec_of(body: GenerationRequest) -> GrammarSpec | None:
    """The grammar that a body asks for, if any."""
    specs = list(_grammar_specs(body))
    if len(specs) > 1:
        first, second = specs[0].field, specs[1].field
        raise ApiError(400, f"{first} and {second} both say what the answer looks like; give one", field=second)
    return specs[0] if specs else None


def _grammar_specs(body: GenerationRequest) -> list[GrammarSpec]:
    fields: list[tuple[str, Kind, Any]] = [
        ("guided_json", "json", body.guided_json),
        ("guided_regex", "regex", body.guided_regex),
        ("guided_choice", "choice", body.guided_choice),
        ("guided_grammar", "grammar", body.guided_grammar),
    ]
    if (outputs := body.structured_outputs) is not None:
        within: list[tuple[str, Kind, Any]] = [
            ("json", "json", outputs.json_),
            ("regex", "regex", outputs.regex),
            ("choice", "choice", outputs.choice),
            ("grammar", "grammar", outputs.grammar),
            ("json_object", "json", ANY_OBJECT if outputs.json_object else None),
        ]
        if all(value is None for _, _, value in within):
            raise ApiError(
                400,
                "structured_outputs asks for nothing; give one of json, regex, choice, grammar or json_object",
                field="structured_outputs",
            )
        fields += [(f"structured_outputs.{name}", kind, value) for name, kind, value in within]
    if (response_format := body.response_format) is not None:
        if (response_format.json_schema is None) == (response_format.type == "json_schema"):
            raise ApiError(
                400,
                f"response_format is {response_format.type} "
                f"{'without' if response_format.json_schema is None else 'with'} json_schema; "
                "type json_schema needs it and no other takes it",
                field="response_format.json_schema",
            )
        if response_format.json_schema is not None:
            fields.append(("response_format.json_schema.schema", "json", response_format.json_schema.schema_))
        elif response_format.type == "json_object":
            fields.append(("response_format", "json", ANY_OBJECT))
    return [
        GrammarSpec(field=field, kind=kind, text=value if isinstance(value, str) else json.dumps(value))
        for field, kind, value in fields
        if value is not None
    ]


class GrammarCompiler:
    """Compiles grammars for one target off the event loop, and caches them."""

    def __init__(self, target: Target) -> None:
        self._target = target
        self._threads = ThreadPoolExecutor(COMPILE_THREADS, "eyas-grammar")
        self._lock = threading.Lock()
        self._guidance: LlGuidance | None = None
        self._cached_compile = lru_cache(maxsize=CACHED_GRAMMARS)(self._compile)

    async def compile(self, spec: GrammarSpec) -> LlGuidanceGrammar:
        """The compiled grammar, or an error that says what is wrong with it."""
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout(COMPILE_SECONDS):
                return await loop.run_in_executor(self._threads, self._cached_compile, spec.kind, spec.text)
        except TimeoutError:
            message = f"{spec.field} was not compiled within {COMPILE_SECONDS:g} s; simplify it"
            raise ApiError(400, message, field=spec.field, code="grammar_too_complex") from None
        except UserError as error:
            message = f"{spec.field} cannot be followed ({error}); change it"
            raise ApiError(400, message, field=spec.field, code="invalid_grammar") from None

    def _compile(self, kind: Kind, text: str) -> LlGuidanceGrammar:
        with self._lock:
            if self._guidance is None:
                self._guidance = LlGuidance(self._target.tokenizer, self._target.facts.vocab_size)
        if kind == "json":
            return self._guidance.json_schema(text)
        if kind == "regex":
            return self._guidance.regex(text)
        if kind == "choice":
            return self._guidance.choice(json.loads(text))
        return self._guidance.lark(text) if kind == "lark" else self._guidance.grammar(text)
