"""The layouts that a run of a configuration will have, declared from the configuration alone."""

from __future__ import annotations

from hybridrl.config.schema import ExperimentConfig, Placement, Platform, Precision
from hybridrl.layout.box import DType
from hybridrl.layout.megatron import LayerSpec, MegatronLayout
from hybridrl.layout.megatron.pipeline import pipeline_layout
from hybridrl.layout.model import ModelSpec
from hybridrl.layout.parallel import parallel_sizes
from hybridrl.layout.vllm import VllmLayout

DTYPES = {Precision.FLOAT32: DType.FLOAT32, Precision.BFLOAT16: DType.BFLOAT16}


def training_layout(config: ExperimentConfig, spec: ModelSpec) -> MegatronLayout:
    """Return the actor's layout; devices are taken to have Transformer Engine."""
    is_cuda = config.platform is Platform.CUDA
    return MegatronLayout(
        spec,
        parallel_sizes(config.actor.parallel),
        DTYPES[config.model.precision],
        LayerSpec.TRANSFORMER_ENGINE if is_cuda else LayerSpec.LOCAL,
        pipeline=pipeline_layout(config.actor.parallel),
    )


def generation_layout(config: ExperimentConfig, spec: ModelSpec) -> VllmLayout:
    """Return the layout of a replica."""
    return VllmLayout(spec, config.rollout.tp_size, DTYPES[config.rollout.precision])


def are_devices_shared(config: ExperimentConfig) -> bool:
    """Whether a training rank and a generation worker use the same device; on a CPU each has memory of its own."""
    return config.placement is Placement.COLOCATED and config.platform is Platform.CUDA
