"""The layouts that a run of a configuration will have, declared from the configuration alone."""

from __future__ import annotations

from hybridrl.config.choices import Platform, Precision
from hybridrl.config.schema import ExperimentConfig
from hybridrl.errors import LayoutError
from hybridrl.layout.box import DType
from hybridrl.layout.families import read_model_spec
from hybridrl.layout.megatron import LayerSpec, MegatronLayout
from hybridrl.layout.megatron.pipeline import pipeline_layout
from hybridrl.layout.model import ModelSpec
from hybridrl.layout.parallel import parallel_sizes
from hybridrl.layout.roles import PlacedRole
from hybridrl.layout.value_model import new_value_model_spec, read_value_model_spec
from hybridrl.layout.vllm import VllmLayout

DTYPES = {Precision.FLOAT32: DType.FLOAT32, Precision.BFLOAT16: DType.BFLOAT16}


def role_spec(placed: PlacedRole) -> ModelSpec:
    """Declare the model of a role; one with a value head has a new one where its files are not there.

    Raises:
        LayoutError: When its configuration cannot be read.
    """
    if not placed.role.has_values:
        return read_model_spec(placed.folder)
    try:
        return read_value_model_spec(placed.folder)
    except LayoutError:
        return new_value_model_spec(placed.folder)


def role_layout(config: ExperimentConfig, placed: PlacedRole, spec: ModelSpec) -> MegatronLayout:
    """Return the layout of a Megatron role; devices are taken to have Transformer Engine."""
    is_cuda = config.platform is Platform.CUDA
    return MegatronLayout(
        spec,
        parallel_sizes(placed.parallel),
        DTYPES[config.model.precision],
        LayerSpec.TRANSFORMER_ENGINE if is_cuda else LayerSpec.LOCAL,
        pipeline=pipeline_layout(placed.parallel),
    )


def generation_layout(config: ExperimentConfig, spec: ModelSpec) -> VllmLayout:
    """Return the layout of a replica."""
    return VllmLayout(spec, config.rollout.tp_size, DTYPES[config.rollout.precision])
