"""The device that a target runs on."""

import torch

from eyas.errors import UserError


def choose_device(name: str) -> torch.device:
    """Return the device of this name after trying it; `auto` is the first GPU that torch can use, otherwise the CPU."""
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        device = torch.device(name)
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        reason = str(error).partition("\n")[0].rstrip(".")
        raise UserError(f"device {name!r} cannot be used here: {reason}; use 'cpu' or a device torch sees") from error
    return device


def device_words(device: torch.device, *, asked: str) -> str:
    """Describe the device for people, and say why `auto` chose a CPU."""
    if device.type == "cuda":
        return f"{device} ({torch.cuda.get_device_name(device)})"
    if device.type != "cpu" or asked != "auto":
        return str(device)
    if torch.version.cuda is None:
        return "cpu (this torch is built without CUDA)"
    return "cpu (torch sees no CUDA device)"
