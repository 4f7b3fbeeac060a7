"""The local layers against torch's own norm and a written-out attention."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F

from hybridrl.engines.megatron.layers import CausalAttention, RmsNorm
from hybridrl.engines.megatron.packing import packed_sequences


def config(dtype=torch.float32, is_sequence_parallel=False, head_dim=8, window=None, softmax_type="vanilla"):
    return SimpleNamespace(
        params_dtype=dtype,
        use_cpu_initialization=True,
        sequence_parallel=is_sequence_parallel,
        kv_channels=head_dim,
        num_attention_heads=4,
        window_size=window and (window - 1, 0),
        window_attn_skip_freq=[0, 1],
        softmax_type=softmax_type,
        context_parallel_size=1,
    )


def run(function, *inputs):
    leaves = [value.clone().requires_grad_() for value in inputs]
    output = function(*leaves)
    generator = torch.Generator().manual_seed(9)
    output.backward(torch.randn(output.shape, generator=generator).to(output.dtype))
    return [output.detach(), *(leaf.grad for leaf in leaves)]


@pytest.mark.parametrize("shape", [(5, 3, 16), (7, 2, 4, 8)])
def test_rms_norm_and_its_gradients_equal_torch(shape):
    torch.manual_seed(0)
    hidden, weight = torch.randn(shape) * 3, torch.randn(shape[-1])
    norm = RmsNorm(config(), shape[-1], eps=1e-5)

    def ours(x, w):
        return torch.func.functional_call(norm, {"weight": w}, (x,))

    want = run(lambda x, w: F.rms_norm(x, w.shape, w, 1e-5), hidden.double(), weight.double())
    for a, b in zip(run(ours, hidden, weight), want, strict=True):
        torch.testing.assert_close(a.double(), b, rtol=1e-5, atol=1e-5)


def test_rms_norm_keeps_bfloat16_and_computes_in_float32():
    hidden = (torch.randn(64, 32) * 2).bfloat16()
    norm = RmsNorm(config(torch.bfloat16), 32)
    exact = F.rms_norm(hidden.double(), (32,), None, 1e-5)
    assert norm(hidden).dtype == torch.bfloat16
    torch.testing.assert_close(norm(hidden), exact.bfloat16(), rtol=8e-3, atol=0)  # one rounding to bfloat16


@pytest.mark.parametrize("is_sequence_parallel", [True, False])
def test_the_norm_asks_for_its_gradient_to_be_summed_over_tp_ranks(is_sequence_parallel):
    assert (
        RmsNorm(config(is_sequence_parallel=is_sequence_parallel), 8).weight.sequence_parallel is is_sequence_parallel
    )


LENGTHS = (5, 1, 12, 11, 3)


@pytest.mark.parametrize(("kv_heads", "value_dim"), [(4, 8), (2, 8), (1, 8), (4, 6)])
def test_attention_is_causal_within_each_packed_sequence(kv_heads, value_dim):
    torch.manual_seed(0)
    tokens = sum(LENGTHS)
    query, key = torch.randn(tokens, 4, 8), torch.randn(tokens, kv_heads, 8)
    value = torch.randn(tokens, kv_heads, value_dim)

    def written_out(q, k, v):
        k, v = (x.repeat_interleave(4 // kv_heads, dim=1) for x in (k, v))
        sequence = torch.arange(len(LENGTHS)).repeat_interleave(torch.tensor(LENGTHS))
        sees = (sequence[:, None] == sequence) & torch.ones(tokens, tokens).tril().bool()
        scores = torch.einsum("shd,thd->hst", q, k) / 8**0.5
        weights = scores.masked_fill(~sees, -torch.inf).softmax(-1)
        return torch.einsum("hst,thd->shd", weights, v).flatten(1)

    packed = packed_sequences(LENGTHS, 1, 0, torch.device("cpu"))
    assert 1 < len(packed.buckets) < len(LENGTHS)
    attention = CausalAttention(config())
    got = run(lambda q, k, v: attention(q, k, v, None, packed_seq_params=packed), query, key, value)
    for a, b in zip(got, run(written_out, query.double(), key.double(), value.double()), strict=True):
        torch.testing.assert_close(a.double(), b, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("layer_number", [1, 2])
@pytest.mark.parametrize("has_sinks", [True, False])
def test_windows_and_sinks_equal_a_written_out_softmax(layer_number, has_sinks):
    torch.manual_seed(0)
    tokens = sum(LENGTHS)
    query, key, value = torch.randn(tokens, 4, 8), torch.randn(tokens, 2, 8), torch.randn(tokens, 2, 8)
    sinks = torch.randn(4)
    group = SimpleNamespace(tp=SimpleNamespace(size=lambda: 1))
    fields = config(window=3, softmax_type="learnable" if has_sinks else "vanilla")
    attention = CausalAttention(fields, layer_number, pg_collection=group)
    packed = packed_sequences(LENGTHS, 1, 0, torch.device("cpu"))

    def ours(q, k, v, s):
        weights = {"softmax_offset": s} if has_sinks else {}
        out = torch.func.functional_call(attention, weights, (q, k, v, None), {"packed_seq_params": packed})
        return out + 0 * s.sum()

    def written_out(q, k, v, s):
        k, v = (x.repeat_interleave(2, dim=1) for x in (k, v))
        sequence = torch.arange(len(LENGTHS)).repeat_interleave(torch.tensor(LENGTHS))
        sees = (sequence[:, None] == sequence) & torch.ones(tokens, tokens).tril().bool()
        if layer_number == 2:
            sees &= torch.ones(tokens, tokens).triu(-2).bool()
        powers = (torch.einsum("shd,thd->hst", q, k) / 8**0.5).masked_fill(~sees, -torch.inf).exp()
        total = powers.sum(-1, keepdim=True) + (s.exp().view(4, 1, 1) if has_sinks else 0)
        return torch.einsum("hst,thd->shd", powers / total, v).flatten(1) + 0 * s.sum()

    got = run(ours, query, key, value, sinks)
    for a, b in zip(got, run(written_out, *(x.double() for x in (query, key, value, sinks))), strict=True):
        torch.testing.assert_close(a.double(), b, rtol=1e-4, atol=1e-5)
