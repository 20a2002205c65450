"""Templates to HTML.

Invariant: every value is escaped, since names and errors in a report come from users and servers. Only what another
template rendered (`Markup`) is inserted as it is. A value that a template needs and was not given raises.
"""

from functools import cache

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup


def render(template: str, **context: object) -> Markup:
    """Render a file of `templates/`; the result can stand in another template without being escaped again."""
    return Markup(_environment().get_template(template).render(context))


def number(value: float | None, spec: str) -> str:
    """A number in Python's format language; "-" where there is none."""
    return "-" if value is None else format(value, spec)


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
    return environment
