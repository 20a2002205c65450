"""Servers that answer prompts, with the replies that an engine on this machine would give.

Prompts are rendered here and sent as token ids; token ids come back, and replies are made of them here: where an answer
ends, what of it is reasoning or a tool call. So the file is the same, whether an engine or servers answer.
"""

import asyncio
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

from eyas.answering.answers import AnswerSettings, PromptEncoder
from eyas.data.regenerate import ChatPrompt, Reply
from eyas.engine.detokenizer import TextStream, text_behind
from eyas.errors import UserError
from eyas.remote.address import Address
from eyas.remote.completions import PATH, Completion, CompletionReader, ServerTrial
from eyas.remote.server_pool import RequestFailedError, RequestRefusedError, RetryPolicy, ServerPool
from eyas.target.chat_template import ChatFormat
from eyas.target.text import ServedTarget, TargetText

logger = logging.getLogger(__name__)
FILLED_AT_ONCE = 32
"""Requests begun between two looks at finished ones."""
KEPT_TEXTS = 2**16
TRIAL_MESSAGE = {"role": "user", "content": "Say hello."}


class Servers:
    """A target on other machines: servers that have named their model."""

    target: TargetText

    def __init__(self, runner: asyncio.Runner, pool: ServerPool, model: str) -> None:
        self._runner, self._pool, self._model = runner, pool, model

    @classmethod
    @contextmanager
    def connect(
        cls, urls: Sequence[str], *, model: str | None, api_key: str | None, retry: RetryPolicy, slots: int
    ) -> Iterator["Servers"]:
        """Ask servers for their model; `slots` requests will be in flight at the same time."""
        addresses = [Address.of(url, api_key=api_key) for url in urls]
        _allow_open_files(slots)
        pool = ServerPool(addresses, model=model, retry=retry, report=logger.info)
        with asyncio.Runner() as runner:
            runner.run(pool.__aenter__())
            try:
                card = runner.run(pool.identify())
                yield cls(runner, pool, str(card["id"]))
            finally:
                runner.run(pool.__aexit__(None, None, None))

    def load(self, target: str | None, *, cache: Path | None, chat_format: ChatFormat) -> None:
        """Read tokenizer and template of the target; without a name, of the model that the servers name."""
        self.target = ServedTarget.load(target or self._model, cache=cache, chat_format=chat_format)

    @property
    def arguments(self) -> dict[str, object]:
        """Arguments that decide the answers, beside the target. Addresses do not."""
        return {"served_model": self._model}

    @property
    def author(self) -> dict[str, str]:
        """The target, as every record names it. Its weights are not seen."""
        return {"target": self.target.facts.source}

    def answerer(self, settings: AnswerSettings) -> "ServerAnswerer":
        """Return an `Answerer` that uses all servers together."""
        return ServerAnswerer(self._runner, self._pool, self.target, settings)


