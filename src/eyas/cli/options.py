"""Options of commands as dataclasses: a field is an option, its default the option's, the text below it its help.

A command takes such classes as keyword arguments, and `command` makes of it the function that typer reads:

    @options(SAMPLING)
    class SamplingOptions:
        temperature: Annotated[float, Option(min=0.0)] = 0.0
        \"\"\"0 takes the most likely token.\"\"\"

    @command()
    def generate(prompt: str, *, sampling: SamplingOptions) -> None: ...

The name given to `options` is the group of the help in which the fields are shown.
"""

import ast
import functools
import inspect
import sys
from collections.abc import Callable, Sequence
from copy import copy
from dataclasses import MISSING, Field, asdict, dataclass, fields, is_dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar, dataclass_transform, get_args, get_origin

import typer
from typer import Option

from eyas.cli.help import COMMON, MEMORY, MODEL, OPERATION, OUTPUT, SAMPLING, SPECULATION, WORK
from eyas.cli.libraries import import_libraries
from eyas.errors import UserError
from eyas.target.locate import DEFAULT_TARGET, require_on_hub

if TYPE_CHECKING:
    from eyas.drafter.model import Drafter as DrafterModel
    from eyas.target.chat_template import ChatFormat
    from eyas.target.model import Target as LoadedTarget

Class = TypeVar("Class")
Made = TypeVar("Made")


@dataclass_transform(frozen_default=True, kw_only_default=True)
def options(panel: str) -> Callable[[type[Class]], type[Class]]:
    """Make a class a dataclass whose fields are options, shown under `panel` in the help; mypy holds it frozen."""

    def mark(cls: type[Class]) -> type[Class]:
        made = dataclass(kw_only=True, repr=False, eq=False)(cls)  # what is not used would slow down every start
        panels: dict[str, str] = {}
        for base in reversed(cls.__mro__):
            panels |= vars(base).get("__panels__", {})
        setattr(made, "__panels__", panels | dict.fromkeys(inspect.get_annotations(cls), panel))  # noqa: B010
        return made

    return mark


def command(*, common: Sequence[str] = ()) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Replace the option classes among a function's parameters by their fields; `common` ones lead the help."""

    def expand(function: Callable[..., None]) -> Callable[..., None]:
        parameters: list[inspect.Parameter] = []
        groups: dict[str, Any] = {}
        for parameter in inspect.signature(function).parameters.values():
            if is_dataclass(parameter.annotation):
                groups[parameter.name] = parameter.annotation
                parameters += [
                    _parameter(parameter.annotation, field, common) for field in fields(parameter.annotation)
                ]
            else:
                parameters.append(parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY))
        parameters.sort(key=lambda one: common.index(one.name) if one.name in common else len(common))

        @functools.wraps(function)
        def run(**values: Any) -> None:
            for name, cls in groups.items():
                values[name] = cls(**{field.name: values.pop(field.name) for field in fields(cls)})
            function(**values)

        run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        run.__annotations__ = {one.name: one.annotation for one in parameters}
        run.option_help = {  # type: ignore[attr-defined]
            field.name: functools.partial(_help, cls, field.name) for cls in groups.values() for field in fields(cls)
        }
        return run

    return expand


def _parameter(cls: Any, field: "Field[Any]", common: Sequence[str]) -> inspect.Parameter:
    """A field as a parameter that typer makes an option of. A flag that is off by default has no `--no-` form."""
    annotation, info = field.type, Option()
    if get_origin(annotation) is Annotated:
        annotation, info = get_args(annotation)[0], copy(get_args(annotation)[1])
    info.rich_help_panel = COMMON if field.name in common else info.rich_help_panel or cls.__panels__[field.name]
    if annotation is bool and field.default is False and info.default is ...:
        info.default = f"--{field.name.replace('_', '-')}"
    default = inspect.Parameter.empty if field.default is MISSING else field.default
    kind = inspect.Parameter.KEYWORD_ONLY
    return inspect.Parameter(field.name, kind, default=default, annotation=Annotated[annotation, info])


def _help(cls: type, name: str) -> str:
    """The text below a field, in the class or the nearest base that has one."""
    texts = (_field_docs(base.__module__).get(base.__name__, {}).get(name) for base in cls.__mro__[:-1])
    return next(text for text in texts if text)


