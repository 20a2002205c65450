"""A tiny target whose tokens are letters, its drafter, and clients of a server around both."""

from __future__ import annotations

import asyncio
import json
import string
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal

import httpx2
import pytest
from tokenizers import pre_tokenizers

from chat_tokenizer import LETTERS, SPECIAL, letter_tokenizer
from eyas.drafter.checkpoint import load_drafter
from eyas.engine.config import EngineConfig
from eyas.engine.engine import Engine
from eyas.engine.request import Request, Speculation
from eyas.sampling import Sampling
from eyas.serve.access.policy import AccessRules
from eyas.serve.app import Application
from eyas.serve.drafter_swaps import DrafterSlot
from eyas.serve.learning.collector import LearnFolder
from eyas.serve.local_engine import LocalEngineClient
from eyas.serve.model_info import ModelInfo, ServerLimits
from eyas.serve.protocol.request_policy import RequestPolicy
from eyas.target.text import SamplingDefaults

if TYPE_CHECKING:
    from eyas.drafter.model import Drafter
    from eyas.target.model import Target

OPTIONS = EngineConfig(max_num_seqs=4, max_model_len=256, memory=2**24)


@pytest.fixture(scope="session")
def target(tiny_target: Target) -> Target:
    """The tiny target, in letters."""
    return replace(tiny_target, tokenizer=letter_tokenizer())


@dataclass(frozen=True, kw_only=True)
class Reply:
    """The response to a client."""

    status: int
    headers: Any
    text: str

    @property
    def json(self) -> Any:
        return json.loads(self.text)

    @property
    def events(self) -> list[Any]:
        """The events of a stream, all but the last, which says that it is done."""
        lines = [line.removeprefix("data: ") for line in self.text.split("\n\n") if line]
        assert lines[-1] == "[DONE]", lines[-1]
        return [json.loads(line) for line in lines[:-1]]

    def assert_refused(self, status: int, *parts: str) -> None:
        """OpenAI's error format, with every part in the message."""
        assert self.status == status, self.text
        error = self.json["error"]
        assert set(error) == {"message", "type", "param", "code"}
        for part in parts:
            assert part in error["message"], (part, error)


class Client:
    """Calls an application in this process, each call in a loop of its own."""

    def __init__(self, application: Application, engines: list[Engine]) -> None:
        self.application = application
        self.engines = engines
        """Every engine that was built, the one in use last."""

    @property
    def engine(self) -> Engine:
        return self.engines[-1]

    async def send(self, method: str, path: str, **arguments: Any) -> Reply:
        transport = httpx2.ASGITransport(app=self.application.asgi)
        async with httpx2.AsyncClient(transport=transport, base_url="http://server") as client:
            answer = await client.request(method, path, timeout=60, **arguments)
            return Reply(status=answer.status_code, headers=answer.headers, text=answer.text)

    def get(self, path: str, **arguments: Any) -> Reply:
        return asyncio.run(self.send("GET", path, **arguments))

    def request(self, method: str, path: str, **arguments: Any) -> Reply:
        return asyncio.run(self.send(method, path, **arguments))

    def post(self, path: str, body: Any = None, **arguments: Any) -> Reply:
        return asyncio.run(self.send("POST", path, json=body, **arguments))

    def complete(self, **fields: Any) -> Reply:
        return self.post("/v1/completions", {"prompt": "abcabc", "max_tokens": 8, "temperature": 0} | fields)

    def chat(self, content: str = "Hello", **fields: Any) -> Reply:
        body = {"messages": [{"role": "user", "content": content}], "max_tokens": 8, "temperature": 0}
        return self.post("/v1/chat/completions", body | fields)

    def all_back(self) -> None:
        """Assert that no request and no block is left."""
        assert self.application.context.admission.in_flight == 0
        assert not self.engine.busy
        assert self.engine.block_manager.used == 0
        self.engine.scheduler.check()


Serve = Callable[..., Any]


