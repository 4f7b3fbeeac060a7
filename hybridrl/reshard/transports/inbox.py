"""Where the messages of one destination lie: two halves, each with room for one chunk from all of its sources.

Steps count the chunks of all transfers that this transport carries. In shared memory step s lies in half s % 2, and a source may
write it once the destination is done with step s - 2. Sources compute the same layout from the plan, so nobody asks anybody for an address, and a
destination holds two chunks of staging however many sources it has.

Worked example: chunk 0 has 100 bytes from source 0 and 30 from source 2. Each message begins with a header of 64 bytes and on a
multiple of 64: source 0 at 0, source 2 at 192, and the half has 320 bytes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import torch

from hybridrl.errors import ReshardError
from hybridrl.reshard.sizes import MessageSizes
from hybridrl.reshard.transports import Endpoint, Label

HEADER_BYTES = 64
_ALIGNMENT = 64


@dataclass(frozen=True, slots=True)
class Inbox:
    """Layout of one destination's messages.

    Attributes:
        steps: Chunk -> its number among the chunks that this transport carries.
        offsets: (chunk, sender) -> first byte in the half.
        sizes: (chunk, sender) -> bytes of header and payload.
        half_bytes: Size of a half.
        senders: Ranks that send at all, in order.
    """

    steps: Mapping[int, int]
    offsets: Mapping[tuple[int, int], int]
    sizes: Mapping[tuple[int, int], int]
    half_bytes: int
    senders: tuple[int, ...]

    def slot(self, memory: torch.Tensor, half: int, chunk: int, sender: int) -> torch.Tensor:
        """Return the header and payload of one message inside one of the two halves."""
        start = half * self.half_bytes + self.offsets[chunk, sender]
        return memory[start : start + self.sizes[chunk, sender]]

    def step(self, run: int, chunk: int) -> int:
        """Number the chunks of all transfers through."""
        return run * len(self.steps) + self.steps[chunk]


def inboxes(endpoint: Endpoint) -> dict[int, Inbox]:
    """Return the inboxes that one rank has to do with, by destination: those that it sends to, and its own.

    Raises:
        ReshardError: When the plan is a source's part without sizes, which does not say what lies beside its messages.
    """
    plan, moves, me = endpoint.plan, endpoint.plan.sent, endpoint.sender
    own = -1 if endpoint.is_source else endpoint.index
    mine = np.union1d(moves.destination[moves.source == me], [own])
    sizes: dict[int, dict[tuple[int, int], int]] = {}
    messages = plan.sizes or MessageSizes.of(moves.take(np.isin(moves.destination, mine)))
    for (to, chunk, sender), num_bytes in messages:
        if plan.sizes is None and not plan.chunks[to]:
            raise ReshardError(
                f"{endpoint.place}: the plan holds only a part of what {plan.destinations[to]} receives; "
                "open transports with the whole plan, or with a part that has the sizes of its neighbours (parts.py)"
            )
        if endpoint.carries(sender, to):
            sizes.setdefault(to, {})[chunk, sender] = HEADER_BYTES + num_bytes
    sizes = {to: found for to, found in sizes.items() if to == own or any(sender == me for _, sender in found)}
    return {to: _inbox(found) for to, found in sizes.items()}


def write_header(slot: torch.Tensor, label: Label) -> None:
    """Put a label in front of a message."""
    slot[:24].view(torch.int64).copy_(torch.tensor([label.version, label.chunk, label.num_bytes]))


def read_header(slot: torch.Tensor) -> Label:
    """Return the label in front of a message."""
    return Label(*slot[:24].view(torch.int64).tolist())


def payload(slot: torch.Tensor, label: Label) -> torch.Tensor:
    """Return the bytes after the header."""
    return slot[HEADER_BYTES : HEADER_BYTES + label.num_bytes]


def _inbox(sizes: Mapping[tuple[int, int], int]) -> Inbox:
    chunks = sorted({chunk for chunk, _ in sizes})
    offsets: dict[tuple[int, int], int] = {}
    filled = dict.fromkeys(chunks, 0)
    for chunk, sender in sorted(sizes):
        offsets[chunk, sender] = filled[chunk]
        filled[chunk] += -(-sizes[chunk, sender] // _ALIGNMENT) * _ALIGNMENT
    return Inbox(
        steps={chunk: step for step, chunk in enumerate(chunks)},
        offsets=offsets,
        sizes=sizes,
        half_bytes=max(filled.values(), default=0),
        senders=tuple(sorted({sender for _, sender in sizes})),
    )
