"""The compiled kernels: segmented strided copies and canonical checksums, on raw memory.

The only module that imports ``hybridrl._C``. Tables are int64 arrays with one row per segment; the kernels check every row
against its buffers and print the values of one that does not fit. ``kernels/tables.hpp`` has the columns.
"""

from __future__ import annotations

import enum
import hashlib
from collections.abc import Sequence
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from hybridrl.errors import ReshardError

try:
    from hybridrl import _C
except ImportError as e:
    raise ReshardError(
        f"the kernels are not built ({e}); run `make setup`, or `pip install -e .` in the environment"
    ) from e

Table = NDArray[np.int64]
Bytes = NDArray[np.uint8]


class Cast(enum.Enum):
    """Conversion during a copy; the value is the kernels' code."""

    NONE = 0
    F32_TO_BF16 = 1
    BF16_TO_F32 = 2


class Side(enum.Enum):
    """Whose memory a checksum reads; the value is the kernels' code."""

    SOURCE = 0
    DESTINATION = 1


class DeviceTensor(Protocol):
    """What ``buffer_table`` reads of a torch tensor."""

    @property
    def nbytes(self) -> int:
        """Size in bytes."""
        ...

    def data_ptr(self) -> int:
        """Return the address of the first byte."""
        ...


Buffer = DeviceTensor | NDArray[np.generic]


def buffer_table(buffers: Sequence[Buffer]) -> Table:
    """Return the [num_buffers, 2] table of addresses and sizes in bytes of contiguous tensors or arrays.

    The caller keeps them alive for as long as the table is used.
    """
    rows = [(b.ctypes.data if isinstance(b, np.ndarray) else b.data_ptr(), b.nbytes) for b in buffers]
    return np.array(rows, dtype=np.int64).reshape(-1, 2)


def tensor_seed(name: str) -> int:
    """Return the checksum seed of a canonical tensor: 63 bits of the BLAKE2b hash of its name."""
    return int.from_bytes(hashlib.blake2b(name.encode(), digest_size=8).digest(), "little") >> 1


def segmented_copy(
    segments: Table,
    sources: Table,
    destinations: Table,
    *,
    cast: Cast = Cast.NONE,
    num_threads: int = 0,
    cuda_stream: int | None = None,
) -> None:
    """Copy rows between strided places.

    Args:
        segments: [num_segments, 8]: src_buffer, src_offset, src_pitch, dst_buffer, dst_offset, dst_pitch, rows, row_bytes;
            offsets, pitches and row_bytes in bytes, row_bytes counted at the source. Destinations must not overlap.
        sources: [num_buffers, 2] from :func:`buffer_table`.
        destinations: Likewise.
        cast: Conversion of each element.
        num_threads: On the CPU; 0 takes every core. Small copies stay on one thread.
        cuda_stream: Handle of the stream to enqueue on when the memory is the current CUDA device's; None copies on the CPU.

    Raises:
        ReshardError: A segment leaves its buffer, destination rows overlap, or CUDA memory is not aligned to its elements; prints
            segment and values.
    """
    try:
        _C.segmented_copy(
            segments, sources, destinations, cast.value, num_threads, cuda_stream is not None, cuda_stream or 0
        )
    except (TypeError, ValueError, RuntimeError) as e:
        raise ReshardError(f"segmented_copy: {e}") from e


