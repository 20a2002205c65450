"""What a chat request says about the rendering of its messages."""

from typing import Any

from eyas.serve.api_error import ApiError
from eyas.serve.protocol.completions import ChatCompletionRequest
from eyas.serve.protocol.request_policy import RequestPolicy
from eyas.target.chat_template import ChatTemplateOptions, reserved_variables
from eyas.target.text import TargetText


def template_options(body: ChatCompletionRequest, target: TargetText, policy: RequestPolicy) -> ChatTemplateOptions:
    """The options of a body, or an error that names the field."""
    if body.chat_template is not None and not policy.trust_request_chat_template:
        raise ApiError(
            400,
            "chat_template is a program, which this server does not take from requests; leave it out, or ask the "
            "operator for --trust-request-chat-template",
            field="chat_template",
            code="unsupported_parameter",
        )
    if body.continue_final_message:
        _require_final_message(body)
    return ChatTemplateOptions(
        variables=_variables(body, target),
        template=body.chat_template,
        add_generation_prompt=body.add_generation_prompt and not body.continue_final_message,
        continue_final_message=body.continue_final_message,
    )


def _variables(body: ChatCompletionRequest, target: TargetText) -> dict[str, Any]:
    """The template's variables. `reasoning_effort` of its own field goes before one in `chat_template_kwargs`."""
    given = body.chat_template_kwargs or {}
    for name in given:
        if name in reserved_variables(target.tokenizer):
            raise ApiError(
                400,
                f"chat_template_kwargs has {name!r}, which is not the template's to choose; leave it out"
                + (f", the field {name} says it" if name in type(body).model_fields else ""),
                field="chat_template_kwargs",
            )
    effort = {} if body.reasoning_effort is None else {"reasoning_effort": body.reasoning_effort}
    return given | effort


def _require_final_message(body: ChatCompletionRequest) -> None:
    """Refuse what could not be continued."""
    if "add_generation_prompt" in body.model_fields_set and body.add_generation_prompt:
        raise ApiError(
            400,
            "continue_final_message and add_generation_prompt are both true; set one of them to false",
            field="continue_final_message",
        )
    if not body.messages[-1].content:
        raise ApiError(
            400,
            "continue_final_message is true, but the last message has no content to continue; give it some",
            field="continue_final_message",
        )
