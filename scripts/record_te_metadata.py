"""Records what Megatron-core's Transformer Engine layers call their tensors, and how they say these are cut.

Transformer Engine's Python classes run as published; only what its compiled extension does is missing, and building a model
needs none of that. So one process without a GPU builds each rank's model in turn, by the engine's code for the cuda platform,
with fake process groups, and writes name, shape, element type and partition attributes of every tensor to a JSON file, which
``tests/unit/layout/test_te_metadata.py`` compares with the declared layout. Megatron-core is the installed one; put another
first on PYTHONPATH to record that.

    pip download --no-deps transformer-engine==2.20.2 && unzip -d te transformer_engine-*.whl
    python scripts/record_te_metadata.py --te te --output tests/unit/layout/te_metadata
"""

from __future__ import annotations

import argparse
import enum
import json
import logging
import os
import re
import sys
import warnings
from importlib.machinery import ModuleSpec
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from hybridrl.config.choices import Platform, Precision
from hybridrl.config.schema import ParallelConfig
from hybridrl.layout.box import DType
from hybridrl.layout.families import model_spec
from hybridrl.layout.megatron import LayerSpec, MegatronLayout
from hybridrl.layout.parallel import parallel_sizes

_COMMON = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "vocab_size": 100,
    "max_position_embeddings": 64,
    "rope_theta": 10000.0,
    "rms_norm_eps": 1e-6,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 24,
}
_QWEN3_MOE = _COMMON | {
    "model_type": "qwen3_moe",
    "num_key_value_heads": 2,
    "head_dim": 8,
    "num_experts": 4,
    "norm_topk_prob": True,
    "mlp_only_layers": [0],
}
_DEEPSEEK_V3 = _COMMON | {
    "model_type": "deepseek_v3",
    "q_lora_rank": 12,
    "kv_lora_rank": 8,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 4,
    "v_head_dim": 6,
    "n_routed_experts": 4,
    "n_group": 2,
    "topk_group": 1,
    "n_shared_experts": 2,
    "first_k_dense_replace": 1,
}
_MODELS = {
    "qwen3_moe": _QWEN3_MOE,
    "deepseek_v3": _DEEPSEEK_V3,
    "moonlight": _DEEPSEEK_V3 | {"q_lora_rank": None},
}
_PARALLEL = (
    {"tp_size": 2, "ep_size": 2},
    {"tp_size": 2, "etp_size": 2},
    {"tp_size": 2, "dp_size": 2, "ep_size": 2, "etp_size": 2},
)
# Enumerations of the compiled extension that Transformer Engine's Python compares with its own.
_ENUMS = {
    "DType": ["kByte", "kInt32", "kFloat32", "kFloat16", "kBFloat16", "kFloat8E4M3", "kFloat8E5M2", "kFloat4E2M1"],
    "NVTE_Fused_Attn_Backend": ["NVTE_No_Backend", "NVTE_F16_arbitrary_seqlen", "NVTE_FP8"],
}
# What Transformer Engine asks of CUDA before it builds a module.
_CUDA = {"is_available": lambda: True, "get_device_capability": lambda *_: (9, 0)}
_ATTRIBUTES = ("tensor_model_parallel", "partition_dim", "partition_stride", "sequence_parallel", "allreduce")


