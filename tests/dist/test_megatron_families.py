"""Declared Megatron layouts of models with shared experts, latent attention and more, against megatron-core's own modules."""

from __future__ import annotations

import megatron.core
import pytest
import torch

from hybridrl.config.schema import ParallelConfig
from hybridrl.layout.box import DType
from hybridrl.layout.families import model_spec
from hybridrl.layout.megatron import MegatronLayout, megatron_shard_map
from hybridrl.layout.parallel import parallel_sizes
from tests.dist.gloo import run_ranks
from tests.dist.megatron_families import real_tensors
from tests.dist.megatron_ranks import place
from tests.unit.layout.models import FAMILIES, MTP_FAMILIES

# megatron-core renamed the inner layer of multi-token prediction in 0.19.
MTP_INNER_NAME = "transformer_layer" if megatron.core.__version__ < "0.19" else "mtp_model_layer"
DTYPES = {torch.float32: DType.FLOAT32, torch.bfloat16: DType.BFLOAT16}
CASES = {
    "shared-experts": (FAMILIES["qwen2_moe"], ParallelConfig(tp_size=2, ep_size=2), False),
    "mla": (FAMILIES["deepseek_v3"], ParallelConfig(tp_size=2, pp_size=2, ep_size=2), False),
    "mla-without-q-lora": (FAMILIES["moonlight"], ParallelConfig(tp_size=2, etp_size=2), False),
    "mla-mtp": (MTP_FAMILIES["deepseek_v3"], ParallelConfig(tp_size=2, pp_size=2, ep_size=2), True),
    "glm": (FAMILIES["glm4_moe"], ParallelConfig(tp_size=2, ep_size=2), False),
    "biases-and-sinks": (FAMILIES["gpt_oss"], ParallelConfig(tp_size=2, ep_size=2), False),
}


@pytest.mark.parametrize("case", CASES)
def test_declared_names_shapes_and_dtypes_are_those_of_the_real_modules(case):
    model, parallel, has_mtp = CASES[case]
    if model is FAMILIES["moonlight"] and megatron.core.__version__ >= "0.19":
        pytest.skip("without Transformer Engine, megatron-core 0.19 cannot build MLA without q_lora")
    layout = MegatronLayout(
        model_spec(model, has_mtp=has_mtp), parallel_sizes(parallel), DType.BFLOAT16, mtp_inner_name=MTP_INNER_NAME
    )
    ranks = run_ranks(real_tensors, layout.sizes.world_size, model, parallel, has_mtp)
    for rank, real in enumerate(ranks):
        declared = megatron_shard_map(layout, place(rank)).tensors
        assert {name: (tensor.shape, tensor.dtype) for name, tensor in declared.items()} == {
            name: (shape, DTYPES[dtype]) for name, (shape, dtype) in real.items()
        }
