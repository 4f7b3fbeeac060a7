"""A bfloat16 training model sent to float8 destinations: the bytes are torch's, the fewest, and verified; cuts are refused."""

from dataclasses import replace

import pytest
import torch

from hybridrl.errors import ReshardError
from hybridrl.layout.box import DType
from hybridrl.layout.families import model_spec
from hybridrl.layout.megatron import MegatronLayout, megatron_shard_map
from hybridrl.layout.parallel import ParallelSizes
from hybridrl.layout.shard import Place
from hybridrl.layout.vllm import VllmLayout, vllm_shard_map
from hybridrl.reshard.executor import compare_reports
from hybridrl.reshard.fp8 import SUFFIX, BlockQuantizer, float8_tensors, quantized
from hybridrl.reshard.planner import build_plan, lower_bound_bytes
from tests.unit.layout.models import FAMILIES, random_canonical
from tests.unit.reshard.test_executor import Tampering
from tests.unit.reshard.test_fp8 import reference
from tests.unit.reshard.world import filled_tensors, transfer

SIZES = {"hidden_size": 256, "intermediate_size": 512, "moe_intermediate_size": 256, "num_hidden_layers": 2}
MODELS = {
    "qwen3_moe": FAMILIES["qwen3_moe"] | SIZES | {"head_dim": 128, "num_experts": 4},
    "deepseek_v3": FAMILIES["deepseek_v3"]
    | SIZES
    | {"q_lora_rank": 256, "kv_lora_rank": 192, "qk_nope_head_dim": 128, "v_head_dim": 128, "qk_rope_head_dim": 64}
    | {"n_routed_experts": 4, "n_shared_experts": 1},
}
TORCH = {DType.FLOAT32: torch.float32, DType.BFLOAT16: torch.bfloat16, DType.FLOAT8_E4M3: torch.float8_e4m3fn}


def weights_of(spec):
    return {name for name in spec.tensors() if "_proj" in name and name.endswith(".weight")}


TRAINING = ParallelSizes(tp=2, pp=2, ep=2)


def sides(model="qwen3_moe", training=TRAINING, tp=2, chunk_bytes=100_000):
    spec = model_spec(MODELS[model])
    layout, served = MegatronLayout(spec, training, DType.BFLOAT16), VllmLayout(spec, tp, DType.BFLOAT16)
    live = [megatron_shard_map(layout, Place("actor", r, "a", f"{r}")) for r in range(training.world_size)]
    plain = [vllm_shard_map(served, r, Place("rollout", r, "a", f"g{r}")) for r in range(tp)]
    destinations = [quantized(m, weights_of(spec)) for m in plain]
    sources = [quantized(m, float8_tensors(destinations)) for m in live]
    plan = build_plan(sources, destinations, chunk_bytes=chunk_bytes)
    return spec, live, plain, sources, destinations, plan


def canonical_float8(spec):
    """Return every canonical tensor as a destination holds it, quantised whole by plain torch."""
    want = {}
    for name, values in random_canonical(spec).items():
        want[name] = torch.from_numpy(values).to(TORCH[spec.tensors()[name].dtype or DType.BFLOAT16])
        if name in weights_of(spec):
            codes, want[name + SUFFIX] = reference(want[name])
            want[name] = codes.view(torch.float8_e4m3fn)
    return want


def check_shards(shard_map, got, want):
    for shard in shard_map.shards:
        own = got[shard.local].view(-1).as_strided(shard.box.shape, shard.strides, shard.offset)
        part = want[shard.tensor][tuple(slice(a, b) for a, b in zip(shard.box.start, shard.box.stop, strict=True))]
        assert torch.equal(own.contiguous().view(torch.uint8), part.contiguous().view(torch.uint8)), shard


def run(model, kind, wrap=lambda transport, **who: transport, **options):
    spec, live, _, sources, destinations, plan = sides(model, **options)
    trained = [filled_tensors(m, random_canonical(spec)) for m in live]
    have = [BlockQuantizer(plan, i, m).run(trained[i]) for i, m in enumerate(sources)]
    got = [{n: torch.zeros(t.shape, dtype=TORCH[t.dtype]) for n, t in m.tensors.items()} for m in destinations]
    sent, received = transfer(plan, have, got, kind, wrap=wrap)
    reports = [[rank[0] for rank in side] for side in (sent, received)]
    return spec, sources, destinations, plan, got, reports


@pytest.mark.parametrize("kind", ["shm", "gloo"])
@pytest.mark.parametrize("model", MODELS)
def test_destinations_hold_what_torch_makes_of_the_canonical_weights(model, kind):
    spec, sources, destinations, plan, got, reports = run(model, kind)
    want = canonical_float8(spec)
    for shard_map, tensors in zip(destinations, got, strict=True):
        check_shards(shard_map, tensors, want)
    assert compare_reports(plan, *reports) == []
    assert sum(r.wire_bytes for r in reports[1]) == plan.wire_bytes == lower_bound_bytes(sources, destinations)