def main() -> None:
    """Record every model under every parallel configuration."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--te", type=Path, required=True, help="folder of the unpacked transformer_engine wheel")
    parser.add_argument("--output", type=Path, required=True, help="folder of the records")
    args = parser.parse_args()
    warnings.filterwarnings("ignore")
    logging.disable(logging.WARNING)
    te_version = _import_transformer_engine(args.te)
    import megatron.core

    record = {
        "transformer_engine": te_version,
        "megatron_core": megatron.core.__version__,
        "models": _MODELS,
        "runs": [
            {"model": model, "parallel": parallel, "groups": _record_ranks(model, ParallelConfig(**parallel))}
            for model in _MODELS
            for parallel in _PARALLEL
        ],
    }
    path = args.output / f"megatron_core_{megatron.core.__version__}.json"
    path.write_text(_render(record))
    print(f"wrote {path}")


def _render(record: object) -> str:
    """Return indented JSON with one line per tensor."""
    text = json.dumps(record, indent=1)
    return re.sub(r"\n {7,}|\n {6}(?=[}\d])|\n {5}(?=\])", " ", text) + "\n"


def _import_transformer_engine(folder: Path) -> str:
    """Import Transformer Engine's Python with a stand-in for its compiled extension; return its version."""
    os.environ["NVTE_PROJECT_BUILDING"] = "1"  # does not load the core library
    sys.path.insert(0, str(folder))
    import transformer_engine
    from transformer_engine import common

    common.load_framework_extension = lambda framework: None
    extension = mock.MagicMock(**{name: enum.IntEnum(name, members, start=0) for name, members in _ENUMS.items()})
    for name, module in (
        ("transformer_engine_torch", extension),
        ("onnxscript", mock.MagicMock()),
        ("onnx", mock.MagicMock()),
    ):
        module.__spec__ = ModuleSpec(name, None)
        sys.modules[name] = module
    import transformer_engine.pytorch

    return str(transformer_engine.__version__)


def _record_ranks(model: str, parallel: ParallelConfig) -> list[dict[str, Any]]:
    """Return what each rank has; ranks that have the same share an entry."""
    groups: list[dict[str, Any]] = []
    for rank in range(parallel_sizes(parallel).world_size):
        tensors = _record_rank(model, parallel, rank)
        same = next((group for group in groups if group["tensors"] == tensors), None)
        if same:
            same["ranks"].append(rank)
        else:
            groups.append({"ranks": [rank], "tensors": tensors})
    return groups


def _record_rank(model: str, parallel: ParallelConfig, rank: int) -> dict[str, Any]:
    """Build one rank's model and return, per local name, what is known of the tensor."""
    from megatron.core import parallel_state
    from megatron.core.process_groups_config import ProcessGroupCollection
    from megatron.core.transformer import multi_latent_attention

    from hybridrl.engines.megatron import cpu
    from hybridrl.engines.megatron.model import build_chunks, named_tensors
    from hybridrl.engines.megatron.process_groups import ProcessGroups, stop_process_group
    from hybridrl.engines.megatron.transformer_config import transformer_config

    cpu.install()
    # The adaptation says that Transformer Engine is absent.
    multi_latent_attention.HAVE_TE = True
    spec, layer_spec = model_spec(_MODELS[model]), LayerSpec.TRANSFORMER_ENGINE
    sizes = parallel_sizes(parallel)
    layout = MegatronLayout(spec, sizes, DType.BFLOAT16, layer_spec)
    config = transformer_config(spec, parallel, Precision.BFLOAT16, Platform.CUDA, layer_spec)
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=sizes.world_size)
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=sizes.tp,
        expert_model_parallel_size=sizes.ep,
        expert_tensor_parallel_size=sizes.etp,
        create_gloo_process_groups=False,
    )
    collection = ProcessGroupCollection.use_mpu_process_groups()
    groups = ProcessGroups(rank, sizes, sizes.coordinates(rank), collection, torch.device("cpu"))
    with mock.patch.multiple(torch.cuda, **_CUDA):
        (chunk,) = chunks = build_chunks(layout, config, groups, seed=1)
    parameters = {f"0.{name}": parameter for name, parameter in chunk.named_parameters()}
    tensors = {name: _describe(parameters.get(name, tensor)) for name, tensor in named_tensors(chunks).items()}
    stop_process_group()
    return tensors


def _describe(tensor: torch.Tensor) -> dict[str, Any]:
    attributes = {name: getattr(tensor, name) for name in _ATTRIBUTES if hasattr(tensor, name)}
    return {"shape": list(tensor.shape), "dtype": str(tensor.dtype).removeprefix("torch."), **attributes}


if __name__ == "__main__":
    main()
