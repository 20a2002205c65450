"""Sampling options of running requests, by slot, in device buffers at fixed addresses.

A request's numbers are one row, so that one operation gathers those of a batch. Options with a value per token of the
vocabulary are rows of tables, allocated when a request first uses one: `bias`, `counts` (occurrences of each token in
the output) and `marks` (prompt tokens, stop tokens).

Rows of `counts` and `marks` may hold data of a slot's previous request if the current one does not use them. Rows of
`bias` may not, because they are added to everyone's logits.

Shapes: S slots and a dummy slot for padding, V vocabulary, R rows of a batch, Q tokens of each, M written rows, L
tokens in them.
"""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from math import log

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from eyas.engine.request import SequenceState
from eyas.sampling import IMPOSSIBLE

_INTEGERS = ("seed", "top_k", "greedy", "shortest")
_REALS = ("temperature", "top_p", "least", "repetition", "frequency", "presence")
_NEUTRAL = dict(zip((*_INTEGERS, *_REALS), (0, 0, 1, 0, 1.0, 2.0, IMPOSSIBLE, 1.0, 0.0, 0.0), strict=True))
_WIDTH = len(_INTEGERS) + len(_REALS) // 2  # two float32 are as wide as one int64
_TABLES = {"bias": torch.float32, "counts": torch.int32, "marks": torch.uint8}
IN_PROMPT, IS_STOP = 1, 2
"""Bits of `marks`."""

Send = Callable[[], None]
"""Queues copies to the device."""


class SlotNumbers:
    """Numbers of some rows, by name. Unused options have neutral values.

    seed            seed of the request's noise
    top_k           0 keeps all tokens
    greedy          1 to take the largest logit
    shortest        first position at which a stop token may come
    temperature     1 for greedy requests
    top_p           above 1 keeps all tokens
    least           log min_p; minus infinity keeps all tokens
    repetition, frequency, presence: the penalties
    """

    def __init__(self, packed_RX: Tensor) -> None:
        self._integers = packed_RX[..., : len(_INTEGERS)]
        self._reals = packed_RX[..., len(_INTEGERS) :].view(torch.float32)

    def __getitem__(self, name: str) -> Tensor:
        """One number per row [R, 1]."""
        names, columns = (_INTEGERS, self._integers) if name in _INTEGERS else (_REALS, self._reals)
        return columns.narrow(-1, names.index(name), 1)


@dataclass(eq=False)
class _TableRows:
    """New contents of table rows: one value everywhere, and others at some tokens."""

    slots: list[int] = field(default_factory=list)
    elsewhere: list[float] = field(default_factory=list)
    places: list[int] = field(default_factory=list)
    """Flat indices of those tokens in the table."""
    there: list[float] = field(default_factory=list)

    def write(self, slot: int, vocab_size: int, there: Mapping[int, float], *, elsewhere: float = 0) -> None:
        """Set a slot's row to these values at these tokens, and another value elsewhere.

        Stop tokens outside of the vocabulary are ignored; they never come.
        """
        there = {token: value for token, value in there.items() if token < vocab_size}
        self.slots.append(slot)
        self.elsewhere.append(elsewhere)
        self.places += [slot * vocab_size + token for token in there]
        self.there += there.values()


