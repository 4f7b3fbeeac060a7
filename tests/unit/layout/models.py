"""Small models and their canonical tensors, for tests of layouts."""

import zlib

import numpy as np

QWEN3_DENSE = {
    "model_type": "qwen3",
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "vocab_size": 100,
    "max_position_embeddings": 64,
    "rope_theta": 10000.0,
    "rms_norm_eps": 1e-6,
}
QWEN3_MOE = QWEN3_DENSE | {
    "model_type": "qwen3_moe",
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 24,
    "norm_topk_prob": True,
}


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
        part = canonical[shard.tensor][tuple(slice(a, b) for a, b in zip(shard.box.start, shard.box.stop, strict=True))]
        assert np.isnan(flat[index]).all(), f"{shard.local} written twice"
        flat[index] = part.ravel()
    return local
