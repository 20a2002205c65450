"""JSON alone, calls set apart by semicolons, as Llama 3 templates ask for."""

from eyas.serve.parsers.base import BLANK
from eyas.serve.parsers.json_calls import JsonCallFormat


class Llama3JsonFormat(JsonCallFormat):
    """See the module."""

    name = "llama3_json"
    template_markers = ('"parameters"', "ipython")
    markers = ()
    opening = "{"
    skipped = BLANK + ";"
    arguments = "parameters"
    separator = "; "