class SlotTables:
    """Stores the options of slots on the device."""

    def __init__(self, slots: int, vocab_size: int, device: torch.device) -> None:
        self._rows, self._vocab_size, self._device = slots + 1, vocab_size, device
        self._packed_SX = torch.from_numpy(_pack([_NEUTRAL] * self._rows)).to(device)
        self._tables: dict[str, Tensor] = {}
        self._biased: set[int] = set()
        """Slots whose `bias` row is not all zeros."""

    def numbers(self, slot_R: Tensor) -> SlotNumbers:
        return SlotNumbers(self._packed_SX.index_select(0, slot_R))

    def rows(self, name: str, slot_R: Tensor) -> Tensor:
        return self._tables[name].index_select(0, slot_R)

    def count(self, slot_R: Tensor, token_RQ: Tensor, new_RQ: Tensor) -> None:
        """Add tokens to the output counts where `new` is true."""
        place_RQ = slot_R[:, None] * self._vocab_size + token_RQ
        self._tables["counts"].view(-1).scatter_add_(0, place_RQ.flatten(), new_RQ.to(torch.int32).flatten())

    def admit(self, slots: Sequence[int], seqs: Sequence[SequenceState]) -> Send:
        """Read the options of these requests; calling the result writes them to the slots."""
        tables = {name: _TableRows() for name in _TABLES}
        for slot, seq in zip(slots, seqs, strict=True):
            self._write_bias(tables["bias"], slot, seq)
            if seq.request.sampling.penalises:
                tables["counts"].write(slot, self._vocab_size, Counter(seq.tokens[seq.prompt_length :]))
            if marks := _marks(seq):
                tables["marks"].write(slot, self._vocab_size, marks)
        sends = [self._sender(name, rows) for name, rows in tables.items() if rows.slots]
        slot_M = self._pin(torch.tensor(slots, dtype=torch.int64))
        packed_MX = self._pin(torch.from_numpy(_pack([_numbers(seq) for seq in seqs])))

        def send() -> None:
            self._packed_SX.index_copy_(0, self._to_device(slot_M), self._to_device(packed_MX))
            for one in sends:
                one()

        return send

    def _write_bias(self, rows: _TableRows, slot: int, seq: SequenceState) -> None:
        sampling = seq.request.sampling
        allowed = sampling.allowed_tokens
        bias = dict.fromkeys(allowed or (), 0.0)
        bias |= {token: value for token, value in sampling.bias_pairs if allowed is None or token in allowed}
        bias |= {word[0]: IMPOSSIBLE for word in seq.request.bad_words if len(word) == 1}
        if bias or slot in self._biased:
            rows.write(slot, self._vocab_size, bias, elsewhere=0.0 if allowed is None else IMPOSSIBLE)
        (self._biased.add if bias else self._biased.discard)(slot)

    def _sender(self, name: str, rows: _TableRows) -> Send:
        dtype = _TABLES[name]
        slot_M = self._pin(torch.tensor(rows.slots, dtype=torch.int64))
        elsewhere_M = self._pin(torch.tensor(rows.elsewhere, dtype=dtype))
        place_L = self._pin(torch.tensor(rows.places, dtype=torch.int64))
        there_L = self._pin(torch.tensor(rows.there, dtype=dtype))

        def send() -> None:
            table = self._tables.get(name)
            if table is None:
                table = torch.zeros(self._rows, self._vocab_size, dtype=dtype, device=self._device)
                self._tables[name] = table
            elsewhere_MV = self._to_device(elsewhere_M)[:, None].expand(-1, self._vocab_size)
            table.index_copy_(0, self._to_device(slot_M), elsewhere_MV)
            table.view(-1).index_copy_(0, self._to_device(place_L), self._to_device(there_L))

        return send

    def _pin(self, tensor: Tensor) -> Tensor:
        return tensor.pin_memory() if self._device.type == "cuda" else tensor

    def _to_device(self, tensor: Tensor) -> Tensor:
        return tensor.to(self._device, non_blocking=True)


def _numbers(seq: SequenceState) -> dict[str, float]:
    request, sampling = seq.request, seq.request.sampling
    numbers = _NEUTRAL | {
        "seed": request.seed,
        # Without stop tokens, `marks` may hold those of the slot's previous request.
        "shortest": seq.prompt_length + request.min_new_tokens if request.stop_ids else 0,
        "repetition": sampling.repetition_penalty,
        "frequency": sampling.frequency_penalty,
        "presence": sampling.presence_penalty,
    }
    if sampling.temperature:
        numbers |= {"greedy": 0, "temperature": sampling.temperature, "top_k": sampling.top_k}
        if sampling.top_p < 1:
            numbers["top_p"] = sampling.top_p
        if sampling.min_p > 0:
            numbers["least"] = log(sampling.min_p)
    return numbers


def _pack(rows: Sequence[Mapping[str, float]]) -> NDArray[np.int64]:
    """Pack numbers as integers and pairs of float32 [M, X], as `SlotNumbers` reads them."""
    packed = np.zeros((len(rows), _WIDTH), dtype=np.int64)
    packed[:, : len(_INTEGERS)] = [[row[name] for name in _INTEGERS] for row in rows]
    packed.view(np.float32)[:, 2 * len(_INTEGERS) :] = [[row[name] for name in _REALS] for row in rows]
    return packed


def _marks(seq: SequenceState) -> dict[int, int]:
    """Marks of tokens that the request's options need."""
    request = seq.request
    marks = dict.fromkeys(request.prompt, IN_PROMPT) if request.sampling.penalises else {}
    for token in request.stop_ids if seq.new_tokens < request.min_new_tokens else ():
        marks[token] = marks.get(token, 0) | IS_STOP
    return marks
