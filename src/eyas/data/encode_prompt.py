"""Encodes the prompt of a record; its own tools and template arguments override those of the run."""

from eyas.data.conversations import Conversation
from eyas.errors import UserError
from eyas.target.chat_template import ChatTemplateOptions, check_variables
from eyas.target.text import TargetText


def encode_prompt(target: TargetText, conversation: Conversation) -> list[int]:
    """Token ids of a conversation, with the generation prompt."""
    variables = conversation.chat_template_kwargs
    check_variables(target.tokenizer, variables, conversation.where)
    try:
        return target.encode_chat(
            conversation.messages, conversation.tools or None, ChatTemplateOptions(variables=variables)
        )
    except UserError as error:
        raise UserError(f"{conversation.where}: {error}") from error
