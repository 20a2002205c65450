"""`<tool_call>` JSON `</tool_call>`, as Hermes and Qwen templates ask for."""

from eyas.serve.parsers.json_calls import JsonCallFormat


class HermesFormat(JsonCallFormat):
    """See the module."""

    name = "hermes"
    template_markers = ("<tool_call>",)
    markers = ("<tool_call>", "</tool_call>")
    opening = "<tool_call>"
    closing = "</tool_call>"
    around_each = ("<tool_call>\n", "\n</tool_call>")
    separator = "\n"
