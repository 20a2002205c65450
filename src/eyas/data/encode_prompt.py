"""A prompt of a record: its messages with its own tools and template arguments, which go over the run's."""

from eyas.data.conversations import Conversation
from eyas.errors import UserError
from eyas.target.chat_template import ChatTemplateOptions, check_variables
from eyas.target.text import TargetText


def encode_prompt(target: TargetText, conversation: Conversation) -> list[int]:
    """The ids of a conversation up to where the assistant answers."""
    variables = conversation.chat_template_kwargs
    check_variables(target.tokenizer, variables, conversation.where)
    try:
        return target.encode_chat(
            conversation.messages, conversation.tools or None, ChatTemplateOptions(variables=variables)
        )
    except UserError as error:
        raise UserError(f"{conversation.where}: {error}") from error
