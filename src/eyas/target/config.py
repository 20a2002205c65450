"""Reads a target's configuration, also of architectures that transformers knows by another name."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from eyas.target.locate import explain_failures

if TYPE_CHECKING:
    from transformers import PretrainedConfig

DEEPSEEK_V3_BY_OTHER_NAMES = ("kimi_k2",)
"""What DeepSeek V3's model is called in configurations whose `model_type` transformers does not know."""


def read_config(source: str, place: str, hub: dict[str, Any]) -> PretrainedConfig:
    """The configuration of `source`, which lies at `place` (see `locate`, `options_of`)."""
    from transformers import AutoConfig, PretrainedConfig

    with explain_failures(source, place):
        said, _ = PretrainedConfig.get_config_dict(place, **hub)
        if said.get("model_type") in DEEPSEEK_V3_BY_OTHER_NAMES:
            from transformers import DeepseekV3Config

            return DeepseekV3Config.from_dict({**said, "model_type": DeepseekV3Config.model_type})
        config: PretrainedConfig = AutoConfig.from_pretrained(place, **hub)
    return config
