"""Command line of the `vllm serve` that hands out a target's states."""

import json
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from eyas.errors import UserError
from eyas.target.facts import TargetFacts
from eyas.train.served import vllm_side

VLLM_SERIES = "0.32."
"""vLLM versions that the connector was written for and tried with: vLLM's interface is experimental."""
VLLM_SIDE = Path(vllm_side.__file__).parent
"""Folder that vLLM's interpreter needs on its path: one module, which imports nothing of eyas."""
CONNECTOR, CONNECTOR_MODULE = "EyasStatesConnector", "eyas_states"


@dataclass(frozen=True, kw_only=True)
class StatesServer:
    """Settings of a vLLM server that hands out states."""

    model: str
    """Model that vLLM loads: a folder or a hub id."""
    layer_ids: tuple[int, ...]
    """Layers that drafters read; the last layer is captured beside them."""
    num_hidden_layers: int
    folder: Path
    """Folder for the state files."""
    max_length: int
    """Tokens of the longest document."""
    dtype: str = "auto"
    port: int = 8000
    python: str | None = None
    """vLLM's interpreter; None: the `vllm` on the path."""

    @property
    def captured(self) -> tuple[int, ...]:
        """All layers whose states are handed out, in order."""
        return captured_layers(self.layer_ids, self.num_hidden_layers)

    def command(self, extra: Sequence[str] = ()) -> list[str]:
        """Program and arguments; `extra` arguments of vLLM come last and win."""
        speculative = {
            "method": "extract_hidden_states",
            "num_speculative_tokens": 1,
            "draft_model_config": {"hf_config": {"eagle_aux_hidden_state_layer_ids": list(self.captured)}},
        }
        transfer = {
            "kv_connector": CONNECTOR,
            "kv_connector_module_path": CONNECTOR_MODULE,
            "kv_role": "kv_producer",
            "kv_connector_extra_config": {"shared_storage_path": str(self.folder)},
        }
        program = ["vllm"] if self.python is None else [self.python, "-m", "vllm.entrypoints.cli.main"]
        return [
            *program,
            "serve",
            self.model,
            *("--dtype", self.dtype),
            *("--port", str(self.port)),
            *("--max-model-len", str(self.max_length + 1)),  # vLLM generates one token
            "--no-enable-prefix-caching",
            *("--speculative-config", json.dumps(speculative)),
            *("--kv-transfer-config", json.dumps(transfer)),
            *extra,
        ]

    def environment(self) -> dict[str, str]:
        """Environment variables that vLLM needs."""
        return {"PYTHONPATH": str(VLLM_SIDE)}

    def line(self, extra: Sequence[str] = ()) -> str:
        """Command as a line for a shell."""
        variables = [f"{name}={shlex.quote(value)}" for name, value in self.environment().items()]
        return " ".join([*variables, shlex.join(self.command(extra))])


def captured_layers(layer_ids: Sequence[int], num_hidden_layers: int) -> tuple[int, ...]:
    """Layers that drafters read, and the last one, from which the final state is computed."""
    return tuple(sorted({*layer_ids, num_hidden_layers}))


def require_series(version: str, where: str) -> None:
    """Refuse another version of vLLM."""
    if not version.startswith(VLLM_SERIES):
        raise UserError(
            f"{where} is vLLM {version}, and states are served by {VLLM_SERIES}x only: its connectors differ from "
            f"version to version; install vLLM {VLLM_SERIES}0"
        )


def require_servable(config: object, facts: TargetFacts) -> None:
    """Refuse targets whose states vLLM cannot hand out."""
    if getattr(config, "kv_lora_rank", None):
        raise UserError(
            f"{facts.source} ({facts.model_type}) attends by MLA, and vLLM {VLLM_SERIES}x hands out no states of such "
            "targets: its connector needs a KV cache group for them, which there is not beside a compressed cache; use "
            'features.source = "live"'
        )
