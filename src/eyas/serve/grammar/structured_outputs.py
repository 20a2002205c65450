"""Structured outputs: from the fields that ask for a format to a compiled grammar.

OpenAI's `response_format`, vLLM's `structured_outputs` and its older `guided_*` are equivalent; a request may use one.
Grammars compile off the event loop, after the grammar worker got through them within its limits (`grammar_gate`). What
is cached never waits.
"""

import asyncio
import json
import threading
import time
from collections import OrderedDict
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from eyas.errors import UserError
from eyas.freed_memory import give_back
from eyas.grammar.compile import MOST_CHARACTERS, GrammarKind
from eyas.grammar.llguidance import LlGuidance, LlGuidanceGrammar, tokenizer_data
from eyas.serve.api_error import ApiError
from eyas.serve.grammar.gate import GrammarGate, GrammarVerdict
from eyas.serve.grammar.worker import JOB_BYTES, JOB_CPU_SECONDS
from eyas.serve.protocol.completions import GenerationRequest
from eyas.target.text import TargetText

COMPILE_THREADS = 2
"""Several, so one slow grammar does not block the next."""
CACHED_GRAMMARS = 64
"""Compiled grammars that are kept."""
CACHED_BYTES = 128 * 2**20
"""That they take together; a larger one lives as long as its requests."""
UNUSED_SECONDS = 300.0
"""After which a compiled grammar is dropped."""
RETRY_SECONDS = 2
"""When a client may try again: grammars that run now are done by then."""
ANY_OBJECT = {"type": "object"}


@dataclass(frozen=True, kw_only=True)
class GrammarSpec:
    """A grammar that a request asks for, and the field that asks."""

    field: str
    kind: GrammarKind
    text: str
    """A schema or choices as JSON; otherwise the regex or the grammar itself."""


@dataclass(kw_only=True)
class CachedGrammar:
    """A compiled grammar, what it takes, and when it was last asked for, by the monotonic clock."""

    grammar: LlGuidanceGrammar
    taken: int
    """Bytes, as compiled."""
    used: float


def grammar_spec_of(body: GenerationRequest) -> GrammarSpec | None:
    """The grammar that a body asks for, if any."""
    specs = list(_grammar_specs(body))
    if len(specs) > 1:
        first, second = specs[0].field, specs[1].field
        raise ApiError(400, f"{first} and {second} both say what the answer looks like; give one", field=second)
    return specs[0] if specs else None


