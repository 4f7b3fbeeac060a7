"""Types of the compiled extension; ``kernels/bindings.cpp`` defines it and ``reshard/ops.py`` documents it."""

import numpy as np
from numpy.typing import NDArray

has_cuda: bool

def segmented_copy(
    segments: NDArray[np.int64],
    sources: NDArray[np.int64],
    destinations: NDArray[np.int64],
    cast_code: int,
    num_threads: int,
    on_cuda: bool,
    stream: int,
) -> None: ...
def canonical_checksum(
    segments: NDArray[np.int64],
    buffers: NDArray[np.int64],
    itemsize: int,
    num_slots: int,
    cast_code: int,
    num_threads: int,
    on_cuda: bool,
    stream: int,
) -> NDArray[np.uint64]: ...
def verified_copy(
    segments: NDArray[np.int64],
    sources: NDArray[np.int64],
    destinations: NDArray[np.int64],
    itemsize: int,
    num_slots: int,
    side_code: int,
    num_threads: int,
) -> NDArray[np.uint64]: ...
def block_quantize(
    segments: NDArray[np.int64],
    sources: NDArray[np.int64],
    destinations: NDArray[np.int64],
    scales: NDArray[np.int64],
    num_threads: int,
    on_cuda: bool,
    stream: int,
) -> int: ...
def load_acquire(address: int) -> int: ...
def store_release(address: int, value: int) -> None: ...
