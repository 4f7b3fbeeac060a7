"""How large the messages of a plan are: all that a sender must know of what its peers send beside it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from hybridrl.reshard.boxes import IntArray
from hybridrl.reshard.moves import MoveTable


@dataclass(frozen=True, eq=False)
class MessageSizes:
    """One column per message, ordered by destination, then chunk, then source.

    Attributes:
        keys: [3, num_messages] int32: destination, chunk, source.
        num_bytes: [num_messages] int64, payload.
    """

    keys: NDArray[np.int32]
    num_bytes: IntArray

    @classmethod
    def of(cls, moves: MoveTable) -> MessageSizes:
        """Add up what moves put into each message."""
        keys = np.stack([moves.destination, moves.chunk, moves.source])
        messages, message_of = np.unique(keys, axis=1, return_inverse=True)
        num_bytes = np.zeros(messages.shape[1], dtype=np.int64)
        np.add.at(num_bytes, message_of.reshape(-1), moves.num_bytes)
        return cls(messages.astype(np.int32), num_bytes)

    @classmethod
    def concatenate(cls, parts: Sequence[MessageSizes]) -> MessageSizes:
        """Return the messages of all parts, in order."""
        return cls(
            np.concatenate([part.keys for part in parts], axis=1), np.concatenate([part.num_bytes for part in parts])
        )

    def to(self, destinations: IntArray) -> MessageSizes:
        """Return the messages to some destinations."""
        rows = np.isin(self.keys[0], destinations)
        return MessageSizes(self.keys[:, rows], self.num_bytes[rows])

    def __iter__(self) -> Iterator[tuple[tuple[int, int, int], int]]:
        yield from zip(self.keys.T.tolist(), self.num_bytes.tolist(), strict=True)
