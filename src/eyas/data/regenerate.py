"""The target's own answers: prompts in, conversations to train on out.

A drafter learns to foretell its target, so the answers it learns from must be the target's, not those that came with
a data set. Answers of a conversation are made turn by turn, each behind the answers made before it. A record keeps what
the target read and said as token ids (`samples`, under vLLM's names), since a second rendering of decoded text need not
give the same tokens; the messages beside them are for people, and for the prompts of later turns.

The file grows by whole conversations in the order in which they end (`resumable_file.py`), and a next run goes on with
those that are missing.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import IO, Any, Literal, Protocol

from eyas.data.conversations import Conversation, Message, Sample
from eyas.data.resumable_file import resumable_file, write_line


@dataclass(frozen=True, kw_only=True)
class ChatPrompt:
    """A conversation up to where the assistant answers."""

    id: int
    """The conversation's place in the input, from 0."""
    conversation: Conversation
    """With the messages so far."""

    @property
    def messages(self) -> tuple[Message, ...]:
        """What was said so far; last comes what is to be answered."""
        return self.conversation.messages


@dataclass(frozen=True, kw_only=True)
class Reply:
    """What the target said to a question."""

    id: int
    sample: Sample | None
    """Its tokens; None when there are none, and `missing` says why."""
    missing: Literal["unfit", "inexact", "failed"] = "unfit"
    """unfit: the question does not fit the target's context or its template; inexact: a server answered and its tokens
    are not certain; failed: no server answered this time."""
    message: Message = field(default_factory=dict)
    """The same as the assistant's message: content, and where the template knows of them reasoning and tool calls."""
    finished: bool = False
    """Whether the target ended the answer itself."""
    thinking_tokens: int = 0
    """The first tokens of the answer, up to the last that is thought."""

    @property
    def cut_thinking(self) -> bool:
        """Whether a length ended it before it had thought to the end."""
        tokens = 0 if self.sample is None else len(self.sample.answer_ids)
        return not self.finished and 0 < tokens == self.thinking_tokens

    @property
    def empty(self) -> bool:
        """Whether it says nothing."""
        message = self.message
        said = (message.get("content"), message.get("reasoning_content"))
        return not message.get("tool_calls") and not any(text and text.strip() for text in said)


class Answerer(Protocol):
    """Answers questions in any order; `pull` gives the next, or None when a reply must come before there is one."""

    def __call__(self, pull: Callable[[], ChatPrompt | None]) -> Iterator[Reply]:
        """Answer until `pull` has nothing and nothing is unanswered."""
        ...


@dataclass(frozen=True, kw_only=True)
class Progress:
    """How far a run is."""

    total: int
    """Conversations in the input."""
    earlier: int
    """Written by earlier runs."""
    written: int = 0
    cut_thinking: int = 0
    """Of those written, how many end with an answer that a length ended while the target was thinking."""
    cut_answer: int = 0
    """The same, behind the thinking or without any."""
    unfit: int = 0
    """Left out: the target cannot be asked the first question."""
    inexact: int = 0
    """Left out: the tokens of the first answer are not certain."""
    failed: int = 0
    """Left for the next run: no server gave an answer."""
    empty: int = 0
    """Left out: the first answer is empty."""
    unanswerable: int = 0
    """Left out: nobody asks anything."""
    tokens: int = 0
    """Made by this running."""
    thinking_tokens: int = 0
    """Those of them that are thought."""
    longest: int = 0
    """Tokens of the longest prompt with its answer."""

    @property
    def done(self) -> int:
        """Conversations that are dealt with."""
        return self.earlier + self.written + self.unfit + self.inexact + self.failed + self.empty + self.unanswerable


def regenerate(
    conversations: Sequence[Conversation],
    answerer: Answerer,
    out: Path,
    *,
    arguments: Mapping[str, object],
    author: Mapping[str, str],
    turns: int | None = None,
    on_progress: Callable[[Progress], None] | None = None,
) -> Progress:
    """Answer what `out` lacks, `turns` questions per conversation at most.

    A conversation ends early where the target cannot be asked, an answer is empty, calls a tool or was ended by a
    length; what came before is kept. `arguments` are all that decides the answers, as JSON values. `author` is written
    into every record: who answers, by name (`target`) and by its weights (`target_fingerprint`), if they can be seen.
    """
    with resumable_file(out, arguments, what="answers") as (stream, ids):
        running = _Regeneration(conversations, ids, turns, author, stream, on_progress or (lambda _: None))
        for reply in answerer(running.pull):
            running.take(reply)
        return running.progress


