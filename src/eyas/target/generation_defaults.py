"""Sampling values that a model's makers recommend: its generation_config.json, for requests that do not say."""

from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from transformers import GenerationConfig

from eyas.errors import UserError
from eyas.sampling import Sampling


@dataclass(frozen=True, kw_only=True)
class SamplingDefaults:
    """Values for requests that leave them out; None leaves them to the API."""

    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    max_new_tokens: int | None = None

    @property
    def given(self) -> dict[str, Any]:
        """Those that there are."""
        return {field.name: value for field in fields(self) if (value := getattr(self, field.name)) is not None}


def read_defaults(choice: str, own: GenerationConfig | None) -> SamplingDefaults:
    """The defaults by vLLM's words: auto is the model's `own`, vllm is none, else a folder that has the file."""
    if choice == "vllm":
        return SamplingDefaults()
    config = own
    if choice != "auto":
        if not (Path(choice) / "generation_config.json").is_file():
            raise UserError(
                f"--generation-config {choice} is neither auto, nor vllm, nor a folder with a generation_config.json"
            )
        try:
            config = GenerationConfig.from_pretrained(choice)
        except (OSError, ValueError) as error:
            raise UserError(f"{choice}/generation_config.json cannot be read ({error}); fix it") from error
    if config is None:
        return SamplingDefaults()
    said = config.to_diff_dict()  # what differs from the defaults of transformers
    if said.get("do_sample") and said.get("temperature") is None:
        said["temperature"] = 1.0  # of transformers too, where a model is sampled from
    defaults = SamplingDefaults(**{field.name: said.get(field.name) for field in fields(SamplingDefaults)})
    _require_valid(defaults, choice)
    return defaults


def _require_valid(defaults: SamplingDefaults, choice: str) -> None:
    """Fail at the start and not at the first request."""
    sampling = defaults.given
    most = sampling.pop("max_new_tokens", 1)
    try:
        Sampling(**sampling)
        if not isinstance(most, int) or most < 1:
            raise UserError(f"max_new_tokens is {most}; it must be 1 or more")
    except (UserError, TypeError) as error:
        raise UserError(
            f"the generation config ({choice}) holds a value that cannot be used: {error}; serve with "
            "--generation-config vllm to do without it"
        ) from error
