"""What several commands make of their arguments before work begins."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from eyas.errors import UserError

if TYPE_CHECKING:
    from eyas.target.chat_template import ChatFormat


def as_json_value(argument: Any) -> Any:
    """An argument as a run's record holds it."""
    if isinstance(argument, (list, tuple)):
        return [as_json_value(one) for one in argument]
    return str(argument) if isinstance(argument, Path) else argument


def make_folder(out: Path) -> None:
    """A folder for results, made before anything is measured."""
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"cannot make {out}: {error.strerror}; choose another --out") from error


def short_names(sources: Sequence[str]) -> dict[str, str]:
    """Drafters by short names where these tell them apart, by all that was given where they do not."""
    unique = list(dict.fromkeys(sources))
    short = [Path(source).resolve().name if Path(source).exists() else source for source in unique]
    return dict(zip(short if len(set(short)) == len(short) else unique, unique, strict=True))


def require_models(target: str, *drafters: str | None, revision: str | None = None) -> None:
    """Refuse names that the hub does not know, in seconds: to be called before anything heavy is imported."""
    from eyas.target.locate import require_on_hub

    require_on_hub(target, revision)
    for drafter in drafters:
        if drafter is not None:
            require_on_hub(drafter)


def read_chat_format(
    chat_template: str | None,
    chat_template_kwargs: str | None,
    *,
    raw: bool,
    kwargs_option: str = "--chat-template-kwargs",
) -> "ChatFormat":
    """What the options of the chat template say; imports transformers."""
    from eyas.target.chat_template import ChatFormat
    from eyas.target.template_override import read_template

    variables: Any = {}
    if chat_template_kwargs is not None:
        try:
            variables = json.loads(chat_template_kwargs)
        except ValueError as error:
            raise UserError(f"{kwargs_option} {chat_template_kwargs!r} is not JSON ({error}); mend it") from error
        if not isinstance(variables, dict):
            raise UserError(
                f'{kwargs_option} {chat_template_kwargs!r} is no object; write {{"enable_thinking": false}}, say'
            )
    template = None if chat_template is None else read_template(chat_template)
    return ChatFormat(template=template, raw=raw, variables=variables)


def read_stop(stop: Sequence[str] | None) -> tuple[str, ...]:
    """Texts that end an answer."""
    if "" in (stop or ()):
        raise UserError("--stop is empty, which would end every answer at once; give some text")
    return tuple(stop or ())


def require_unsaid(own: Mapping[str, str], drafter: str | None) -> None:
    """Refuse what a server was told when it was started."""
    for name, value in {**own, "drafter": drafter or "auto"}.items():
        if value != "auto":
            raise UserError(
                f"--{name.replace('_', '-')} {value} is for a target on this machine, and --server answers; leave it "
                "out, the server's own options say it"
            )