@contextmanager
def serve(
    target: Target,
    drafter: Drafter | None,
    *,
    options: EngineConfig = OPTIONS,
    limits: ServerLimits | None = None,
    policy: RequestPolicy | None = None,
    keys: tuple[str, ...] = (),
    access: AccessRules | None = None,
    page: bool = True,
    load: Callable[[str], Drafter] | None = None,
    drafters: tuple[str, ...] = (),
    swappable: bool = True,
    tool_parser: str | None = None,
    reasoning_parser: str | None = None,
    reasoning_content_alias: bool = False,
    sampling_defaults: SamplingDefaults | None = None,
    metrics_names: Literal["eyas", "vllm", "both"] = "both",
    root_path: str = "",
    learn_folder: LearnFolder | None = None,
    source: str | None = None,
) -> Iterator[Client]:
    """A client of a server around an engine; `load` is how it comes by other `drafters`."""
    engines: list[Engine] = []
    slot = DrafterSlot(model=drafter, source=source, load=load or load_drafter, allowed=drafters, swappable=swappable)

    def build() -> Engine:
        engines.append(Engine(target, slot.model, config=options))
        return engines[-1]

    with LocalEngineClient(build) as engine_client:
        drafter_name = "tiny-drafter" if drafter is not None else None
        model_info = ModelInfo(
            name="tiny",
            target="tiny",
            drafter=drafter_name,
            drafter_quantization=None if drafter is None else drafter.quantization,
            max_model_len=256,
            max_num_seqs=options.max_num_seqs,
            suffix_depth=0 if options.suffix is None else options.suffix.deepest,
            tool_parser=tool_parser,
            reasoning_parser=reasoning_parser,
            reasoning_content_alias=reasoning_content_alias,
            sampling_defaults=sampling_defaults or SamplingDefaults(),
        )
        access = access or AccessRules(api_keys=keys)
        application = Application(
            engine_client,
            model_info,
            limits=limits,
            policy=policy,
            access=access,
            page=page,
            metrics_names=metrics_names,
            root_path=root_path,
            learn_folder=learn_folder,
            slot=slot,
        )
        yield Client(application, engines)
        application.close()


@pytest.fixture(scope="session")
def client(target: Target, tiny_drafter: Drafter) -> Iterator[Client]:
    """A shared server for tests that do not change it."""
    with serve(target, tiny_drafter) as client:
        yield client


EAGLE = "🦅"


@pytest.fixture(scope="session")
def eagle(tiny_target: Target, tiny_drafter: Drafter) -> Iterator[tuple[Client, str]]:
    """A server some of whose letters are bytes, and a question to which its greedy answer begins with an eagle."""
    question, tokens = _four_letters(replace(tiny_target, tokenizer=letter_tokenizer()), tiny_drafter)
    letters = list(LETTERS)  # behind the special tokens
    ((spelt, _),) = pre_tokenizers.ByteLevel(add_prefix_space=False).pre_tokenize_str(EAGLE)
    for token, sign in zip(tokens, spelt, strict=True):
        letters[token - len(SPECIAL)] = sign
    with serve(replace(tiny_target, tokenizer=letter_tokenizer(letters=letters)), tiny_drafter) as client:
        yield client, question


def _four_letters(target: Target, drafter: Drafter) -> tuple[str, tuple[int, ...]]:
    """A question, and four letters that begin its answer, drafted in part, and that it could do without."""
    engine, drafted = Engine(target, drafter), Speculation(mode="fixed", depth=3)
    for question in string.ascii_letters:
        prompt = tuple(target.encode_chat([{"role": "user", "content": question}]))
        request = Request(prompt=prompt, sampling=Sampling(), max_new_tokens=4, speculation=drafted)
        (answer,) = engine.generate([request])
        if len({*answer.tokens} - {*prompt} - {*range(len(SPECIAL))}) == 4 and any(answer.depths[:3]):
            return question, answer.tokens
    raise AssertionError("the tiny target has changed: no question will do")


@pytest.fixture
def new_server(target: Target, tiny_drafter: Drafter) -> Serve:
    """Begin another server, with limits of its own."""

    def begin(**arguments: Any) -> Any:
        return serve(arguments.pop("target", target), arguments.pop("drafter", tiny_drafter), **arguments)

    return begin
