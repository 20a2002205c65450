"""Structured outputs: from the fields of a request to a compiled grammar.

OpenAI's `response_format`, vLLM's `structured_outputs` and its older `guided_*` are equivalent; a request may use one.
Grammars compile off the event loop, after the grammar worker has compiled them within its limits (`gate.py`). Cached
grammars never wait.
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
from eyas.serve.api_error import ApiError, invalid
from eyas.serve.grammar.gate import GrammarGate, GrammarVerdict
from eyas.serve.grammar.worker import JOB_BYTES, JOB_CPU_SECONDS
from eyas.serve.protocol.completions import GenerationRequest
from eyas.target.text import TargetText

COMPILE_THREADS = 2
"""Several, so that a slow grammar does not block the next."""
CACHED_GRAMMARS = 64
CACHED_BYTES = 128 * 2**20
"""The limit of their sum; a larger grammar lives as long as its requests."""
UNUSED_SECONDS = 300.0
"""The time without use after which a compiled grammar is dropped."""
RETRY_SECONDS = 2
"""Retry-After: the grammars that compile now are done by then."""
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
    """A compiled grammar, its size, and when it was last used, by the monotonic clock."""

    grammar: LlGuidanceGrammar
    taken: int
    """Memory as compiled, in bytes."""
    used: float


def grammar_spec_of(body: GenerationRequest) -> GrammarSpec | None:
    """The grammar that a body asks for, if any."""
    specs = list(_grammar_specs(body))
    if len(specs) > 1:
        first, second = specs[0].field, specs[1].field
        raise invalid(second, f"{first} and {second} both say what the answer looks like; give one")
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
            message = "structured_outputs asks for nothing; give one of json, regex, choice, grammar or json_object"
            raise invalid("structured_outputs", message)
        fields += [(f"structured_outputs.{name}", kind, value) for name, kind, value in within]
    if (response_format := body.response_format) is not None:
        if (response_format.json_schema is None) == (response_format.type == "json_schema"):
            missing = "without" if response_format.json_schema is None else "with"
            message = f"response_format is {response_format.type} {missing} json_schema; "
            message += "type json_schema needs it and no other takes it"
            raise invalid("response_format.json_schema", message)
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
    """A grammar failed in the worker, or in the server's compiler."""

    def __init__(self, verdict: GrammarVerdict) -> None:
        super().__init__(verdict.reason)
        self._verdict = verdict

    def to_api_error(self, field: str) -> ApiError:
        """The error for the client."""
        outcome, reason = self._verdict.outcome, self._verdict.reason
        if outcome == "invalid":
            return invalid(field, f"{field} cannot be followed ({reason}); change it", code="invalid_grammar")
        if outcome == "busy":
            message = f"{field} was not compiled: the server is busy with other grammars; try again"
            return ApiError(503, message, field=field, code="grammar_compiler_busy", retry=RETRY_SECONDS)
        needs = {
            "time": f"takes more than {JOB_CPU_SECONDS:g} s of processor time to compile",
            "memory": f"takes more than {JOB_BYTES // 2**20} MiB of memory to compile",
        }.get(outcome, "cannot be compiled by llguidance")
        return invalid(field, f"{field} {needs}; simplify it", code="grammar_too_complex")


class GrammarCompiler:
    """Compiles grammars for one target off the event loop, behind a gate, and caches them."""

    def __init__(self, target: TargetText, *, read_at_start: bool = True) -> None:
        """Without `read_at_start` llguidance's tokenizer is read for the first grammar, which saves 36 MiB until then.

        All other requests wait for that once, 0.6 s with 49,152 tokens.
        """
        self._target, self._read_at_start = target, read_at_start
        self.gate = GrammarGate(lambda: tokenizer_data(target.tokenizer, target.facts.vocab_size))
        self._threads = ThreadPoolExecutor(COMPILE_THREADS, "eyas-grammar")
        self._lock = threading.Lock()
        self._guidance: LlGuidance | None = None
        self._cache: OrderedDict[tuple[GrammarKind, str], CachedGrammar] = OrderedDict()
        self._compiling: dict[tuple[GrammarKind, str], Future[CachedGrammar]] = {}

    def start(self) -> None:
        self.gate.start()
        if self._read_at_start:
            self._read_tokenizer()

    def close(self) -> None:
        self.gate.close()

    async def compile(self, spec: GrammarSpec, *, client: str = "") -> LlGuidanceGrammar:
        """The compiled grammar, or an error that says what is wrong with it. Clients take turns."""
        if len(spec.text) > MOST_CHARACTERS:  # the pipe to the worker need not see it
            size = f"has {len(spec.text):,} characters, above the {MOST_CHARACTERS:,} allowed"
            raise invalid(spec.field, f"{spec.field} {size}; shorten it", code="invalid_grammar")
        self._drop_unused()
        key = (spec.kind, spec.text)
        if key in self._cache:
            self._cache.move_to_end(key)
            self._cache[key].used = time.monotonic()
            return self._cache[key].grammar
        compiling = self._compiling.get(key) or self._begin(client, key)  # equal ones often come together
        try:
            # Shielded: a client that leaves must not end it for the others.
            compiled = await asyncio.shield(asyncio.wrap_future(compiling))
        except GrammarRefusedError as error:
            raise error.to_api_error(spec.field) from None
        return compiled.grammar

    def _begin(self, client: str, key: tuple[GrammarKind, str]) -> Future[CachedGrammar]:
        """Pass the gate, compile in a thread, then cache on the event loop."""
        compiled: Future[CachedGrammar] = Future()
        loop = asyncio.get_running_loop()

        def settle() -> None:
            # Together: a request in between would find it in neither place, and compile it again.
            del self._compiling[key]
            if compiled.exception() is None:
                self._keep(key, compiled.result())

        def done(_: Future[CachedGrammar]) -> None:
            with suppress(RuntimeError):  # the loop has ended
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
        """Cache a grammar, and drop the least recently used beyond the limits."""
        self._cache[key] = compiled
        asyncio.get_running_loop().call_later(UNUSED_SECONDS + 1, self._drop_unused)
        while len(self._cache) > CACHED_GRAMMARS or sum(entry.taken for entry in self._cache.values()) > CACHED_BYTES:
            self._cache.popitem(last=False)

    def _drop_unused(self) -> None:
        """Drop grammars that were not used lately: lexers grow with use, and their memory should be returned."""
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
