"""Measures the kernels on the CPU against memcpy of the same bytes, on the same number of threads, in the same run.

Rows of each length are packed out of a tensor twice as wide and unpacked into one, which is what tensor parallelism does to a
weight cut by columns. Buffers are far larger than the caches and are torch's: they start at 64 bytes, as weights do. Rows of
`pack_misaligned` start at 16 bytes past a multiple of 64 at their destination. Every figure is the best of several interleaved repeats. GB/s count
what is read, except for float8: it reads two bytes and writes one, and counts as if it copied half of their sum.
"""

from __future__ import annotations

import argparse
import ctypes
import itertools
import json
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from rich.console import Console
from rich.progress import track
from rich.table import Table

from hybridrl.reshard.ops import (
    Cast,
    Side,
    block_quantize,
    buffer_table,
    canonical_checksum,
    segmented_copy,
    verified_copy,
)

ROW_BYTES = (128, 384, 1024, 4096, 65536)
TORCH_LOOP_BYTES = 4 << 20
FLOAT8_TARGET = 0.5
TARGETS = {128: 0.4, 384: 0.6, 1024: 0.85, 4096: 0.85, 65536: 0.85}
Run = Callable[[], object]


@dataclass(frozen=True, slots=True)
class Case:
    """One kernel call to time; memcpy reads and writes as much as it does when it copies `num_bytes`."""

    op: str
    row_bytes: int
    num_bytes: int
    run: Run


@dataclass(frozen=True, slots=True)
class Result:
    """What one case reached."""

    op: str
    row_bytes: int
    num_threads: int
    gb_per_s: float
    ratio_to_memcpy: float


