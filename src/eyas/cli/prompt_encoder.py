"""Questions as token ids, for whoever answers them."""

from eyas.cli.options import report
from eyas.data.encode_prompt import encode_prompt
from eyas.data.regenerate import ChatPrompt
from eyas.errors import UserError
from eyas.target.text import TargetText


class PromptEncoder:
    """Encodes what can be asked; the first question that the template refuses is told."""

    def __init__(self, target: TargetText, max_length: int) -> None:
        target.encode_chat([{"role": "user", "content": "?"}])  # a target without a chat template is refused at once
        self._target, self._max_length, self._told = target, max_length, False

    def __call__(self, question: ChatPrompt) -> tuple[int, ...] | None:
        """The ids; None where the template refuses it or nothing fits behind it."""
        try:
            prompt = tuple(encode_prompt(self._target, question.conversation))
        except UserError as error:
            if not self._told:
                report(f"note: this conversation cannot be asked, and perhaps others: {error}")
            self._told = True
            return None
        return prompt if len(prompt) < self._max_length else None