class _Regeneration:
    """Conversations under way, from the first question to the written line."""

    def __init__(
        self,
        conversations: Sequence[Conversation],
        written: set[int],
        turns: int | None,
        author: Mapping[str, str],
        stream: IO[bytes],
        on_progress: Callable[[Progress], None],
    ) -> None:
        self._conversations, self._turns, self._author = conversations, turns, dict(author)
        self._stream, self._on_progress = stream, on_progress
        earlier = written & set(range(len(conversations)))
        self.progress = Progress(total=len(conversations), earlier=len(earlier))
        self._fresh = iter([i for i in range(len(conversations)) if i not in earlier])
        self._next_turns: list[ChatPrompt] = []
        self._asked: dict[int, ChatPrompt] = {}
        self._left: dict[int, list[tuple[Message, ...]]] = {}
        self._samples: dict[int, list[Sample]] = {}
        on_progress(self.progress)

    def pull(self) -> ChatPrompt | None:
        """The next question: of a conversation under way, else of the next one."""
        while not self._next_turns:
            number = next(self._fresh, None)
            if number is None:
                return None
            questions = _questions(self._conversations[number].messages)[: self._turns]
            if questions:
                self._left[number], self._samples[number] = questions, []
                self._ask_next(number, ())
            else:
                self._count(unanswerable=1)
        question = self._next_turns.pop(0)
        self._asked[question.id] = question
        return question

    def take(self, reply: Reply) -> None:
        """Go on with the conversation, or write it."""
        before, sample = self._asked.pop(reply.id).messages, reply.sample
        if sample is None and reply.missing == "failed":
            self._count(failed=1)  # nothing is written, so that the next run asks again
            self._end(reply.id)
            return
        if sample is not None:
            self._count(tokens=len(sample.answer_ids), thinking_tokens=reply.thinking_tokens)
        if sample is None or reply.empty:
            said = _up_to_last_answer(before)
            if said:
                self._write(reply.id, said, finished=True)
            else:
                self._count(**{reply.missing if sample is None else "empty": 1})
            self._end(reply.id)
            return
        self._samples[reply.id].append(sample)
        said = (*before, reply.message)
        # A call waits for its result, which nobody here can give.
        if reply.finished and self._left[reply.id] and not reply.message.get("tool_calls"):
            self._ask_next(reply.id, said)
            return
        self._write(reply.id, said, finished=reply.finished)
        self._count(cut_thinking=int(reply.cut_thinking), cut_answer=int(not reply.finished and not reply.cut_thinking))
        self._end(reply.id)

    def _end(self, number: int) -> None:
        del self._left[number], self._samples[number]

    def _ask_next(self, number: int, said: tuple[Message, ...]) -> None:
        messages = (*said, *self._left[number].pop(0))
        asked = replace(self._conversations[number], messages=messages, samples=())
        self._next_turns.append(ChatPrompt(id=number, conversation=asked))

    def _write(self, number: int, messages: Sequence[Message], *, finished: bool) -> None:
        given, samples = self._conversations[number], self._samples[number]
        record: dict[str, Any] = {"id": number, "messages": [dict(message) for message in messages]}
        if given.tools:
            record["tools"] = [dict(tool) for tool in given.tools]
        if given.chat_template_kwargs:
            record["chat_template_kwargs"] = dict(given.chat_template_kwargs)
        record |= {"category": given.category, "finished": finished, **self._author}
        record["samples"] = [
            {"prompt_token_ids": sample.prompt_ids, "token_ids": sample.answer_ids} for sample in samples
        ]
        write_line(self._stream, record, f"conversation {number}")
        longest = max(len(sample.prompt_ids) + len(sample.answer_ids) for sample in samples)
        self._count(written=1, longest=max(0, longest - self.progress.longest))

    def _count(self, **more: int) -> None:
        old = self.progress
        self.progress = replace(old, **{name: getattr(old, name) + n for name, n in more.items()})
        self._on_progress(self.progress)


def _questions(messages: Iterable[Message]) -> list[tuple[Message, ...]]:
    """What stands before each answer to be made: everything of others up to a user's turn.

    A tool's result belongs to a call that an answer of the old author made: nothing is asked from there on.
    """
    questions: list[tuple[Message, ...]] = []
    pending: list[Message] = []
    for message in messages:
        if message["role"] == "tool":
            break
        if message["role"] == "assistant":
            continue
        pending.append(message)
        if message["role"] == "user":
            questions.append(tuple(pending))
            pending = []
    return questions


def _up_to_last_answer(messages: Sequence[Message]) -> tuple[Message, ...]:
    ends = [i + 1 for i, message in enumerate(messages) if message["role"] == "assistant"]
    return tuple(messages[: ends[-1]]) if ends else ()
