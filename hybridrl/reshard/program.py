"""Compiled copies between buffers, with the canonical checksum of one of the two sides.

Compiled once per connection; a run only binds addresses. On the CPU the checksum is taken while copying, except where the copy
converts, and on a device by a kernel of its own while the data is in the device's cache. In each case it reads the tensors of
its side, never the message.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property

import numpy as np
import torch

from hybridrl.layout.shard import CanonicalTensor
from hybridrl.reshard import ops
from hybridrl.reshard.clock import Clock
from hybridrl.reshard.plan import Move
from hybridrl.reshard.segments import (
    ChecksumTable,
    Copy,
    Piece,
    Table,
    cast_between,
    checksum_tables,
    copy_tables,
    verified_tables,
)


class CopyProgram:
    """Copies of moves, and what to sum of them.

    Args:
        copies: Each move with the place of its elements in the two lists of buffers that a run binds.
        side: Whose tensors the checksum reads; None takes none.
        buffers: Local name -> index into that side's buffers.
        sums_only: Leave the copies to somebody else.
    """

    def __init__(
        self,
        copies: Sequence[tuple[Move, Copy]],
        canonical: Mapping[str, CanonicalTensor],
        side: ops.Side | None,
        buffers: Mapping[str, int],
        *,
        sums_only: bool = False,
    ) -> None:
        self.tensors = () if side is None else tuple(dict.fromkeys(move.tensor for move, _ in copies))
        slots = {tensor: slot for slot, tensor in enumerate(self.tensors)}
        self._side = side or ops.Side.SOURCE
        is_plain = [side is None or sums_only or _converts(move, copy) for move, copy in copies]
        plain = [item for item, flag in zip(copies, is_plain, strict=True) if flag]
        verified = [item for item, flag in zip(copies, is_plain, strict=True) if not flag]
        self._plain = [] if sums_only else copy_tables([(move.tensor, copy) for move, copy in plain])
        self._verified = verified_tables([(Piece.of(move, canonical, slots), copy) for move, copy in verified])
        self._sums: list[ChecksumTable] = []
        if side is not None:
            moves = [move for move, _ in plain]
            self._sums = checksum_tables(moves, buffers, slots, canonical, is_source=side is ops.Side.SOURCE)

    def run(self, sources: Sequence[torch.Tensor], destinations: Sequence[torch.Tensor], clock: Clock) -> list[int]:
        """Copy, and return the checksum of each of `tensors`."""
        device = sources[0].device
        read, write = ops.buffer_table(sources), ops.buffer_table(destinations)
        if device.type == "cuda":
            return self._run_cuda(read, write, torch.cuda.current_stream(device).cuda_stream, clock)
        threads = torch.get_num_threads()
        sums = np.zeros(len(self.tensors), dtype=np.uint64)
        with clock.time("copy"):
            for cast, table in self._plain:
                ops.segmented_copy(table, read, write, cast=cast, num_threads=threads)
            for itemsize, table in self._verified:
                sums += ops.verified_copy(
                    table,
                    read,
                    write,
                    side=self._side,
                    itemsize=itemsize,
                    num_slots=len(self.tensors),
                    num_threads=threads,
                )
        return self._add_sums(sums, self._sums, read, write, None, clock)

    def _run_cuda(self, read: Table, write: Table, stream: int, clock: Clock) -> list[int]:
        with clock.time("copy"):
            for cast, table in [*self._plain, *self._device_copies]:
                ops.segmented_copy(table, read, write, cast=cast, cuda_stream=stream)
        sums = np.zeros(len(self.tensors), dtype=np.uint64)
        return self._add_sums(sums, [*self._sums, *self._device_sums], read, write, stream, clock)

    def _add_sums(
        self,
        sums: np.ndarray[tuple[int], np.dtype[np.uint64]],
        tables: Sequence[ChecksumTable],
        read: Table,
        write: Table,
        stream: int | None,
        clock: Clock,
    ) -> list[int]:
        own = read if self._side is ops.Side.SOURCE else write
        with clock.time("checksum"):
            for part in tables:
                sums += ops.canonical_checksum(
                    part.table,
                    own,
                    itemsize=part.itemsize,
                    num_slots=len(self.tensors),
                    cast=part.cast,
                    num_threads=torch.get_num_threads(),
                    cuda_stream=stream,
                )
        values: list[int] = sums.tolist()
        return values

    @cached_property
    def _device_copies(self) -> list[tuple[ops.Cast, Table]]:
        return [(ops.Cast.NONE, np.ascontiguousarray(table[:, :8])) for _, table in self._verified]

    @cached_property
    def _device_sums(self) -> list[ChecksumTable]:
        first = 0 if self._side is ops.Side.SOURCE else 3
        columns = [first, first + 1, first + 2, 6, 7, 8, 9, 10, 11]
        tables = []
        for itemsize, table in self._verified:
            rows = np.ascontiguousarray(table[:, columns])
            rows[:, 4] //= itemsize
            tables.append(ChecksumTable(rows, itemsize, ops.Cast.NONE))
        return tables


def _converts(move: Move, copy: Copy) -> bool:
    return cast_between(copy.read.dtype, copy.write.dtype, move.tensor) is not ops.Cast.NONE
