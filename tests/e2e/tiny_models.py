"""Tiny Qwen3 checkpoints with random weights, made by transformers: real formats, seconds to load, no tokenizer."""

from __future__ import annotations

from pathlib import Path

import torch
from transformers import Qwen3Config, Qwen3ForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM
from transformers.modeling_utils import PreTrainedModel

_SHARED = {
    "vocab_size": 150,  # no multiple of 64: vLLM and Megatron both pad it
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,  # the smallest that vLLM's CPU attention knows
    "max_position_embeddings": 512,
    "initializer_range": 0.2,  # peaked distributions, so that an error shows in log-probs
    "bos_token_id": 1,
    "eos_token_id": 2,
}


def save_qwen3_moe(folder: Path, seed: int, *, num_kv_heads: int = 2, dtype: torch.dtype = torch.float32) -> Path:
    """Write a two-layer Qwen3-MoE of 8 experts, top 2, untied."""
    config = Qwen3MoeConfig(
        **_SHARED | {"num_key_value_heads": num_kv_heads},
        intermediate_size=96,
        moe_intermediate_size=32,
        num_experts=8,
        num_experts_per_tok=2,
        norm_topk_prob=True,
        tie_word_embeddings=False,
    )
    return _save(Qwen3MoeForCausalLM, config, folder, seed, dtype)


def save_qwen3(folder: Path, seed: int, *, is_tied: bool = True, dtype: torch.dtype = torch.float32) -> Path:
    """Write a two-layer dense Qwen3."""
    config = Qwen3Config(**_SHARED, intermediate_size=96, tie_word_embeddings=is_tied)
    return _save(Qwen3ForCausalLM, config, folder, seed, dtype)


def _save(family: type[PreTrainedModel], config: object, folder: Path, seed: int, dtype: torch.dtype) -> Path:
    torch.manual_seed(seed)
    model = family(config).to(dtype)
    for name, parameter in model.named_parameters():
        if name.endswith("norm.weight"):
            torch.nn.init.uniform_(parameter, 0.5, 1.5)
    model.save_pretrained(folder)
    return folder
