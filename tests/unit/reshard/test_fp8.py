"""Block quantisation equals the torch reference bit for bit, and cuts through blocks are refused."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hybridrl.errors import ReshardError
from hybridrl.layout.box import Box
from hybridrl.reshard.fp8 import scale_box, scale_shape
from hybridrl.reshard.ops import block_quantize, buffer_table


def reference(weight):
    """Return (bytes, scales) by plain torch."""
    rows, columns = weight.shape
    scales = torch.empty(scale_shape(weight.shape))
    out = torch.empty(rows, columns, dtype=torch.float8_e4m3fn)
    for i in range(scales.shape[0]):
        for j in range(scales.shape[1]):
            at = (slice(i * 128, i * 128 + 128), slice(j * 128, j * 128 + 128))
            block = weight[at].float()
            most = block.abs().amax().clamp(min=1e-30)
            out[at] = (block * (torch.tensor(448.0) / most)).to(torch.float8_e4m3fn)
            scales[i, j] = most / 448
    return out.view(torch.uint8), scales


def quantize(weight, num_threads=1):
    rows, columns = weight.shape
    out, scales = torch.zeros(rows, columns, dtype=torch.uint8), torch.zeros(scale_shape(weight.shape))
    segment = [0, 0, 2 * columns, 0, 0, columns, 0, 0, 4 * scales.shape[1], rows, columns]
    tables = [buffer_table([tensor]) for tensor in (weight, out, scales)]
    block_quantize(np.array([segment]), *tables, num_threads=num_threads)
    return out, scales


def equal(weight, **options):
    return all(torch.equal(a, b) for a, b in zip(quantize(weight, **options), reference(weight), strict=True))


@settings(max_examples=30, deadline=None)
@given(rows=st.integers(1, 300), columns=st.integers(1, 300), exponent=st.integers(-30, 30), threads=st.integers(1, 3))
def test_quantisation_equals_the_reference(rows, columns, exponent, threads):
    generator = torch.Generator().manual_seed(rows * 301 + columns)
    assert equal((torch.randn(rows, columns, generator=generator) * 2.0**exponent).bfloat16(), num_threads=threads)


def test_every_finite_bfloat16_is_rounded_as_torch_does():
    values = torch.arange(2**16, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)
    values = values[values.isfinite()]
    for most in (448.0, 100.0, 3.0, 1e-3):
        inside = values[values.abs() <= most]
        inside = torch.cat([inside, torch.zeros(-inside.numel() % 127, dtype=torch.bfloat16)]).view(-1, 127)
        weight = torch.cat([inside, torch.full((inside.shape[0], 1), most, dtype=torch.bfloat16)], dim=1)
        assert equal(weight)


@pytest.mark.parametrize("fill", [0.0, -0.0, 1e-40, -1e-38, 3e38, 448.0, 2.0**-9])
def test_blocks_of_one_value(fill):
    assert equal(torch.full((130, 257), fill, dtype=torch.bfloat16))


def test_quantised_values_are_near_the_weights():
    weight = torch.randn(256, 256).bfloat16()
    out, scales = quantize(weight)
    got = out.view(torch.float8_e4m3fn).float() * scales.repeat_interleave(128, 0).repeat_interleave(128, 1)
    most = weight.float().abs().amax()
    assert (got - weight.float()).abs().max() <= most / 448 * 16.001  # half a step of the largest binade


def test_a_strided_shard_gives_its_part_of_the_whole():
    weight = torch.randn(256, 512).bfloat16()
    want, want_scales = reference(weight)
    out, scales = torch.zeros(256, 256, dtype=torch.uint8), torch.zeros(2, 2)
    segment = [0, 2 * 256, 2 * 512, 0, 0, 256, 0, 0, 8, 256, 256]
    block_quantize(np.array([segment]), *(buffer_table([t]) for t in (weight, out, scales)))
    assert torch.equal(out, want[:, 256:])
    assert torch.equal(scales, want_scales[:, 2:])


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_a_block_that_is_not_finite_is_refused(bad):
    weight = torch.ones(200, 200, dtype=torch.bfloat16)
    weight[150, 3] = bad
    with pytest.raises(ReshardError, match="block_quantize: segment 0 holds a NaN or an infinity"):
        quantize(weight)


def test_scales_without_room_are_named():
    tables = [buffer_table([np.zeros(n, np.uint8)]) for n in (2 * 129 * 8, 129 * 8, 4)]
    with pytest.raises(ReshardError, match=r"segment 0: scale buffer 0 of 1 \(4 bytes\)"):
        block_quantize(np.array([[0, 0, 16, 0, 0, 8, 0, 0, 4, 129, 8]]), *tables)


def test_scales_of_a_box():
    assert scale_box("w", (512, 300), Box((128, 0), (256, 300))) == Box((1, 0), (2, 3))
    assert scale_box("w", (512, 300), Box((0, 256), (512, 300))) == Box((0, 2), (4, 3))


def test_a_cut_block_names_the_degrees_that_would_not():
    with pytest.raises(
        ReshardError,
        match=r"w \[0:192, 0:256\] of \(768, 256\): rows are cut at 192, inside a float8 block of 128 x 128; "
        r"a tensor-parallel degree of 1, 2, 3, 6 cuts no block",
    ):
        scale_box("w", (768, 256), Box((0, 0), (192, 256)))
    with pytest.raises(ReshardError, match=r"columns are cut at 50.*no even cut of 100 leaves blocks whole"):
        scale_box("w", (128, 100), Box((0, 0), (128, 50)))
