"""Activations: terms by hand, passes in flight by playing the schedule, and the loss by watching every tensor that is made."""

from __future__ import annotations

import weakref

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from hybridrl.engines.megatron.logprobs import VocabSlice, token_logprobs
from hybridrl.layout.box import DType
from hybridrl.layout.megatron import LayerSpec, MegatronLayout
from hybridrl.layout.parallel import ParallelSizes
from hybridrl.planning.activations import chunks_in_flight, layer_activations, loss_bytes_per_logit
from tests.unit.planning.recipes import planned, spec


def layer_bytes(name: str, *, tp: int = 1, imbalance: float = 1.0, layer: int = -1):
    layout = MegatronLayout(spec(name), ParallelSizes(tp=tp), DType.BFLOAT16, LayerSpec.TRANSFORMER_ENGINE)
    return layer_activations(layout.spec.layers[layer], layout, is_sequence_parallel=tp > 1, imbalance=imbalance)


def test_a_layer_keeps_what_its_operators_need():
    # 30B: norms 4 x 2 x 2048, qkv 2 x 40 x 128, attention 2 x 32 x 128, experts 2 x 8 x (2048 + 3 x 768), router 8 x 128.
    assert layer_bytes("qwen3-30b-a3b").kept == 16384 + 10240 + 8192 + 69632 + 1024
    assert layer_bytes("qwen3-30b-a3b").input == 2 * 2048
    # DeepSeek-V3: latents 2 x (2 x 1536 + 2 x 512 + 64), heads 2 x 128 x (2 x 192 + 2 x 128), and a shared expert of 2048.
    attention = 2 * (2 * 1536 + 2 * 512 + 64) + 2 * 128 * (2 * 192 + 2 * 128)
    experts = 2 * 8 * (7168 + 3 * 2048) + 8 * 256 + 2 * 3 * 2048
    assert layer_bytes("deepseek-v3").kept == 4 * 2 * 7168 + attention + experts
    assert layer_bytes("deepseek-v3", layer=0).kept == 4 * 2 * 7168 + attention + 2 * 3 * 18432


def test_sequence_and_tensor_parallelism_halve_all_of_it():
    assert layer_bytes("qwen3-30b-a3b", tp=2).kept == layer_bytes("qwen3-30b-a3b").kept / 2


def test_imbalance_adds_to_the_routed_tokens_alone():
    extra = layer_bytes("qwen3-30b-a3b", imbalance=1.5).kept - layer_bytes("qwen3-30b-a3b").kept
    assert extra == 69632 / 2


def play(pp_rank: int, pp_size: int, vpp_size: int, num_micro_batches: int) -> int:
    """Return the most passes in flight when a rank warms up as far ahead as the schedule lets it, then alternates."""
    total = num_micro_batches * vpp_size
    ahead = pp_size - pp_rank - 1 if vpp_size == 1 else 2 * (pp_size - pp_rank - 1) + (vpp_size - 1) * pp_size
    order = ["F"] * min(ahead, total) + ["F", "B"] * max(0, total - ahead) + ["B"] * min(ahead, total)
    alive = most = 0
    for step in order:
        alive += 1 if step == "F" else -1
        most = max(most, alive)
    assert alive == 0 and order.count("F") == total
    return most


@pytest.mark.parametrize("pp_size", [1, 2, 4])
@pytest.mark.parametrize("vpp_size", [1, 2, 3])
@pytest.mark.parametrize("num_micro_batches", [4, 8, 32])
def test_passes_in_flight_are_those_of_the_schedule(pp_size, vpp_size, num_micro_batches):
    for pp_rank in range(pp_size if vpp_size == 1 or pp_size > 1 else 0):
        planned_passes = chunks_in_flight(pp_rank, pp_size, vpp_size, num_micro_batches)
        assert planned_passes == play(pp_rank, pp_size, vpp_size, num_micro_batches)


class _Watch(TorchDispatchMode):
    """Counts the bytes of all storages that are alive, from outside of the code under test."""

    def __init__(self) -> None:
        super().__init__()
        self.alive: dict[int, int] = {}
        self.most = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if isinstance(tensor, torch.Tensor):
                storage = tensor.untyped_storage()
                key = storage._cdata
                if key not in self.alive:
                    self.alive[key] = storage.nbytes()
                    weakref.finalize(storage, self.alive.pop, key, None)
        self.most = max(self.most, sum(self.alive.values()))
        return result


class _Alone:
    def size(self) -> int:
        return 1


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("has_entropy", [False, True])
def test_the_loss_takes_as_many_bytes_per_logit_as_planned(dtype, has_entropy):
    rows, columns = 400, 2000
    hidden = torch.randn(rows, 2, dtype=dtype, requires_grad=True)
    weight = torch.randn(columns, 2, dtype=dtype)
    vocab = VocabSlice(0, columns, _Alone())
    with _Watch() as watch:
        # As in Megatron's schedule, the logits are held until the loss is known, and so are the rows picked of them.
        logits = hidden @ weight.t()
        picked = logits.index_select(0, torch.arange(rows))
        logprobs, entropies = token_logprobs(picked, torch.zeros(rows, dtype=torch.int64), vocab, 1.0)
        loss = logprobs.sum() + (entropies.sum() if has_entropy else 0.0)
        del logits, picked
        loss.backward()
    planned_bytes = loss_bytes_per_logit(dtype.itemsize, has_entropy=has_entropy)
    assert watch.most / (rows * columns) == pytest.approx(planned_bytes, rel=0.01)


def test_full_recomputation_keeps_inputs_and_one_layer():
    kept = planned("qwen3-30b-a3b", "actor.recompute=none").memory.stages[0].activations
    full = planned("qwen3-30b-a3b").memory.stages[0].activations
    layer, tokens = layer_bytes("qwen3-30b-a3b", tp=2, imbalance=1.3), 9216
    assert kept.training == pytest.approx(48 * tokens * layer.kept)
    assert full.training == pytest.approx(tokens * (48 * layer.input + layer.kept))
    assert kept.forward == full.forward == pytest.approx(tokens * layer.kept)
    assert full.loss == tokens * 151936 // 2 * 16


def test_context_parallelism_shares_the_tokens():
    alone = planned("qwen3-30b-a3b").memory.stages[0].activations
    shared = (
        planned("qwen3-30b-a3b", "actor.parallel.cp_size=2", "actor.parallel.dp_size=2").memory.stages[0].activations
    )
    assert shared.training == pytest.approx(alone.training / 2)
    assert shared.loss == pytest.approx(alone.loss / 2)
