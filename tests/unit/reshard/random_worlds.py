"""Random models and layouts for property tests: dense, MoE and MLA, uneven sizes, TP beyond KV heads, vocabulary paddings."""

import itertools
from dataclasses import dataclass, replace

import numpy as np
from hypothesis import strategies as st

from hybridrl.layout.box import Box, DType, contiguous_strides
from hybridrl.layout.families import model_spec
from hybridrl.layout.megatron import ExpertContainer, LayerSpec, MegatronLayout, PipelineLayout
from hybridrl.layout.model import ModelSpec
from hybridrl.layout.parallel import ParallelSizes
from hybridrl.layout.shard import CanonicalTensor, LocalTensor, Place, Shard, ShardMap
from hybridrl.layout.vllm import ExpertPlacement, VllmLayout
from hybridrl.reshard.worlds import Devices, megatron_world, vllm_world

_MAX_RANKS = 12


class Ranks(list):
    """The maps of one side, and what its layout makes use of."""

    def __init__(self, maps, **traits):
        super().__init__(maps)
        self.traits = {name for name, is_used in traits.items() if is_used}


@dataclass(frozen=True)
class World:
    """Both sides of a reshard."""

    spec: ModelSpec
    sources: list[ShardMap]
    destinations: list[ShardMap]
    chunk_bytes: int
    is_staggered: bool
    is_shared: bool = False

    def canonical(self):
        """Return float32 values for every canonical tensor, all different."""
        values, position = {}, 0
        for name, tensor in self.spec.tensors().items():
            size = int(np.prod(tensor.shape))
            values[name] = np.arange(position, position + size, dtype=np.float32).reshape(tensor.shape)
            position += size
        assert position < 2**24, "float32 no longer tells the values apart"
        return values


@st.composite
def models(draw):
    num_kv_heads = draw(st.sampled_from([1, 2, 4]))
    family = draw(st.sampled_from(["qwen3", "qwen2", "qwen3_moe", "qwen2_moe", "deepseek_v3", "mixtral"]))
    config = {
        "model_type": family,
        "hidden_size": draw(st.sampled_from([8, 12])),
        "intermediate_size": draw(st.sampled_from([8, 24, 40])),
        "num_hidden_layers": draw(st.integers(1, 3)),
        "num_attention_heads": draw(st.sampled_from([4, 8, 12])),
        "num_key_value_heads": num_kv_heads,
        "head_dim": 4,
        "vocab_size": draw(st.sampled_from([37, 50, 64])),
        "max_position_embeddings": 64,
        "rope_theta": 10000.0,
        "rms_norm_eps": 1e-6,
        "tie_word_embeddings": draw(st.booleans()),
    }
    num_experts = draw(st.sampled_from([4, 6, 7, 8]))
    experts = {"num_experts_per_tok": 2, "moe_intermediate_size": draw(st.sampled_from([8, 24]))}
    if family == "qwen2":
        config |= {"hidden_size": 4 * config["num_attention_heads"]}
    elif family in ("qwen3_moe", "qwen2_moe"):
        config |= experts | {"num_experts": num_experts, "norm_topk_prob": True}
        if family == "qwen2_moe":
            config |= {"hidden_size": 4 * config["num_attention_heads"], "shared_expert_intermediate_size": 8}
    elif family == "mixtral":
        config |= {"num_local_experts": num_experts, "num_experts_per_tok": 2}
    elif family == "deepseek_v3":
        config |= experts | {
            "n_routed_experts": num_experts,
            "n_shared_experts": draw(st.sampled_from([1, 2])),
            "first_k_dense_replace": draw(st.integers(0, min(1, config["num_hidden_layers"] - 1))),
            "q_lora_rank": draw(st.sampled_from([None, 8])),
            "kv_lora_rank": 8,
            "qk_nope_head_dim": 4,
            "qk_rope_head_dim": 4,
            "v_head_dim": 4,
            "norm_topk_prob": True,
            "n_group": 2,
            "topk_group": 1,
            "num_key_value_heads": config["num_attention_heads"],
        }
    return model_spec(config)


