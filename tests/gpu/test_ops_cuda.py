"""The CUDA kernels against the CPU kernels, which tests/unit/reshard/test_ops.py holds to slow references."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hybridrl.errors import ReshardError
from hybridrl.reshard.ops import Cast, block_quantize, buffer_table, canonical_checksum, has_cuda, segmented_copy

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not (torch.cuda.is_available() and has_cuda()), reason="needs a CUDA device and the CUDA kernels"
    ),
]

SIZES = {Cast.NONE: (1, 1), Cast.F32_TO_BF16: (4, 2), Cast.BF16_TO_F32: (2, 4)}


def stream():
    return torch.cuda.current_stream().cuda_stream


@settings(max_examples=80, deadline=None)
@given(
    cast=st.sampled_from(list(Cast)),
    rows=st.integers(1, 300),
    elements=st.integers(1, 3000),
    gaps=st.tuples(st.integers(0, 9), st.integers(0, 9)),
    offsets=st.tuples(st.integers(0, 17), st.integers(0, 17)),
)
def test_copy_equals_the_cpu_at_every_alignment(cast, rows, elements, gaps, offsets):
    read, write = SIZES[cast]
    pitches = [elements + gap for gap in gaps]
    source = torch.randint(0, 256, ((offsets[0] + rows * pitches[0]) * read,), dtype=torch.uint8)
    want = torch.full(((offsets[1] + rows * pitches[1]) * write,), 7, dtype=torch.uint8)
    on_device, got = source.cuda(), want.cuda()
    row = [0, offsets[0] * read, pitches[0] * read, 0, offsets[1] * write, pitches[1] * write, rows, elements * read]
    segments = np.array([row])
    segmented_copy(segments, buffer_table([source]), buffer_table([want]), cast=cast)
    segmented_copy(segments, buffer_table([on_device]), buffer_table([got]), cast=cast, cuda_stream=stream())
    assert torch.equal(got.cpu(), want)


@settings(max_examples=80, deadline=None)
@given(
    itemsize=st.sampled_from([1, 2, 4, 8]),
    is_cast=st.booleans(),
    rows=st.integers(1, 200),
    elements=st.integers(1, 3000),
    gap=st.integers(0, 9),
    offset=st.integers(0, 17),
    start=st.integers(0, 10**12),
)
def test_checksum_equals_the_cpu(itemsize, is_cast, rows, elements, gap, offset, start):
    itemsize, cast = (4, Cast.F32_TO_BF16) if is_cast else (itemsize, Cast.NONE)
    pitch = elements + gap
    values = torch.randint(0, 256, ((offset + rows * pitch) * itemsize,), dtype=torch.uint8)
    segments = np.array(
        [[0, offset * itemsize, pitch * itemsize, rows, elements, start, 2 * elements, 7, slot] for slot in (0, 1, 1)]
    )
    settings_ = {"itemsize": itemsize, "num_slots": 2, "cast": cast}
    want = canonical_checksum(segments, buffer_table([values]), **settings_)
    got = canonical_checksum(segments, buffer_table([values.cuda()]), **settings_, cuda_stream=stream())
    assert got.tolist() == want.tolist()


def test_many_segments_of_different_alignment_in_one_launch():
    sources = [torch.randint(0, 256, (100_003,), dtype=torch.uint8) for _ in range(5)]
    want = torch.zeros(500_015, dtype=torch.uint8)
    segments = np.array([[i, i, 1000 + i, 0, i * 100_003, 1000, 99, 1000] for i in range(5)])
    segmented_copy(segments, buffer_table(sources), buffer_table([want]))
    on_device, got = [source.cuda() for source in sources], torch.zeros_like(want, device="cuda")
    segmented_copy(segments, buffer_table(on_device), buffer_table([got]), cuda_stream=stream())
    assert torch.equal(got.cpu(), want)


def test_work_is_ordered_on_the_given_stream():
    source, got = torch.zeros(1 << 24, device="cuda"), torch.zeros(1 << 24, device="cuda")
    torch.cuda.synchronize()
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        source.fill_(3.0)
        segmented_copy(
            np.array([[0, 0, 0, 0, 0, 0, 1, source.nbytes]]),
            buffer_table([source]),
            buffer_table([got]),
            cuda_stream=stream(),
        )
    side.synchronize()
    assert torch.equal(got, source)


@settings(max_examples=40, deadline=None)
@given(rows=st.integers(1, 300), columns=st.integers(1, 600), offset=st.integers(0, 9))
def test_float8_blocks_equal_the_cpu(rows, columns, offset):
    weight = torch.randn(rows, columns + offset).bfloat16()
    shape = (-(-rows // 128), -(-columns // 128))
    row = [0, 2 * offset, 2 * (columns + offset), 0, 0, columns, 0, 0, 4 * shape[1], rows, columns]
    segments = np.array([row])
    want = torch.zeros(rows, columns, dtype=torch.uint8), torch.zeros(shape)
    got = tuple(torch.zeros_like(tensor, device="cuda") for tensor in want)
    block_quantize(segments, *(buffer_table([t]) for t in (weight, *want)))
    on_device = weight.cuda()
    block_quantize(segments, *(buffer_table([t]) for t in (on_device, *got)), cuda_stream=stream())
    assert all(torch.equal(a.cpu(), b) for a, b in zip(got, want, strict=True))


def test_a_float8_block_that_is_not_finite_is_refused():
    weight = torch.ones(256, 256, dtype=torch.bfloat16, device="cuda")
    weight[200, 200] = float("inf")
    out, scales = torch.zeros(256, 256, dtype=torch.uint8, device="cuda"), torch.zeros(2, 2, device="cuda")
    segments = np.array([[0, 0, 512, 0, 0, 256, 0, 0, 8, 256, 256]])
    with pytest.raises(ReshardError, match="segment 0 holds a NaN or an infinity"):
        block_quantize(segments, *(buffer_table([t]) for t in (weight, out, scales)), cuda_stream=stream())
