"""The servers that a bench measures, by name: running ones by address, others by the command that starts them."""

import re
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack
from pathlib import Path

from eyas.bench.process import Command, running_server
from eyas.bench.server import ServerInfo, identify
from eyas.bench.variants import Variant, list_variants
from eyas.errors import UserError
from eyas.remote.address import Address

# A name is in lower case, so that `OMP_NUM_THREADS=2 vllm serve` begins with a variable and not with a name.
_NAMED = re.compile(r"([a-z0-9][a-z0-9._+-]*)=(.+)", re.S)


class ChosenServers:
    """Servers as [name=]URL or [name=]COMMAND, and those that measure the same without drafting."""

    def __init__(
        self,
        urls: Sequence[str],
        commands: Sequence[str],
        baseline_urls: Sequence[str],
        baseline_commands: Sequence[str],
        *,
        baseline: bool,
        model: str | None,
        api_key: str | None,
    ) -> None:
        self._baseline, self._model, self._api_key = baseline, model, api_key
        self._urls = [_named(text, _host) for text in urls]
        named = [_named(text, _program) for text in commands]
        self._names = [name for name, _ in (*self._urls, *named)]
        if len(set(self._names)) < len(self._names):
            raise UserError(f"two servers are called {_twice(self._names)!r}; name them apart, as name=...")
        self._baseline_urls = [self._paired(text) for text in baseline_urls]
        paired = [self._paired(text) for text in baseline_commands]
        self._commands = [(name, command, False) for name, command in named]
        self._commands += [(name, command, True) for name, command in paired]
        for _, command, _ in self._commands:
            Command.of(command)  # one that cannot be read should not cost the start of another

    def _paired(self, text: str) -> tuple[str, str]:
        match = _NAMED.fullmatch(text)
        if match and match[1] in self._names:
            return match[1], match[2]
        if len(self._names) == 1 and not match:
            return self._names[0], text
        raise UserError(
            f"--baseline {text!r} does not say of which server; begin with one of {', '.join(self._names)}="
        )

    async def identify(self, stack: AsyncExitStack, *, timeout: float, start_seconds: float) -> tuple[Variant, ...]:
        """Start what is to be started, and ask every server for its name and model."""
        servers: list[ServerInfo] = []
        baselines: dict[str, ServerInfo] = {}
        for name, text in self._urls:
            address = Address.of(text, api_key=self._api_key)
            servers.append(await identify(name, address, model=self._model, timeout=timeout))
        for name, text in self._baseline_urls:
            address = Address.of(text, api_key=self._api_key)
            baselines[name] = await identify(name, address, model=self._model, timeout=timeout)
        for name, command, is_baseline in self._commands:
            begun = running_server(command, api_key=self._api_key, seconds=start_seconds)
            address = await stack.enter_async_context(begun)
            server = await identify(name, address, model=self._model, timeout=timeout, command=command)
            if is_baseline:
                baselines[name] = server
            else:
                servers.append(server)
        return list_variants(servers, baselines, baseline=self._baseline)


def _named(text: str, default: Callable[[str], str]) -> tuple[str, str]:
    match = _NAMED.fullmatch(text)
    return (match[1], match[2]) if match else (default(text), text)


def _host(url: str) -> str:
    return re.sub(r"^https?://", "", url).rstrip("/").removesuffix("/v1")


def _program(command: str) -> str:
    words = [word for word in command.split() if "=" not in word]
    return Path(words[0]).name if words else command


def _twice(names: Sequence[str]) -> str:
    return next(name for name in names if names.count(name) > 1)