@st.composite
def parallel_sizes(draw):
    tp, cp, dp = draw(st.sampled_from([1, 2, 4])), draw(st.sampled_from([1, 1, 2])), draw(st.integers(1, 3))
    pp = draw(st.integers(1, max(1, min(3, _MAX_RANKS // (tp * cp * dp)))))
    grids = [(ep, etp) for ep in (1, 2, 4) for etp in (1, 2, 4) if tp * cp * dp % (ep * etp) == 0]
    ep, etp = draw(st.sampled_from(grids))
    return ParallelSizes(tp, pp, ep, etp, cp, dp)


@st.composite
def pipelines(draw, pp, num_layers):
    """Spread layers over stages in any way, empty stages and several chunks per rank included."""
    num_stages = pp * (draw(st.sampled_from([1, 2])) if pp > 1 else 1)
    cuts = sorted(draw(st.lists(st.integers(0, num_layers), min_size=num_stages - 1, max_size=num_stages - 1)))
    counts = np.diff([0, *cuts, num_layers])
    return PipelineLayout(stages="E" + "|".join("t" * count for count in counts) + "L")


@st.composite
def megatron_worlds(draw, spec, role, devices):
    sizes = draw(parallel_sizes().filter(lambda sizes: not _num_experts(spec) % sizes.ep))
    layer_spec = draw(st.sampled_from(LayerSpec))
    is_te = layer_spec is LayerSpec.TRANSFORMER_ENGINE
    containers = [ExpertContainer.TE_GROUPED, ExpertContainer.SINGLE_GROUPED] if is_te else [None]
    layout = MegatronLayout(
        spec,
        sizes,
        DType.FLOAT32,
        layer_spec,
        vocab_divisor=draw(st.sampled_from([1, 3, 16])),
        pipeline=draw(pipelines(sizes.pp, len(spec.layers))),
        experts=draw(st.sampled_from(containers)),
        glu_interleave_size=draw(st.sampled_from([None, 1] if is_te else [None])),
    )
    stages = layout.pipeline.stages.strip("EL").split("|")
    return Ranks(
        megatron_world(layout, devices, role),
        tp_beyond_kv_heads=sizes.tp > _num_kv_heads(spec),
        pp=sizes.pp > 1,
        vpp=len(stages) > sizes.pp,
        uneven=len({len(stage) for stage in stages}) > 1,
        ep=sizes.ep > 1 and _num_experts(spec) > 0,
        etp=sizes.etp > 1 and _num_experts(spec) > 0,
        dp=sizes.dp > 1,
        interleaved_glu=layout.glu_interleave_size is not None,
        **{container.name: layout.experts is container for container in ExpertContainer},
    )


@st.composite
def vllm_worlds(draw, spec, role, devices):
    tp, dp = draw(st.sampled_from([1, 2, 4])), draw(st.sampled_from([1, 1, 2]))
    layout = VllmLayout(
        spec,
        tp=tp,
        dtype=DType.FLOAT32,
        has_expert_parallel=draw(st.booleans()) and tp * dp <= _num_experts(spec),
        pp=draw(st.integers(1, min(2, len(spec.layers)))),
        dp=dp,
        placement=draw(st.sampled_from(ExpertPlacement)),
    )
    num_replicas = draw(st.integers(1, max(1, _MAX_RANKS // (layout.tp * layout.pp * layout.dp))))
    return Ranks(
        vllm_world(layout, num_replicas, devices, role),
        tp_beyond_kv_heads=layout.tp > _num_kv_heads(spec),
        pp=layout.pp > 1,
        ep=layout.has_expert_parallel and _num_experts(spec) > 0,
        dp=layout.dp > 1,
        replicas=num_replicas > 1,
        uneven_experts=layout.has_expert_parallel and _num_experts(spec) % (layout.tp * layout.dp) > 0,
    )


@st.composite
def worlds(draw, generation):
    spec = draw(models())
    devices = Devices(draw(st.sampled_from([2, 4, 100])))
    sources = draw(megatron_worlds(spec, "actor", devices))
    first = draw(st.sampled_from([0, len(sources), 100]))
    destinations = draw(generation(spec, "rollout", Devices(devices.per_node, first)))
    return World(
        spec,
        sources,
        destinations,
        draw(st.sampled_from([300, 3000, 1 << 20])),
        draw(st.booleans()),
        draw(st.booleans()),
    )


def _num_kv_heads(spec):
    return min(getattr(layer.attention, "num_kv_heads", 1 << 30) for layer in spec.layers)


def _num_experts(spec):
    return max([0, *(getattr(layer.mlp, "num_experts", 0) for layer in spec.layers)])


@dataclass(frozen=True)
class Tensors:
    """Stands for a model in :func:`cut_worlds`."""

    shapes: dict[str, tuple[int, ...]]

    def tensors(self):
        return {name: CanonicalTensor(name, shape) for name, shape in self.shapes.items()}


@st.composite
def grids(draw, shape):
    """Cut a tensor into the cells of any grid."""
    cuts = [sorted({0, extent, *draw(st.lists(st.integers(0, extent), max_size=2))}) for extent in shape]
    spans = itertools.product(*(itertools.pairwise(edges) for edges in cuts))
    return [Box(tuple(a for a, _ in span), tuple(b for _, b in span)) for span in spans]


@st.composite
def cut_sides(draw, tensors, role, devices, num_copies):
    """Cut each tensor `num_copies` times by different grids, and deal the cells of each copy to ranks."""
    num_ranks = draw(st.integers(1, 4))
    owned = [[] for _ in range(num_ranks)]
    for tensor in tensors.tensors().values():
        for _ in range(num_copies):
            for box in draw(grids(tensor.shape)):
                owned[draw(st.integers(0, num_ranks - 1))].append((tensor, box))
    num_replicas = draw(st.integers(1, 3))
    maps = [_map_of(shards, Place(role, 0, "", "")) for shards in owned]
    return [
        replace(maps[rank % num_ranks], place=devices.place(role, rank)) for rank in range(num_replicas * num_ranks)
    ]


def _map_of(owned, place):
    shards, locals_, canonical = [], {}, {}
    for index, (tensor, box) in enumerate(owned):
        name = f"{tensor.name}.{index}"
        locals_[name] = LocalTensor(name, box.shape, DType.FLOAT32)
        shards.append(Shard(tensor.name, box, name, 0, contiguous_strides(box.shape)))
        canonical[tensor.name] = tensor
    return ShardMap(place, locals_, tuple(shards), canonical)


@st.composite
def cut_worlds(draw):
    """Tensors of up to three dimensions, cut in any way; source boxes may overlap partly."""
    extents = st.lists(st.integers(1, 7), min_size=0, max_size=3)
    shapes = {f"t{i}": tuple(shape) for i, shape in enumerate(draw(st.lists(extents, min_size=1, max_size=3)))}
    tensors = Tensors(shapes)
    per_node = draw(st.sampled_from([1, 2, 100]))
    sources = draw(cut_sides(tensors, "actor", Devices(per_node), draw(st.sampled_from([1, 1, 2]))))
    first = draw(st.sampled_from([0, len(sources), 100]))
    destinations = draw(cut_sides(tensors, "rollout", Devices(per_node, first), 1))
    return World(
        tensors, sources, destinations, draw(st.sampled_from([40, 1 << 20])), draw(st.booleans()), draw(st.booleans())
    )