def test_a_byte_per_element_and_the_scales_travel():
    spec, live, plain, _, destinations, plan = sides(tp=1)
    kept = {name: t.shape for name, t in spec.tensors().items()}
    num_elements = {name: torch.Size(shape).numel() for name, shape in kept.items()}
    quantised = sum(num_elements[name] for name in weights_of(spec))
    saved = lower_bound_bytes(live, plain) - plan.wire_bytes
    scales = sum(-(-kept[n][0] // 128) * -(-kept[n][1] // 128) for n in weights_of(spec))
    assert saved == quantised - 4 * scales
    assert destinations[0].tensors["model.layers.0.mlp.experts.routed_experts.w13_weight" + SUFFIX].shape == (4, 4, 2)


@pytest.mark.parametrize("suffix", ["", SUFFIX], ids=["weight", "scale"])
def test_a_flipped_bit_of_a_weight_or_a_scale_is_named(suffix):
    plan = sides(tp=1)[-1]
    (_, chunk, source), moves = next(
        (key, moves)
        for key, moves in plan.messages()
        if any(m.tensor.endswith("o_proj.weight" + suffix) for m in moves)
    )
    ordered = sorted(moves, key=lambda move: -move.wire_dtype.itemsize)
    index = next(i for i, move in enumerate(ordered) if move.tensor.endswith("o_proj.weight" + suffix))
    position = sum(move.num_bytes for move in ordered[:index])

    class Damaged(Tampering):
        def submit_send(self, peer, label, fill):
            def damaged(buffer):
                fill(buffer)
                if label.chunk == chunk:
                    buffer[position] ^= 1

            self.inner.submit_send(peer, label, damaged)

    def wrap(transport, source=None, destination=None):
        return Damaged(transport, None) if source == of_message else transport

    of_message = source
    *_, reports = run("qwen3_moe", "shm", wrap=wrap, tp=1)
    (problem,) = compare_reports(plan, *reports)
    assert problem.startswith(f"{ordered[index].tensor}: rollout rank 0 holds checksum ")
    assert f"actor rank {source} sent" in problem


def test_replicas_quantise_only_what_they_serve():
    spec, live, _, sources, _, plan = sides(training=ParallelSizes(dp=2), tp=1, chunk_bytes=64 << 20)
    trained = filled_tensors(live[0], random_canonical(spec))
    made = [BlockQuantizer(plan, i, m).run(trained) for i, m in enumerate(sources)]
    sizes = [sum(t.nbytes for t in own.values() if t.dtype is torch.float8_e4m3fn) for own in made]
    whole = sum(m.num_bytes for m in plan.moves if m.tensor in weights_of(spec))
    assert all(0.3 * whole < size < 0.9 * whole for size in sizes)


def test_a_source_that_cuts_a_block_is_refused_before_anything_is_planned():
    with pytest.raises(
        ReshardError,
        match=r"model.layers.0.mlp.experts.0.gate_proj.weight \[0:64, 0:256\] of \(256, 256\): rows are cut at 64, "
        r"inside a float8 block of 128 x 128; a tensor-parallel degree of 1, 2 cuts no block",
    ):
        sides(training=ParallelSizes(tp=4, etp=4))


def test_weights_that_are_not_bfloat16_are_refused():
    spec = model_spec(MODELS["qwen3_moe"])
    layout = MegatronLayout(spec, ParallelSizes(), DType.FLOAT32)
    with pytest.raises(ReshardError, match=r"is F32, but float8 blocks are made of bfloat16"):
        quantized(megatron_shard_map(layout, Place("actor", 0, "a", "0")), weights_of(spec))


def test_a_local_tensor_of_two_kinds_is_refused():
    spec, live, *_ = sides()
    name = next(n for n in sorted(weights_of(spec)) if n.endswith("0.self_attn.q_proj.weight"))
    with pytest.raises(ReshardError, match=r"shares .* with float8 weights, but is none itself"):
        quantized(live[0], {name})


def test_rows_of_a_block_that_do_not_lie_together_are_refused():
    _, live, *_ = sides(tp=1)
    shard = next(s for s in live[0].shards if s.tensor.endswith("o_proj.weight"))
    local = live[0].tensors[shard.local]
    turned = replace(shard, strides=shard.strides[::-1])
    small = replace(live[0], tensors={local.name: local}, shards=(turned,), padding={})
    with pytest.raises(ReshardError, match=r"o_proj.weight .* not in whole blocks of 128 x 128"):
        quantized(small, {shard.tensor})
