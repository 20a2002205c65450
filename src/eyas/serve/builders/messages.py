"""Renders the messages of a chat request for the chat template."""

import json
from typing import Any

from eyas.serve.api_error import invalid, unsupported
from eyas.serve.builders.answer_formats import ToolSupport
from eyas.serve.protocol.completions import AssistantMessage, ChatCompletionRequest, FunctionCall, ToolMessage
from eyas.serve.protocol.request_policy import RequestPolicy
from eyas.target.chat_template import ChatTemplateOptions, reserved_variables
from eyas.target.text import TargetText


def rendered_messages(body: ChatCompletionRequest, tool_support: ToolSupport) -> list[dict[str, Any]]:
    """The messages as chat templates take them."""
    messages: list[dict[str, Any]] = []
    names: dict[str, str] = {}
    for number, message in enumerate(body.messages):
        content = message.content
        text = "".join(part.text for part in content) if isinstance(content, list) else content or ""
        role = "system" if message.role == "developer" else message.role
        rendered: dict[str, Any] = {"role": role, "content": text}
        field = f"messages.{number}"
        if isinstance(message, AssistantMessage):
            # `encode_chat` adds the other names that templates use.
            reasoning = message.reasoning if message.reasoning is not None else message.reasoning_content
            rendered |= {} if reasoning is None else {"reasoning_content": reasoning}
        if isinstance(message, AssistantMessage) and message.tool_calls:
            tool_support.require(f"{field}.tool_calls", "leave them out")
            rendered["tool_calls"] = [
                {"id": call.id, "type": "function", "function": _rendered_call(call.function, f"{field}.tool_calls")}
                for call in message.tool_calls
            ]
            names |= {call.id: call.function.name for call in message.tool_calls}
        elif content is None and len(rendered) == 2:
            field = f"{field}.content"
            raise invalid(field, f"{field} is missing, and so are tool_calls; give one")
        if isinstance(message, ToolMessage):
            tool_support.require(f"{field}.role", "is tool: send tool results with role user")
            rendered["tool_call_id"] = message.tool_call_id
            rendered |= {"name": names[message.tool_call_id]} if message.tool_call_id in names else {}
        if message.name is not None:
            rendered["name"] = message.name
        messages.append(rendered)
    return messages


def _rendered_call(function: FunctionCall, field: str) -> dict[str, Any]:
    """A function call as chat templates take it: arguments are an object, not a string."""
    try:
        arguments = json.loads(function.arguments or "{}")
    except ValueError:
        arguments = None
    if not isinstance(arguments, dict):
        raise invalid(field, f"{field} has arguments of {function.name!r} that are no JSON object; fix them")
    return {"name": function.name, "arguments": arguments}


def template_options(body: ChatCompletionRequest, target: TargetText, policy: RequestPolicy) -> ChatTemplateOptions:
    """The options of the chat template, or an error that names the field."""
    if body.chat_template is not None and not policy.trust_request_chat_template:
        message = (
            "chat_template is a program, which this server does not take from requests; leave it out, or ask the "
            "operator for --trust-request-chat-template"
        )
        raise unsupported("chat_template", message)
    if body.continue_final_message:
        field = "continue_final_message"
        if "add_generation_prompt" in body.model_fields_set and body.add_generation_prompt:
            raise invalid(field, f"{field} and add_generation_prompt are both true; set one of them to false")
        if not body.messages[-1].content:
            raise invalid(field, f"{field} is true, but the last message has no content to continue; give it some")
    variables = dict(body.chat_template_kwargs or {})
    for name in variables:
        if name in reserved_variables(target.tokenizer):
            message = f"chat_template_kwargs has {name!r}, which is not the template's to choose; leave it out"
            message += f", the field {name} says it" if name in type(body).model_fields else ""
            raise invalid("chat_template_kwargs", message)
    if body.reasoning_effort is not None:  # the field goes before one in chat_template_kwargs
        variables["reasoning_effort"] = body.reasoning_effort
    return ChatTemplateOptions(
        variables=variables,
        template=body.chat_template,
        add_generation_prompt=body.add_generation_prompt and not body.continue_final_message,
        continue_final_message=body.continue_final_message,
    )
