"""Whose answers may be trained on: the target's own, since a drafter has to foretell this target and no other.

Records of `eyas data answer` name their author. One model has many names (a folder, a GGUF file, a hub id), so models
are compared by their weights (`target/fingerprint.py`); names count where a record knows no weights, as when another
server answered.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING

from eyas.data.conversations import Conversation
from eyas.errors import UserError

if TYPE_CHECKING:
    from eyas.target.parts import TargetParts


@dataclass(frozen=True, kw_only=True)
class AuthorCheck:
    """Refuses answers that are not the target's; records that name no author pass, such as collected conversations."""

    source: str
    """What the recipe calls the target."""
    fingerprint: str | None
    """None: not known, and names have to do."""
    vocab_size: int
    allow_others: bool = False

    @classmethod
    def of(cls, target: "TargetParts", *, allow_others: bool = False) -> "AuthorCheck":
        """The check for a target."""
        return cls(
            source=target.facts.source,
            fingerprint=target.fingerprint,
            vocab_size=target.facts.vocab_size,
            allow_others=allow_others,
        )

    def __call__(self, conversation: Conversation) -> Conversation:
        """The same conversation, if it may be trained on."""
        author = conversation.author
        highest = max((max(*sample.prompt_ids, *sample.answer_ids) for sample in conversation.samples), default=0)
        if highest >= self.vocab_size:
            raise UserError(
                f"{conversation.where}: a sample has token {highest} and {self.source} knows 0 to "
                f"{self.vocab_size - 1}, so {author or 'its author'} is another model; let {self.source} answer the "
                "prompts (eyas data answer)"
            )
        if not self.allow_others and not self._is_author(conversation):
            raise UserError(
                f"{conversation.where}: these answers are by {author or 'another model'}, and the drafter is for "
                f"{self.source}, another model; let it answer the prompts itself (eyas data answer --target "
                f"{self.source}), or set data.allow_other_authors to true if both speak alike, as a merge may"
            )
        return conversation

    def _is_author(self, conversation: Conversation) -> bool:
        if conversation.author_fingerprint is not None and self.fingerprint is not None:
            return conversation.author_fingerprint == self.fingerprint
        # Without tokens, `target` may be a column of any meaning.
        if conversation.author is None or not conversation.samples:
            return True
        return _last_name(conversation.author) == _last_name(self.source)


def _last_name(source: str) -> str:
    """A model's name without where it lies."""
    return source.rstrip("/\\").replace("\\", "/").rsplit("/", 1)[-1].lower()
