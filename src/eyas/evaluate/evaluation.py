"""An evaluation of drafters on conversations: questions asked behind prefixes, and text as it stands."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from eyas.data.conversations import Conversation
from eyas.data.encode_prompt import encode_prompt
from eyas.drafter.model import Drafter
from eyas.evaluate.decoders import EngineDecoders, ReadMessage
from eyas.evaluate.evaluate import Estimates, Follow, Group, estimate_corpus, evaluate, record_estimates
from eyas.evaluate.partings import find_parting
from eyas.evaluate.prompts import PrefixText, Questions
from eyas.target.model import Target
from eyas.train.corpus.corpus import Corpus
from eyas.train.corpus.encoding import encode_conversations

# Tokens and rows that the estimate scores at a time.
PACK_ON_CPU, PACK_ELSEWHERE = 2048, 16_384
CHUNK_ON_CPU, CHUNK_ELSEWHERE = 512, 4096


@dataclass(kw_only=True)
class Evaluation:
    """Drafters of one target, and what they are asked."""

    target: Target
    drafters: Mapping[str, Drafter]
    conversations: Sequence[Conversation]
    depths: Sequence[int]
    max_tokens: int
    """New tokens per answer."""
    max_length: int
    """Tokens of prompt and answer."""
    turns: int = 1
    prefix: Path | None = None
    """Text to put before questions."""
    prefix_tokens: Sequence[int] | None = None
    """Tokens of it, for each group of questions."""
    estimate: bool = True
    """Estimate on the target's plain answers as well."""
    slots: int | None = None
    """Answers at the same time."""
    stop_strings: tuple[str, ...] = ()
    read_answer: ReadMessage

    def __post_init__(self) -> None:
        prefixes = list(dict.fromkeys(self.prefix_tokens or (0,)))
        text = None if self.prefix is None else PrefixText(self.prefix, self.target)
        if text is not None:
            text.check(max(prefixes))
        encode, longest = partial(encode_prompt, self.target), self.max_length - self.max_tokens
        questions = Questions(self.conversations, encode, turns=self.turns, longest=longest, prefix=text)
        groups = []
        for tokens in prefixes:
            asked, skipped = questions.first(tokens)
            groups.append(Group(prefix_tokens=tokens, prompts=asked, skipped=skipped))
        self.questions, self.groups = questions, groups

    def measure(self, follow: Follow) -> None:
        """Decode everything; results go into `groups`."""
        decoders = EngineDecoders(
            self.target,
            self.drafters,
            max_new_tokens=self.max_tokens,
            max_depth=self.depths[-1],
            max_num_seqs=self.slots,
            stop_strings=self.stop_strings,
            read_answer=self.read_answer,
        )
        evaluate(
            self.groups,
            self.questions,
            decoders,
            drafters=list(self.drafters),
            depths=self.depths,
            turns=self.turns,
            find_parting=partial(find_parting, self.target),
            estimate=self._estimate if self.estimate else None,
            follow=follow,
        )

    def on_held_out(self) -> dict[str, Any]:
        """Estimate on the conversations' own answers."""
        corpus, counts = encode_conversations(
            self.conversations,
            self.target.tokenizer,
            self.target.stop_ids(),
            max_length=self.max_length,
            variables=self.target.template_variables,
        )
        return {"conversations": counts.kept, "estimates": record_estimates(self._estimate(corpus))}

    def _estimate(self, corpus: Corpus) -> Estimates:
        on_cpu = self.target.device.type == "cpu"
        return estimate_corpus(
            self.drafters,
            self.target,
            corpus,
            depths=self.depths,
            pack_length=PACK_ON_CPU if on_cpu else PACK_ELSEWHERE,
            chunk=CHUNK_ON_CPU if on_cpu else CHUNK_ELSEWHERE,
        )