@functools.cache
def _field_docs(module: str) -> dict[str, dict[str, str]]:
    """Of every class of a module, the string literals below its fields."""
    file = sys.modules[module].__file__
    assert file is not None
    return {
        node.name: {
            field.target.id: " ".join(text.value.value.split())
            for field, text in zip(node.body, node.body[1:], strict=False)
            if isinstance(field, ast.AnnAssign)
            and isinstance(field.target, ast.Name)
            and isinstance(text, ast.Expr)
            and isinstance(text.value, ast.Constant)
            and isinstance(text.value.value, str)
        }
        for node in ast.parse(Path(file).read_text(encoding="utf-8")).body
        if isinstance(node, ast.ClassDef)
    }


def build(config: Callable[..., Made], *given: Any, **others: Any) -> Made:
    """A config of the library from the options that have its fields' names, and from `others`."""
    names = {field.name for field in fields(config)}  # type: ignore[arg-type]
    found = {name: value for group in given for name, value in vars(group).items() if name in names}
    return config(**found | others)


def vars_of(given: Any, group: Any) -> dict[str, Any]:
    """The options of one class."""
    return {field.name: getattr(given, field.name) for field in fields(group)}


def arguments_of(**given: Any) -> dict[str, Any]:
    """All arguments of a command, as the record of a run holds them."""
    found: dict[str, Any] = {}
    for name, value in given.items():
        found |= asdict(value) if is_dataclass(value) and not isinstance(value, type) else {name: value}
    return {name: _as_json(value) for name, value in found.items()}


def _as_json(value: Any) -> Any:
    if isinstance(value, list | tuple):
        return [_as_json(one) for one in value]
    return str(value) if isinstance(value, Path) else value


TARGET_HELP = f"{DEFAULT_TARGET}, a GGUF file, a folder or a hub id."
DRAFTER_HELP = "A drafter's name, folder or hub id."
Target = Annotated[str, typer.Argument(help=TARGET_HELP)]
Drafter = Annotated[str, typer.Argument(help=DRAFTER_HELP)]
Prompts = Annotated[list[Path], typer.Argument(help="Prompts or conversations: files or folders.")]
AsJson = Annotated[bool, Option("--json", help="Print JSON for programs instead of text.", rich_help_panel=OUTPUT)]
VLLMArguments = Annotated[
    list[str] | None,
    typer.Argument(help="With vLLM: options of its own, such as --tensor-parallel-size 2.", metavar="[-- OPTION ...]"),
]


@options(OPERATION)
class CacheOptions:
    """Where files are kept between runs."""

    cache: Annotated[Path | None, Option(envvar="EYAS_CACHE", show_default="the user's cache directory")] = None
    """Where converted models are kept."""


@options(MODEL)
class TemplateOptions(CacheOptions):
    """How a conversation becomes text."""

    chat_template: Annotated[str | None, Option(show_default="the target's own")] = None
    """A Jinja file, or the template itself."""
    chat_template_kwargs: str | None = None
    """Variables of the chat template, as JSON: {"enable_thinking": false}; a record's own override them."""

    def chat_format(self) -> "ChatFormat":
        """These options, read; imports transformers."""
        from eyas.target.chat_template import read_chat_format

        return read_chat_format(self.chat_template, self.chat_template_kwargs, raw=getattr(self, "raw", False))


@options(MODEL)
class ChatOptions(TemplateOptions):
    """How a conversation becomes text, for base models too."""

    raw: bool = False
    """Plain text in, its continuation out: for base models without a template."""


@options(MODEL)
class TextOptions(ChatOptions):
    """A target of which tokenizer and template are needed."""

    target: str = DEFAULT_TARGET
    """smollm2, a GGUF file, a folder or a hub id."""


@options(MODEL)
class PrecisionOptions:
    """In which precision a target computes, and where."""

    dtype: str = "auto"
    """float32, bfloat16, float16, or auto: as stored; on a CPU float32 where that is faster."""
    quantization: str = "auto"
    """On a CPU: int8 or int4 quantises the target's matrices, gguf takes a file's as they are, none makes bfloat16 of
    them; auto: gguf for a GGUF file, unless --dtype is given, else none. On a GPU: fp8 or int4 quantises them; auto
    takes those of a quantised checkpoint as they are, none makes 16 bits of them."""
    device: str = "auto"
    """Where to run: cpu, cuda, cuda:1, ..., or auto: a GPU if there is one."""