def _grammar_specs(body: GenerationRequest) -> list[GrammarSpec]:
    fields: list[tuple[str, GrammarKind, Any]] = [
        ("guided_json", "json", body.guided_json),
        ("guided_regex", "regex", body.guided_regex),
        ("guided_choice", "choice", body.guided_choice),
        ("guided_grammar", "grammar", body.guided_grammar),
    ]
    if (outputs := body.structured_outputs) is not None:
        within: list[tuple[str, GrammarKind, Any]] = [
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


class GrammarRefusedError(Exception):
    """A grammar did not pass the gate, or the server's compiler behind it."""

    def __init__(self, verdict: GrammarVerdict) -> None:
        super().__init__(verdict.reason)
        self._verdict = verdict

    def to_api_error(self, field: str) -> ApiError:
        """What the client should know."""
        outcome, reason = self._verdict.outcome, self._verdict.reason
        if outcome == "invalid":
            message = f"{field} cannot be followed ({reason}); change it"
            return ApiError(400, message, field=field, code="invalid_grammar")
        if outcome == "busy":
            message = f"{field} was not compiled: the server is busy with other grammars; try again"
            return ApiError(503, message, field=field, code="grammar_compiler_busy", retry=RETRY_SECONDS)
        needs = {
            "time": f"takes more than {JOB_CPU_SECONDS:g} s of processor time to compile",
            "memory": f"takes more than {JOB_BYTES // 2**20} MiB of memory to compile",
        }.get(outcome, "cannot be compiled by llguidance")
        return ApiError(400, f"{field} {needs}; simplify it", field=field, code="grammar_too_complex")


class GrammarCompiler:
    """Compiles grammars for one target off the event loop, behind a gate, and caches them."""

    def __init__(self, target: TargetText, *, read_at_start: bool = True) -> None:
        """Without `read_at_start` llguidance's tokenizer is read for the first grammar, and spares 36 MiB until then.

        All others wait for that once, 0.6 s with 49,152 tokens.
        """
        self._target, self._read_at_start = target, read_at_start
        self.gate = GrammarGate(lambda: tokenizer_data(target.tokenizer, target.facts.vocab_size))
        self._threads = ThreadPoolExecutor(COMPILE_THREADS, "eyas-grammar")
        self._lock = threading.Lock()
        self._guidance: LlGuidance | None = None
        self._cache: OrderedDict[tuple[GrammarKind, str], CachedGrammar] = OrderedDict()
        self._compiling: dict[tuple[GrammarKind, str], Future[CachedGrammar]] = {}

    def start(self) -> None:
        """Start the worker."""
        self.gate.start()
        if self._read_at_start:
            self._read_tokenizer()

    def close(self) -> None:
        """End the worker."""
        self.gate.close()

    async def compile(self, spec: GrammarSpec, *, client: str = "") -> LlGuidanceGrammar:
        """The compiled grammar, or an error that says what is wrong with it; `client` is who asks, for fairness."""
        if len(spec.text) > MOST_CHARACTERS:  # the pipe to the worker need not see it
            message = (
                f"{spec.field} has {len(spec.text):,} characters, above the {MOST_CHARACTERS:,} allowed; shorten it"
            )
            raise ApiError(400, message, field=spec.field, code="invalid_grammar")
        self._drop_unused()
        key = (spec.kind, spec.text)
        if key in self._cache:
            self._cache.move_to_end(key)
            self._cache[key].used = time.monotonic()
            return self._cache[key].grammar
        compiling = self._compiling.get(key) or self._begin(client, key)  # the same often comes many times at once
        try:
            # Shielded: a client that leaves must not end it for the others.
            compiled = await asyncio.shield(asyncio.wrap_future(compiling))
        except GrammarRefusedError as error:
            raise error.to_api_error(spec.field) from None
        return compiled.grammar

    def _begin(self, client: str, key: tuple[GrammarKind, str]) -> Future[CachedGrammar]:
        """Through the gate, then compiled in a thread, then cached on the event loop."""
        compiled: Future[CachedGrammar] = Future()
        loop = asyncio.get_running_loop()

        def settle() -> None:
            # In one go: whoever asks in between would find it neither here nor there, and compile it again.
            del self._compiling[key]
            if compiled.exception() is None:
                self._keep(key, compiled.result())

        def done(_: Future[CachedGrammar]) -> None:
            with suppress(RuntimeError):  # the loop has ended, and nobody asks any more
                loop.call_soon_threadsafe(settle)

        def compile_(taken: int) -> None:
            try:
                grammar = self._read_tokenizer().compile(*key)
                compiled.set_result(CachedGrammar(grammar=grammar, taken=taken, used=time.monotonic()))
            except UserError as error:
                compiled.set_exception(GrammarRefusedError(GrammarVerdict(outcome="invalid", reason=str(error))))
            except BaseException as error:
                compiled.set_exception(error)

        def on_verdict(checked: Future[GrammarVerdict]) -> None:
            if (verdict := checked.result()).outcome == "ok":
                self._threads.submit(compile_, verdict.taken)
            else:
                compiled.set_exception(GrammarRefusedError(verdict))

        self._compiling[key] = compiled
        compiled.add_done_callback(done)
        self.gate.check(client, *key).add_done_callback(on_verdict)
        return compiled

    def _keep(self, key: tuple[GrammarKind, str], compiled: CachedGrammar) -> None:
        """Cache it, in the place of the oldest."""
        self._cache[key] = compiled
        asyncio.get_running_loop().call_later(UNUSED_SECONDS + 1, self._drop_unused)
        while len(self._cache) > CACHED_GRAMMARS or sum(entry.taken for entry in self._cache.values()) > CACHED_BYTES:
            self._cache.popitem(last=False)

    def _drop_unused(self) -> None:
        """Forget what nobody asked for lately: the lexers grow with use, and their memory should come back."""
        oldest = time.monotonic() - UNUSED_SECONDS
        dropped = [key for key, entry in self._cache.items() if entry.used < oldest or entry.grammar.exhausted]
        for key in dropped:
            del self._cache[key]

    def _read_tokenizer(self) -> LlGuidance:
        with self._lock:
            if self._guidance is None:
                self._guidance = LlGuidance(self._target.tokenizer, self._target.facts.vocab_size)
                give_back()
            return self._guidance
