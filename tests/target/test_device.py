"""The choice of the device and its description."""

from typing import Any

import pytest
import torch
import typer

from eyas.cli.app import app
from eyas.errors import UserError
from eyas.target.device import choose_device, device_words


def test_auto_takes_a_gpu_if_there_is_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert choose_device("auto") == torch.device("cpu")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch, "empty", lambda *_, device: None)  # a machine without a GPU has none to try
    assert choose_device("auto") == torch.device("cuda")
    assert choose_device("cpu") == torch.device("cpu")


def test_a_device_that_is_not_there_is_refused() -> None:
    with pytest.raises(UserError, match="device 'cuda:99' cannot be used here"):
        choose_device("cuda:99")


def test_a_cpu_chosen_by_auto_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    cpu = torch.device("cpu")
    assert device_words(cpu, asked="cpu") == "cpu"
    monkeypatch.setattr(torch.version, "cuda", None)
    assert device_words(cpu, asked="auto") == "cpu (this torch is built without CUDA)"
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    assert device_words(cpu, asked="auto") == "cpu (torch sees no CUDA device)"
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "Card")
    assert device_words(torch.device("cuda"), asked="auto") == "cuda (Card)"


def test_every_command_leaves_the_device_to_auto() -> None:
    def commands(group: Any) -> Any:
        for command in group.commands.values():
            yield command
            if hasattr(command, "commands"):
                yield from commands(command)

    defaults = {
        command.name: parameter.default
        for command in commands(typer.main.get_command(app))
        for parameter in command.params
        if parameter.name == "device"
    }
    assert defaults == dict.fromkeys(
        ("demo", "generate", "serve", "eval", "doctor", "adapt", "prompts", "answer"), "auto"
    )