def canonical_checksum(
    segments: Table,
    buffers: Table,
    *,
    itemsize: int,
    num_slots: int,
    cast: Cast = Cast.NONE,
    num_threads: int = 0,
    cuda_stream: int | None = None,
) -> NDArray[np.uint64]:
    """Sum mix(seed, canonical index, bits) over elements, modulo 2^64; ``kernels/mix.hpp`` has the function and its analysis.

    Worked example: columns 2:4 of a canonical (3, 4) tensor are rows of 2 elements with index_start 2 and index_pitch 4. Their
    sum and that of columns 0:2 add up to the sum of the whole tensor, wherever the two halves lie.

    Args:
        segments: [num_segments, 9]: buffer, offset, pitch (bytes), rows, row_elements, index_start, index_pitch (canonical
            elements), seed, slot.
        buffers: [num_buffers, 2] from :func:`buffer_table`.
        itemsize: Bytes per element in memory: 1, 2, 4 or 8.
        num_slots: Number of sums.
        cast: F32_TO_BF16 sums the bits that the element has after rounding.
        num_threads: As in :func:`segmented_copy`.
        cuda_stream: As in :func:`segmented_copy`; the call waits for the result.

    Returns:
        [num_slots] uint64.

    Raises:
        ReshardError: A segment leaves its buffer or names an unknown slot; prints segment and values.
    """
    is_cuda = cuda_stream is not None
    try:
        sums: NDArray[np.uint64] = _C.canonical_checksum(
            segments, buffers, itemsize, num_slots, cast.value, num_threads, is_cuda, cuda_stream or 0
        )
    except (TypeError, ValueError, RuntimeError) as e:
        raise ReshardError(f"canonical_checksum: {e}") from e
    return sums


def verified_copy(
    segments: Table,
    sources: Table,
    destinations: Table,
    *,
    side: Side,
    itemsize: int,
    num_slots: int,
    num_threads: int = 0,
) -> NDArray[np.uint64]:
    """Copy rows on the CPU and take the canonical checksum of one side along the way, in the time that memory leaves.

    Every word is copied first and read then, from the memory of `side`: at the source what was sent, at the destination what
    was written there. Equals :func:`segmented_copy` and then :func:`canonical_checksum`.

    Args:
        segments: [num_segments, 12]: the columns of :func:`segmented_copy`, then index_start, index_pitch (canonical elements),
            seed, slot.
        itemsize: Bytes per element: 1, 2, 4 or 8.
        num_slots: Number of sums.

    Returns:
        [num_slots] uint64.

    Raises:
        ReshardError: As :func:`segmented_copy` and :func:`canonical_checksum`.
    """
    try:
        sums: NDArray[np.uint64] = _C.verified_copy(
            segments, sources, destinations, itemsize, num_slots, side.value, num_threads
        )
    except (TypeError, ValueError, RuntimeError) as e:
        raise ReshardError(f"verified_copy: {e}") from e
    return sums


def block_quantize(
    segments: Table,
    sources: Table,
    destinations: Table,
    scales: Table,
    *,
    num_threads: int = 0,
    cuda_stream: int | None = None,
) -> None:
    """Quantise bfloat16 to float8 e4m3 in blocks of 128 x 128; ``kernels/block_quantize.hpp`` has the formula.

    Worked example: a (256, 384) weight gives (256, 384) bytes and a (2, 3) table of scales; ``value = byte * scale``.

    Args:
        segments: [num_segments, 11]: src_buffer, src_offset, src_pitch, dst_buffer, dst_offset, dst_pitch, scale_buffer,
            scale_offset, scale_pitch, rows, row_elements; offsets and pitches in bytes. Each segment begins at a block's corner.
        sources: [num_buffers, 2] from :func:`buffer_table`; likewise `destinations` and `scales` (float32).
        num_threads: As in :func:`segmented_copy`.
        cuda_stream: As in :func:`segmented_copy`; the call waits for the result.

    Raises:
        ReshardError: A segment leaves its buffer, or holds a NaN or infinity; prints segment and values.
    """
    is_cuda = cuda_stream is not None
    try:
        damaged = _C.block_quantize(segments, sources, destinations, scales, num_threads, is_cuda, cuda_stream or 0)
    except (TypeError, ValueError, RuntimeError) as e:
        raise ReshardError(f"block_quantize: {e}") from e
    if damaged >= 0:
        raise ReshardError(f"block_quantize: segment {damaged} holds a NaN or an infinity, which no scale can express")


def load_acquire(address: int) -> int:
    """Read an int64 in shared memory; what its writer wrote before storing it is visible afterwards."""
    value: int = _C.load_acquire(address)
    return value


def store_release(address: int, value: int) -> None:
    """Write an int64 in shared memory after everything written before."""
    _C.store_release(address, value)


def has_cuda() -> bool:
    """Whether the extension was built with its CUDA kernels."""
    return bool(_C.has_cuda)
