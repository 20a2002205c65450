"""`[TOOL_CALLS]` and a list of JSON, as Mistral's templates ask for."""

from eyas.serve.parsers.base import BLANK, mistral_call_id
from eyas.serve.parsers.json_calls import JsonCallFormat


class MistralFormat(JsonCallFormat):
    """See the module."""

    name = "mistral"
    template_markers = ("[TOOL_CALLS]",)
    markers = ("[TOOL_CALLS]",)
    opening = "[TOOL_CALLS]"
    skipped = BLANK + "[],"
    around_all = ("[TOOL_CALLS][", "]")
    separator = ", "

    def new_id(self) -> str:
        """Ids that the template takes."""
        return mistral_call_id()