class ServerAnswerer:
    """An `Answerer` that asks servers."""

    def __init__(self, runner: asyncio.Runner, pool: ServerPool, target: TargetText, settings: AnswerSettings) -> None:
        self._runner, self._pool, self._settings = runner, pool, settings
        self._limits, self._stop_strings = settings.limits, settings.stop_strings
        self._stop_ids = target.stop_ids()
        self._encode = PromptEncoder(target, settings.limits.max_length)
        self._decode = lru_cache(maxsize=KEPT_TEXTS)(partial(_decode, target.decoder()))
        self._behind = lru_cache(maxsize=KEPT_TEXTS)(partial(text_behind, self._decode))
        self._completions = CompletionReader(target.tokenizer, _vocab_size(target))
        self._done: asyncio.Queue[Reply | BaseException] = asyncio.Queue()
        self._tasks: set[asyncio.Task[None]] = set()
        self._told: set[str] = set()
        trial = ServerTrial(
            self._completions,
            target.encode_chat([TRIAL_MESSAGE]),
            body=self._fields,
            stop_ids=self._stop_ids,
            decode=target.decode,
            max_length=settings.limits.max_length,
            report=logger.info,
        )
        self._runner.run(self._pool.start(trial))

    def __call__(self, pull: Callable[[], ChatPrompt | None]) -> Iterator[Reply]:
        """See `Answerer`."""
        try:
            while True:
                full = self._fill(pull)
                if not self._tasks and self._done.empty():
                    return
                self._runner.run(self._wait() if full and self._done.empty() else asyncio.sleep(0))
                yield from self._finished()
        except (KeyboardInterrupt, asyncio.CancelledError):
            # Python 3.11 and 3.12 leave it at the second where the signal meets the start of a task.
            yield from self._finished()
            raise KeyboardInterrupt from None
        finally:
            self._runner.run(self._cancel())

    def _fill(self, pull: Callable[[], ChatPrompt | None]) -> bool:
        """Begin some requests; return whether no more can be begun now."""
        for _ in range(FILLED_AT_ONCE):
            if len(self._tasks) >= self._settings.max_num_seqs or (question := pull()) is None:
                return True
            self._start(question)
        return False

    def _start(self, question: ChatPrompt) -> None:
        prompt = self._encode(question)
        if prompt is None:
            self._done.put_nowait(Reply(id=question.id, sample=None))
            return
        self._tasks.add(self._runner.get_loop().create_task(self._answer(question, prompt)))

    async def _wait(self) -> None:
        """Wait for a reply."""
        self._done.put_nowait(await self._done.get())

    async def _cancel(self) -> None:
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _finished(self) -> Iterator[Reply]:
        """Yield finished replies, then raise the first error."""
        wrong: BaseException | None = None
        while not self._done.empty():
            reply = self._done.get_nowait()
            if isinstance(reply, BaseException):
                wrong = wrong or reply
            else:
                yield reply
        if wrong is not None:
            raise wrong

    async def _answer(self, question: ChatPrompt, prompt: tuple[int, ...]) -> None:
        reply: Reply | BaseException
        try:
            completion = await self._pool.post(
                PATH,
                self._body(question, prompt),
                lambda told, server: self._completions.read(told, prompt, server),
            )
            reply = self._reply(question, prompt, completion)
        except RequestRefusedError as error:
            self._tell_once("refused", f"note: a server refuses a conversation, and perhaps others: {error}")
            reply = Reply(id=question.id, sample=None)
        except RequestFailedError as error:
            self._tell_once("failed", f"note: a conversation failed, and perhaps others: {error}")
            reply = Reply(id=question.id, sample=None, missing="failed")
        except Exception as error:  # raised where replies are awaited
            reply = error
        task = asyncio.current_task()
        assert task is not None
        self._tasks.discard(task)
        self._done.put_nowait(reply)

    @property
    def _fields(self) -> dict[str, Any]:
        """Fields of every request: all that decides the tokens, as a server may have other defaults."""
        sampling = self._settings.sampling
        fields: dict[str, Any] = {
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "top_k": sampling.top_k,
            "min_p": sampling.min_p,
            "repetition_penalty": sampling.repetition_penalty,
            "stop_token_ids": sorted(self._stop_ids),
            "skip_special_tokens": False,
        }
        return {**fields, "stop": list(self._stop_strings)} if self._stop_strings else fields

    def _body(self, question: ChatPrompt, prompt: tuple[int, ...]) -> Mapping[str, Any]:
        room = self._limits.room(len(prompt), thinks=self._settings.reader.thinks)
        seed = {"seed": self._settings.seed + question.id} if self._settings.sampling.temperature > 0 else {}
        return {**self._fields, **seed, "prompt": list(prompt), "max_tokens": room}

    def _reply(self, question: ChatPrompt, prompt: tuple[int, ...], completion: Completion) -> Reply:
        """Make of these tokens the reply that the engine would have given."""
        ids = completion.ids
        if ids is None:
            return Reply(id=question.id, sample=None, missing="inexact")
        room = self._limits.room(len(prompt), thinks=self._settings.reader.thinks)
        answer = self._settings.begin(question, prompt)
        stream = TextStream(self._decode, self._stop_strings, behind=self._behind)
        for place, token in enumerate(ids, start=1):
            is_stop = token in self._stop_ids
            text = stream.finish() if is_stop else stream.push(token)
            stopped = is_stop or stream.stopped
            ended = stopped or place == min(len(ids), room)
            text += stream.finish() if ended and not stopped else ""
            if answer.feed((token,), (text,), ended=ended) or stopped or place == room:
                return answer.reply(question.id, finished=stopped)
        if not completion.stopped:
            return answer.reply(question.id, finished=False)
        if completion.missing_stop or not ids:
            stop = completion.stop_id if completion.stop_id is not None else _only(self._stop_ids)
            if stop is None:
                return Reply(id=question.id, sample=None, missing="inexact")
            answer.feed((stop,), ("",), ended=True)
        return answer.reply(question.id, finished=True)

    def _tell_once(self, kind: str, message: str) -> None:
        if kind not in self._told:
            self._told.add(kind)
            logger.info(message)


def _decode(decode: Callable[[Sequence[int], bool], str], ids: tuple[int, ...]) -> str:
    return decode(ids, False)  # a later turn needs special tokens as much as the words


def _vocab_size(target: TargetText) -> int:
    return max(target.facts.vocab_size, len(target.tokenizer))


def _only(ids: frozenset[int]) -> int | None:
    return next(iter(ids)) if len(ids) == 1 else None


def _allow_open_files(slots: int) -> None:
    """Raise the limit of open files: every request in flight has a connection, and the usual limit is 1024."""
    try:
        import resource
    except ImportError:  # Windows has no such limit
        return
    needed = slots + 256
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY or soft >= needed:
        return
    if hard != resource.RLIM_INFINITY and hard < needed:
        raise UserError(
            f"--slots {slots} needs {needed} open files and the system allows {hard}; raise it (ulimit -n) or give "
            f"--slots {max(1, hard - 256)}"
        )
    resource.setrlimit(resource.RLIMIT_NOFILE, (needed, hard))
