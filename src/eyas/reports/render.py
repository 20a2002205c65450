"""Templates to HTML.

Invariant: every value is escaped, since names and errors in a report come from users and servers. Only what another
template rendered (`Markup`) is inserted as it is. A value that a template needs and was not given raises.

A page has one stylesheet and one script, both its own; its policy names them by their hashes, so that a browser applies
and runs nothing else, whatever a name or an error might smuggle in.
"""

from base64 import b64encode
from collections.abc import Mapping
from functools import cache
from hashlib import sha256
from importlib.resources import files

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup


def render(template: str, **context: object) -> Markup:
    """Render a file of `templates/`; the result can stand in another template without being escaped again."""
    return Markup(_environment().get_template(template).render(context))


def number(value: float | None, spec: str) -> str:
    """A number in Python's format language; "-" where there is none."""
    return "-" if value is None else format(value, spec)


def lead(kind: str, text: str) -> Mapping[str, str]:
    """The first line of a report. `kind` is a class of the stylesheet: healthy, warning, fault, unknown or note."""
    return {"kind": kind, "text": text}


@cache
def _own(name: str) -> Markup:
    """A file of the page as it is."""
    return Markup(files("eyas.reports").joinpath("templates", name).read_text(encoding="utf-8"))


@cache
def _policy() -> str:
    """What a browser may apply and run: these two texts, and nothing from anywhere."""
    style, script = (b64encode(sha256(_own(name).encode()).digest()).decode() for name in ("style.css", "report.js"))
    return (
        f"default-src 'none'; style-src 'sha256-{style}'; script-src 'sha256-{script}'; base-uri 'none'; "
        "form-action 'none'"
    )


@cache
def _environment() -> Environment:
    environment = Environment(
        loader=PackageLoader("eyas.reports"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters["number"] = number
    environment.globals["policy"] = _policy
    environment.globals["style"] = lambda: _own("style.css")
    environment.globals["script"] = lambda: _own("report.js")
    return environment
