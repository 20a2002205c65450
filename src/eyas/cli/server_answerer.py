"""Servers as `eyas data answer --server` asks them: what the engine would be asked, and the same replies of it.

Prompts are rendered here and sent as token ids, token ids come back, and all that makes a reply of them happens here as
it does beside the engine: where it ends, what is thought, what is a call. So the file is the same, whoever answers.
"""

import asyncio
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

from eyas.cli.answer_limits import AnswerLimits, BudgetedAnswer
from eyas.cli.options import report
from eyas.cli.prompt_encoder import PromptEncoder
from eyas.data.regenerate import ChatPrompt, Reply
from eyas.engine.detokenizer import TextStream, text_behind
from eyas.errors import UserError
from eyas.remote.address import Address
from eyas.remote.completions import PATH, Completion, CompletionReader, ServerTrial
from eyas.remote.server_pool import RequestFailedError, RequestRefusedError, RetryPolicy, ServerPool
from eyas.sampling import Sampling
from eyas.serve.builders.answer_reader import AnswerReader
from eyas.target.chat_template import ChatFormat
from eyas.target.text import ServedTarget, TargetText

FILLED_AT_ONCE = 32
"""Requests that are made before answers are looked at again."""
KEPT_TEXTS = 2**16
TRIAL_MESSAGE = {"role": "user", "content": "Say hello."}


class Servers:
    """A target on other machines: servers that said which model they have."""

    target: TargetText

    def __init__(self, runner: asyncio.Runner, pool: ServerPool, model: str) -> None:
        self._runner, self._pool, self._model = runner, pool, model

    @classmethod
    @contextmanager
    def connect(
        cls, urls: Sequence[str], *, model: str | None, api_key: str | None, retry: RetryPolicy, slots: int
    ) -> Iterator["Servers"]:
        """Ask servers which model they have; `slots` requests will be in flight at the same time."""
        addresses = [Address.of(url, api_key=api_key) for url in urls]
        _allow_open_files(slots)
        pool = ServerPool(addresses, model=model, retry=retry, report=report)
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
        """What of it decides the answers, beside the target. Addresses do not."""
        return {"served_model": self._model}

    @property
    def author(self) -> dict[str, str]:
        """Who answers, for every record. The weights are not seen."""
        return {"target": self.target.facts.source}

    def answerer(
        self,
        reader: AnswerReader,
        *,
        sampling: Sampling,
        limits: AnswerLimits,
        stop_strings: tuple[str, ...],
        max_num_seqs: int,
        seed: int,
    ) -> "ServerAnswerer":
        """All servers together, with so many prompts in flight at the same time."""
        return ServerAnswerer(
            self._runner,
            self._pool,
            self.target,
            reader,
            sampling=sampling,
            limits=limits,
            stop_strings=stop_strings,
            slots=max_num_seqs,
            seed=seed,
        )


class ServerAnswerer:
    """An `Answerer`; see there."""

    def __init__(
        self,
        runner: asyncio.Runner,
        pool: ServerPool,
        target: TargetText,
        reader: AnswerReader,
        *,
        sampling: Sampling,
        limits: AnswerLimits,
        stop_strings: tuple[str, ...] = (),
        slots: int,
        seed: int,
    ) -> None:
        self._runner, self._pool = runner, pool
        self._reader, self._limits, self._slots = reader, limits, slots
        self._sampling, self._stop_strings, self._seed = sampling, stop_strings, seed
        self._stop_ids = target.stop_ids()
        self._encode = PromptEncoder(target, limits.max_length)
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
            max_length=limits.max_length,
            report=report,
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
        """Begin some of what can be begun; whether that was all."""
        for _ in range(FILLED_AT_ONCE):
            if len(self._tasks) >= self._slots or (question := pull()) is None:
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
        """Until there is something to tell."""
        self._done.put_nowait(await self._done.get())

    async def _cancel(self) -> None:
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _finished(self) -> Iterator[Reply]:
        """What is done; what went wrong is raised behind that."""
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
        except Exception as error:  # told to whoever waits for replies
            reply = error
        task = asyncio.current_task()
        assert task is not None
        self._tasks.discard(task)
        self._done.put_nowait(reply)

    @property
    def _fields(self) -> dict[str, Any]:
        """Of every request: all that decides the tokens, as a server may have defaults of its own."""
        sampling = self._sampling
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
        room = self._limits.room(len(prompt), thinks=self._reader.thinks)
        seed = {"seed": self._seed + question.id} if self._sampling.temperature > 0 else {}
        return {**self._fields, **seed, "prompt": list(prompt), "max_tokens": room}

    def _reply(self, question: ChatPrompt, prompt: tuple[int, ...], completion: Completion) -> Reply:
        """What the engine would have made of these tokens."""
        ids = completion.ids
        if ids is None:
            return Reply(id=question.id, sample=None, missing="inexact")
        room = self._limits.room(len(prompt), thinks=self._reader.thinks)
        answer = BudgetedAnswer(prompt, self._reader.read(prompt, question.conversation.tools), self._limits)
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
            report(message)


def _decode(decode: Callable[[Sequence[int], bool], str], ids: tuple[int, ...]) -> str:
    return decode(ids, False)  # a later turn needs special tokens as much as the words


def _vocab_size(target: TargetText) -> int:
    return max(target.facts.vocab_size, len(target.tokenizer))


def _only(ids: frozenset[int]) -> int | None:
    return next(iter(ids)) if len(ids) == 1 else None


def _allow_open_files(slots: int) -> None:
    """Every request in flight has a connection, and that is a file; the usual limit is 1024."""
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
