"""Small models of every family and their canonical tensors, for tests of layouts."""

import zlib

import numpy as np

_COMMON = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "vocab_size": 100,
    "max_position_embeddings": 64,
    "rope_theta": 10000.0,
    "rms_norm_eps": 1e-6,
}
QWEN3_DENSE = _COMMON | {"model_type": "qwen3", "num_hidden_layers": 2}
QWEN3_MOE = QWEN3_DENSE | {
    "model_type": "qwen3_moe",
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 24,
    "norm_topk_prob": True,
}
_MLA = _COMMON | {
    "num_key_value_heads": 4,
    "head_dim": 4,
    "q_lora_rank": 12,
    "kv_lora_rank": 8,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 4,
    "v_head_dim": 6,
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "n_group": 2,
    "topk_group": 1,
    "moe_intermediate_size": 24,
    "n_shared_experts": 2,
    "first_k_dense_replace": 1,
}
FAMILIES = {
    "qwen2": _COMMON | {"model_type": "qwen2"},
    "llama": _COMMON | {"model_type": "llama"},
    "llama-biased": _COMMON | {"model_type": "llama", "attention_bias": True},
    "qwen3": _COMMON | {"model_type": "qwen3"},
    "qwen3-tied": _COMMON | {"model_type": "qwen3", "tie_word_embeddings": True},
    "qwen2_moe": _COMMON
    | {
        "model_type": "qwen2_moe",
        "num_experts": 8,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 24,
        "shared_expert_intermediate_size": 40,
        "mlp_only_layers": [0],
    },
    "qwen3_moe": QWEN3_MOE | {"num_hidden_layers": 4},
    "mixtral": _COMMON | {"model_type": "mixtral", "num_local_experts": 8, "num_experts_per_tok": 2},
    "deepseek_v2": _MLA | {"model_type": "deepseek_v2"},
    "deepseek_v3": _MLA | {"model_type": "deepseek_v3"},
    "moonlight": _MLA | {"model_type": "deepseek_v3", "q_lora_rank": None},
    "glm4_moe": _COMMON
    | {
        "model_type": "glm4_moe",
        "n_routed_experts": 8,
        "num_experts_per_tok": 2,
        "n_group": 1,
        "topk_group": 1,
        "moe_intermediate_size": 24,
        "n_shared_experts": 1,
        "first_k_dense_replace": 1,
        "use_qk_norm": True,
        "attention_bias": True,
    },
    "gpt_oss": _COMMON | {"model_type": "gpt_oss", "num_local_experts": 8, "num_experts_per_tok": 2},
}
MTP_FAMILIES = {
    name: FAMILIES[name] | {"num_nextn_predict_layers": 1} for name in ("deepseek_v3", "moonlight", "glm4_moe")
}
EXPERT_FAMILIES = {name for name, config in FAMILIES.items() if "num_experts_per_tok" in config}


def random_canonical(spec):
    """Return float32 values for every canonical tensor, the same on every call."""
    return {
        name: np.random.default_rng(zlib.crc32(name.encode())).standard_normal(tensor.shape).astype(np.float32)
        for name, tensor in spec.tensors().items()
    }


def fill_local(shard_map, canonical):
    """Fill a rank's local tensors element by element, with NaN where no shard writes."""
    local = {}
    for name, tensor in shard_map.tensors.items():
        local[name] = np.full(tensor.shape, np.nan, dtype=np.float32)
    for shard in shard_map.shards:
        flat = local[shard.local].reshape(-1)
        index = np.array([shard.offset])
        for extent, stride in zip(shard.box.shape, shard.strides, strict=True):
            index = (index[:, None] + np.arange(extent)[None, :] * stride).ravel()
        part = canonical[shard.tensor][_slices(shard.box)]
        assert np.isnan(flat[index]).all(), f"{shard.local} written twice"
        flat[index] = part.ravel()
    for name, values in local.items():
        assert np.isnan(values).sum() == shard_map.padding.get(name, 0), f"{name} is not covered"
    return local


def held_by_all(shard_maps, spec):
    """Return, per canonical tensor, how many of its elements no rank holds; only those that lack some."""
    held = {name: np.zeros(tensor.shape, dtype=bool) for name, tensor in spec.tensors().items()}
    for shard_map in shard_maps:
        for shard in shard_map.shards:
            held[shard.tensor][_slices(shard.box)] = True
    return {name: int((~mask).sum()) for name, mask in held.items() if not mask.all()}


def _slices(box):
    return tuple(slice(a, b) for a, b in zip(box.start, box.stop, strict=True))
