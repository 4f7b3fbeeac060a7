"""Real vLLM models on two gloo ranks, without engines: any family in any layout, one after another in the same processes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
import vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method as unquantized_moe
from safetensors.torch import load_file
from torch import nn
from vllm import ModelRegistry
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.distributed import (
    destroy_model_parallel,
    init_distributed_environment,
    initialize_model_parallel,
)
from vllm.distributed.parallel_state import get_tp_group
from vllm.engine.arg_utils import EngineArgs
from vllm.model_executor.layers.fused_moe.oracle.unquantized import UnquantizedMoeBackend
from vllm.model_executor.model_loader.utils import initialize_model, process_weights_after_loading
from vllm.model_executor.models import utils as model_utils
from vllm.model_executor.models.gpt_oss import GptOssForCausalLM
from vllm.utils.torch_utils import set_default_torch_dtype

WORLD_SIZE = 2


@dataclass(frozen=True, slots=True)
class Replica:
    """How the two ranks form replicas: tp * pp ranks each."""

    tp: int = 1
    pp: int = 1
    has_expert_parallel: bool = False


def start(rank: int, init_method: str) -> None:
    """Join the world; call once per process."""
    _let_gpt_oss_build()
    init_distributed_environment(WORLD_SIZE, rank, init_method, rank, "gloo")


def _let_gpt_oss_build() -> None:
    """Give GPT-OSS, for which vLLM has no CPU kernel, a backend whose weights stay in load format."""
    select = unquantized_moe.select_unquantized_moe_backend

    def select_or_triton(*args: object, **kwargs: object) -> object:
        try:
            return select(*args, **kwargs)
        except NotImplementedError:
            return UnquantizedMoeBackend.TRITON, None

    method = unquantized_moe.UnquantizedFusedMoEMethod
    setup_kernel = method._setup_kernel

    def setup_kernel_if_any(self: unquantized_moe.UnquantizedFusedMoEMethod, *args: object, **kwargs: object) -> None:
        if self.experts_cls is not None:
            setup_kernel(self, *args, **kwargs)

    unquantized_moe.select_unquantized_moe_backend = select_or_triton
    method._setup_kernel = setup_kernel_if_any
    ModelRegistry.register_model("GptOssForCausalLM", GptOssForCausalLM)


@contextmanager
def replica(folder: Path, layout: Replica) -> Iterator[VllmConfig]:
    """Form vLLM's groups for a checkpoint's model; everything about the model happens inside."""
    config = EngineArgs(
        model=str(folder),
        skip_tokenizer_init=True,
        dtype="bfloat16",
        enforce_eager=True,
        max_model_len=64,
        tensor_parallel_size=layout.tp,
        pipeline_parallel_size=layout.pp,
        enable_expert_parallel=layout.has_expert_parallel,
        distributed_executor_backend="mp",
    ).create_engine_config()
    with set_current_vllm_config(config):
        try:
            initialize_model_parallel(layout.tp, layout.pp)
            yield config
        finally:
            destroy_model_parallel()


def build(config: VllmConfig) -> nn.Module:
    """Build a rank's model as vLLM's loaders do, without weights."""
    config.compilation_config.static_forward_context.clear()
    model_utils._model_to_pp_missing_layer_names.clear()  # kept by id(model), which a later model may get again
    with set_default_torch_dtype(torch.bfloat16):
        return initialize_model(config)


def load(model: nn.Module, folder: Path) -> None:
    """Load a checkpoint with the model's own loaders."""
    tensors: dict[str, torch.Tensor] = {}
    for path in sorted(folder.glob("*.safetensors")):
        tensors |= load_file(path)
    model.load_weights(tensors.items())


def process(model: nn.Module, config: VllmConfig) -> None:
    """Turn loaded weights into kernel format."""
    process_weights_after_loading(model, config.model_config, torch.device("cpu"))


def state(model: nn.Module) -> Mapping[str, torch.Tensor]:
    """Return all parameters and buffers, and what modules keep as plain attributes, by name."""
    found: dict[str, torch.Tensor] = {}
    for prefix, module in model.named_modules():
        own = module._parameters | module._buffers | module.__dict__
        found |= {f"{prefix}.{name}": t for name, t in own.items() if isinstance(t, torch.Tensor)}
    return found


def tp_rank() -> int:
    """Rank within the replica's tensor-parallel group."""
    return get_tp_group().rank_in_group