@dataclass(frozen=True, slots=True)
class Memory:
    """A packed buffer and one of twice its size, both touched."""

    packed: NDArray[np.uint8]
    wide: NDArray[np.uint8]

    @staticmethod
    def allocate(num_bytes: int) -> Memory:
        """Fill both with floats that are neither NaN nor denormal, in memory of torch: tensors start at 64 bytes."""
        packed, wide = (torch.rand(size // 4).numpy().view(np.uint8) for size in (num_bytes, 2 * num_bytes))
        return Memory(packed, wide)


def copy_cases(memory: Memory, num_threads: int) -> list[Case]:
    packed, wide = buffer_table([memory.packed]), buffer_table([memory.wide])
    cases = []
    for row in ROW_BYTES:
        rows = memory.packed.nbytes // row
        pack = np.array([[0, 0, 2 * row, 0, 0, row, rows, row]])
        unpack = np.array([[0, 0, row, 0, 0, 2 * row, rows, row]])
        cases += [
            Case("pack", row, rows * row, lambda s=pack: segmented_copy(s, wide, packed, num_threads=num_threads)),
            Case("unpack", row, rows * row, lambda s=unpack: segmented_copy(s, packed, wide, num_threads=num_threads)),
        ]
    for row in (384, 1024):
        rows = memory.packed.nbytes // row - 1
        shifted = np.array([[0, 0, 2 * row, 0, 16, row, rows, row]])
        run = lambda s=shifted: segmented_copy(s, wide, packed, num_threads=num_threads)  # noqa: E731
        cases.append(Case("pack_misaligned", row, rows * row, run))
    return cases


def cast_cases(memory: Memory, num_threads: int) -> list[Case]:
    packed, wide, size, row = buffer_table([memory.packed]), buffer_table([memory.wide]), memory.packed.nbytes, 4096
    cases = []
    for cast, out_row in ((Cast.F32_TO_BF16, row // 2), (Cast.BF16_TO_F32, row * 2)):
        segment = np.array([[0, 0, row, 0, 0, out_row, size // row, row]])
        run = lambda s=segment, c=cast: segmented_copy(s, packed, wide, cast=c, num_threads=num_threads)  # noqa: E731
        cases.append(Case(cast.name.lower(), row, size, run))
    return cases


def checksum_cases(memory: Memory, num_threads: int) -> list[Case]:
    packed, size, row = buffer_table([memory.packed]), memory.packed.nbytes, 4096
    cases = []
    for name, itemsize, cast in (("f32", 4, Cast.NONE), ("bf16", 2, Cast.NONE), ("f32_to_bf16", 4, Cast.F32_TO_BF16)):
        elements = row // itemsize
        segment = np.array([[0, 0, row, size // row, elements, 0, 2 * elements, 1, 0]])
        run = lambda s=segment, i=itemsize, c=cast: canonical_checksum(  # noqa: E731
            s, packed, itemsize=i, num_slots=1, cast=c, num_threads=num_threads
        )
        cases.append(Case(f"checksum_{name}", row, size, run))
    return cases


def verified_cases(memory: Memory, num_threads: int) -> list[Case]:
    """Pack and take the checksum of the source along the way."""
    packed, wide = buffer_table([memory.packed]), buffer_table([memory.wide])
    cases = []
    for row in (384, 4096):
        rows = memory.packed.nbytes // row
        segment = np.array([[0, 0, 2 * row, 0, 0, row, rows, row, 0, row, 1, 0]])
        run = lambda s=segment: verified_copy(  # noqa: E731
            s, wide, packed, side=Side.SOURCE, itemsize=2, num_slots=1, num_threads=num_threads
        )
        cases.append(Case("pack_and_checksum", row, rows * row, run))
    return cases


def float8_cases(memory: Memory, num_threads: int) -> list[Case]:
    """Quantise a bfloat16 weight of 4096 columns."""
    columns = 4096
    rows = memory.packed.nbytes // (2 * columns)
    values = np.full(rows * columns, 0x3F80, dtype=np.uint16)
    scales = np.zeros(rows // 128 * columns // 128, dtype=np.float32)
    segment = np.array([[0, 0, 2 * columns, 0, 0, columns, 0, 0, columns // 32, rows, columns]])
    tables = [buffer_table([array]) for array in (values, memory.packed, scales)]
    kept = (values, scales)
    run = lambda: (block_quantize(segment, *tables, num_threads=num_threads), kept)  # noqa: E731
    return [Case("bf16_to_f8_blocks", 2 * columns, 3 * rows * columns // 2, run)]


def torch_loop(memory: Memory, row: int, num_bytes: int) -> Case:
    """Copy row by row, as code without a kernel does; on part of the memory, it is slow."""
    rows = num_bytes // row
    source = torch.from_numpy(memory.wide)[: 2 * rows * row].view(rows, 2 * row)
    target = torch.from_numpy(memory.packed)[: rows * row].view(rows, row)

    def run() -> None:
        for i in range(rows):
            target[i].copy_(source[i, :row])

    return Case("torch_loop", row, rows * row, run)


def memcpy_run(memory: Memory, pool: ThreadPoolExecutor, num_threads: int) -> Run:
    """Return a call that copies the packed buffer with libc's memcpy, cut evenly over the threads."""
    memcpy = ctypes.CDLL(None).memcpy
    memcpy.argtypes, memcpy.restype = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t), ctypes.c_void_p
    to, start, size = memory.wide.ctypes.data, memory.packed.ctypes.data, memory.packed.nbytes
    cuts = [size * i // num_threads for i in range(num_threads + 1)]
    parts = [(to + a, start + a, b - a) for a, b in itertools.pairwise(cuts)]
    if num_threads == 1:
        return lambda: memcpy(*parts[0])
    return lambda: list(pool.map(lambda part: memcpy(*part), parts))


def seconds(run: Run) -> float:
    start = time.perf_counter()
    run()
    return time.perf_counter() - start


def measure(cases: list[Case], memcpy: Run, num_bytes: int, num_threads: int, repeats: int) -> list[Result]:
    """Time every case beside memcpy, so that both meet the same state of the machine."""
    results = []
    for case in track(cases, description=f"{num_threads} thread(s)", transient=True, console=Console(stderr=True)):
        times = [(seconds(memcpy), seconds(case.run)) for _ in range(repeats)]
        base, own = (min(column) for column in zip(*times, strict=True))
        speed = case.num_bytes / own
        results.append(
            Result(case.op, case.row_bytes, num_threads, round(speed / 1e9, 2), round(speed * base / num_bytes, 2))
        )
    return results


def show(results: list[Result]) -> None:
    table = Table("op", "row_bytes", "threads", "GB/s", "of memcpy", "target", title="Kernels on the CPU")
    for r in results:
        target = TARGETS[r.row_bytes] if r.op in ("pack", "unpack") else FLOAT8_TARGET if "f8" in r.op else None
        mark = "" if target is None else f"{target} {'met' if r.ratio_to_memcpy >= target else 'MISSED'}"
        table.add_row(r.op, str(r.row_bytes), str(r.num_threads), f"{r.gb_per_s:.2f}", f"{r.ratio_to_memcpy:.2f}", mark)
    Console().print(table)
    speed = {(r.op, r.row_bytes): r.gb_per_s for r in results if r.num_threads == 1}
    if ("torch_loop", 384) in speed:
        times = speed["pack", 384] / speed["torch_loop", 384]
        print(f"packing rows of 384 bytes is {times:.0f} times as fast as a loop of torch copies (target 10)")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true", help="print one JSON object on the last line")
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2], help="thread counts to measure")
    parser.add_argument("--megabytes", type=int, default=128, help="bytes per copy; three times that is allocated")
    parser.add_argument("--repeats", type=int, default=9)
    options = parser.parse_args()
    memory = Memory.allocate(options.megabytes << 20)
    results: list[Result] = []
    for num_threads in options.threads:
        builders = (copy_cases, cast_cases, checksum_cases, verified_cases, float8_cases)
        cases = [case for build in builders for case in build(memory, num_threads)]
        if num_threads == 1:
            cases.append(torch_loop(memory, 384, TORCH_LOOP_BYTES))
        with ThreadPoolExecutor(num_threads) as pool:
            memcpy = memcpy_run(memory, pool, num_threads)
            results += measure(cases, memcpy, memory.packed.nbytes, num_threads, options.repeats)
    show(results)
    if options.json:
        print(json.dumps({"results": [asdict(result) for result in results]}))


if __name__ == "__main__":
    main()
