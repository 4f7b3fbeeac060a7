"""Faults that a person could make, planted into a whole Megatron model, and what a rank then computes."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch
from megatron.core.models.gpt.gpt_model import GPTModel

from hybridrl.config.choices import Platform
from hybridrl.config.schema import ParallelConfig
from hybridrl.engines.megatron import cpu
from hybridrl.engines.megatron.activations import megatron_activations
from hybridrl.engines.megatron.process_groups import start_process_group, stop_process_group
from hybridrl.engines.megatron.single_rank import load_whole_model
from hybridrl.parity.activations import Activations

Fault = Callable[[GPTModel], None]


def activations_with(
    rank: int, init_method: str, folder: Path, token_ids: list[int], faults: list[Fault]
) -> list[Activations]:
    """Return the activations of a fresh model per fault."""
    cpu.install()
    groups = start_process_group(rank, ParallelConfig(), Platform.CPU, init_method, timeout_s=60)
    found = []
    for plant in faults:
        model = load_whole_model(folder, groups)
        with torch.no_grad():
            plant(model)
        found.append(megatron_activations(model, token_ids))
    stop_process_group()
    return found


def nothing(model: GPTModel) -> None:
    """Leave the model as it is."""


def rope_theta(model: GPTModel) -> None:
    """Take 10,000 for the 1,000,000 of the model, say."""
    rotary = model.rotary_pos_emb
    rotary.inv_freq = rotary.inv_freq ** (4 / 6)


def norm_epsilon(model: GPTModel) -> None:
    """Take ten times the epsilon, 1e-5 for 1e-6, say."""
    for layer in model.decoder.layers:
        layer.input_layernorm.eps *= 10
        layer.pre_mlp_layernorm.eps *= 10


def latent_norm_epsilon(model: GPTModel) -> None:
    """Take 1e-2 inside the latent attention of layer 1."""
    attention = model.decoder.layers[1].self_attention
    attention.q_layernorm.eps = attention.kv_layernorm.eps = 1e-2


def score_function(model: GPTModel) -> None:
    """Take the other of softmax and sigmoid."""
    for layer in model.decoder.layers[1:]:
        router = layer.mlp.router
        router.score_function = "softmax" if router.score_function == "sigmoid" else "sigmoid"


def no_correction_bias(model: GPTModel) -> None:
    """Forget the correction bias of the routers."""
    for layer in model.decoder.layers[1:]:
        layer.mlp.router.expert_bias.zero_()


def no_router_bias(model: GPTModel) -> None:
    """Forget the biases of the routers' projections."""
    for layer in model.decoder.layers:
        layer.mlp.router.bias.zero_()


def expert_order(model: GPTModel) -> None:
    """Swap the weights of experts 2 and 5 of layer 1."""
    experts = model.decoder.layers[1].mlp.experts.local_experts
    kept = {name: tensor.clone() for name, tensor in experts[2].named_parameters()}
    for name, tensor in experts[2].named_parameters():
        other = experts[5].get_parameter(name)
        tensor.copy_(other)
        other.copy_(kept[name])


def router_order(model: GPTModel) -> None:
    """Swap the rows of experts 0 and 1 in the router of layer 2."""
    weight = model.decoder.layers[2].mlp.router.weight
    weight[:2] = weight[:2].flip(0)


def no_attention_scale(model: GPTModel) -> None:
    """Do not divide by the root of the head's width."""
    for layer in model.decoder.layers:
        layer.self_attention.core_attention.scale = 1.0


def no_routed_scaling(model: GPTModel) -> None:
    """Forget the factor of the routed experts."""
    model.config.moe_router_topk_scaling_factor = None


def no_window(model: GPTModel) -> None:
    """See all tokens where a window is wanted."""
    for layer in model.decoder.layers:
        layer.self_attention.core_attention.window = None


def no_query_bias(model: GPTModel) -> None:
    """Forget the biases of queries, keys and values."""
    for layer in model.decoder.layers:
        layer.self_attention.linear_qkv.bias.zero_()


def residual_twice(model: GPTModel) -> None:
    """Double what layer 1 hands on."""
    model.decoder.layers[1].register_forward_hook(
        lambda layer, inputs, output: (output[0] * 2, output[1]), prepend=True
    )


def output_bias(model: GPTModel) -> None:
    """Add to every logit."""
    model.output_layer.register_forward_hook(lambda layer, inputs, output: (output[0] + 1.0, output[1]))


def router_in_bfloat16(model: GPTModel) -> None:
    """Compute the router's logits in 16 bits."""
    for layer in model.decoder.layers[1:]:
        layer.mlp.router.weight.copy_(layer.mlp.router.weight.bfloat16())