@options(MODEL)
class ModelOptions(PrecisionOptions, TextOptions):
    """A target that is loaded."""

    def placement(self) -> dict[str, Any]:
        """The arguments of `load_pair` and `load_target` that these options are."""
        return {**vars_of(self, PrecisionOptions), "cache": self.cache, "chat_format": self.chat_format()}

    def load(self) -> "LoadedTarget":
        """Load the target."""
        from eyas.loading import load_target

        return load_target(self.target, **self.placement())


@options(MEMORY)
class KVCacheOptions:
    """How keys and values are kept."""

    kv_cache_dtype: str = "auto"
    """Type of the keys and values of target and drafter: auto, as they compute them; fp8 or fp8_e4m3, 8-bit floats, so
    that twice the tokens of bfloat16 fit."""


@options(MEMORY)
class ThreadOptions:
    """How many threads compute."""

    threads: Annotated[
        int | None, Option(min=1, show_default="OMP_NUM_THREADS, or the processors that this process may use")
    ] = None
    """Threads that compute on a CPU."""


@options(MODEL)
class PairOptions(ModelOptions):
    """A target with a drafter."""

    drafter: Annotated[str | None, Option(show_default="the target's own, if shipped", rich_help_panel=SPECULATION)] = (
        None
    )
    """A drafter's name, folder or hub id, or none."""
    depth: Annotated[str, Option(rich_help_panel=SPECULATION)] = "auto"
    """Tokens to draft: a number, 0 for none, or auto: as deep as pays."""

    def load_pair(self, drafter: str | None) -> "tuple[LoadedTarget, DrafterModel | None]":
        """Load the target and this drafter."""
        from eyas.loading import load_pair

        return load_pair(self.target, drafter, **self.placement())


@options(SAMPLING)
class StopOptions:
    """Where answers end."""

    stop: list[str] | None = None
    """Text that ends an answer; repeat for several."""

    def stop_strings(self) -> tuple[str, ...]:
        """The texts; an empty one is refused."""
        if "" in (self.stop or ()):
            raise UserError("--stop is empty, which would end every answer at once; give some text")
        return tuple(self.stop or ())


@options(WORK)
class BadRecordOptions:
    """Which files are refused."""

    max_bad_share: Annotated[float, Option(min=0.0, max=1.0)] = 0.05
    """Share of bad records to skip at most; beyond it the files are refused."""


@options(MEMORY)
class ServedEngineOptions:
    """What a server's engine takes on, in vLLM's words."""

    served_model_name: Annotated[str | None, Option(show_default="the target as given", rich_help_panel="API")] = None
    """The model name in the API."""
    revision: Annotated[str | None, Option(show_default="main", rich_help_panel=MODEL)] = None
    """Of a hub id: a branch, a tag or a commit."""
    max_model_len: Annotated[int | None, Option(show_default="the target's, at most 8192", min=2)] = None
    """Most tokens of prompt and answer together."""
    max_num_seqs: Annotated[int, Option(min=1)] = 64
    """Most answers that run at once."""
    depths: Annotated[
        Path | None,
        Option(show_default="3 at every size, unless num_speculative_tokens is given", rich_help_panel=SPECULATION),
    ] = None
    """For vLLM: depths by batch size, from the plan.json of `eyas plan --out`."""


def load_libraries(
    target: str | None,
    *drafters: str | None,
    revision: str | None = None,
    threads: int | None = None,
    lean: bool = False,
) -> None:
    """Import torch and transformers, once the hub knows these names: a wrong one is refused in seconds."""
    if target is not None:
        require_on_hub(target, revision)
    for drafter in drafters:
        if drafter is not None:
            require_on_hub(drafter)
    import_libraries(lean=lean, threads=threads)


def short_names(sources: Sequence[str]) -> dict[str, str]:
    """Drafters by their folders' names where these tell them apart, else by all that was given."""
    unique = list(dict.fromkeys(sources))
    short = [Path(source).resolve().name if Path(source).exists() else source for source in unique]
    return dict(zip(short if len(set(short)) == len(short) else unique, unique, strict=True))
