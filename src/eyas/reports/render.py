"""Renders HTML templates.

All values are escaped, since names and errors in a report come from users and servers; only output of other templates
(`Markup`) is not. A missing value raises. The content security policy of a page names the hashes of its stylesheet and
script, so that a browser runs nothing else.
"""

from base64 import b64encode
from collections.abc import Mapping
from functools import cache
from hashlib import sha256
from importlib.resources import files

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup


def render(template: str, **context: object) -> Markup:
    """Render a file of `templates/`; the result is not escaped again in another template."""
    return Markup(_environment().get_template(template).render(context))


def number(value: float | None, spec: str) -> str:
    """Format a number; "-" for None."""
    return "-" if value is None else format(value, spec)


def lead(kind: str, text: str) -> Mapping[str, str]:
    """The first line of a report; `kind` is a CSS class: healthy, warning, fault, unknown or note."""
    return {"kind": kind, "text": text}


@cache
def _own(name: str) -> Markup:
    return Markup(files("eyas.reports").joinpath("templates", name).read_text(encoding="utf-8"))


@cache
def _policy() -> str:
    """The content security policy: own stylesheet and script only."""
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
