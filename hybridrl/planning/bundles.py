"""Large mixtures with experts in bundles: what is planned in the place of the model, in seconds instead of minutes.

Experts that every rank holds together are one expert of as many times the intermediate size. Both sides cut it as they cut each of
them, so each rank holds the same bytes and receives the same bytes over the same links. Only the predicted seconds of a weight sync
can differ, since a destination that begins in the middle of a layer cannot begin inside a bundle.

Worked example: 256 experts on 8 expert-parallel ranks, each cut 16 ways for generation. 32 experts in a row are one bundle; the
plan of 512 ranks has 0.6 million moves instead of 13 million.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, fields, replace

from hybridrl.config.schema import ExperimentConfig, ParallelConfig
from hybridrl.layout.mlp import ExpertStorage
from hybridrl.layout.model import DecoderLayer, ModelSpec, MoeMlp
from hybridrl.layout.shard import CanonicalTensor
from hybridrl.planning.parameters import PARAMETER_MULTIPLE

# Moves of a plan that take about a second.
_MOST_MOVES = 400_000


@dataclass(frozen=True, slots=True)
class ExpertBundles(MoeMlp):
    """A mixture in which several experts in a row count as one; its router still has a row for each expert."""

    bundle: int = 1

    def router_tensors(self) -> Iterator[CanonicalTensor]:
        """Yield the tensors of the router."""
        for tensor in MoeMlp.router_tensors(self):
            yield replace(tensor, shape=(self.bundle * tensor.shape[0], *tensor.shape[1:]))


def largest_bundle(parallel: ParallelConfig, spec: ModelSpec) -> int:
    """Return how many experts every rank holds together; 1 where they are stacked, or so small that alignment pads each."""
    experts = [layer.mlp for layer in spec.layers if isinstance(layer.mlp, MoeMlp)]
    if not experts or experts[0].storage is ExpertStorage.STACKED:
        return 1
    sizes = (mlp.hidden_size * mlp.intermediate_size // parallel.etp_size for mlp in experts)
    if any(size % PARAMETER_MULTIPLE for size in sizes):
        return 1
    return math.gcd(*(mlp.num_experts for mlp in experts)) // parallel.ep_size


def smallest_bundle(config: ExperimentConfig, spec: ModelSpec) -> int:
    """Return how many experts to plan as one in a weight sync: as few as keep its plan small."""
    num_experts = sum(layer.mlp.num_experts for layer in spec.layers if isinstance(layer.mlp, MoeMlp))
    num_moves = 3 * config.rollout.num_replicas * config.rollout.tp_size * num_experts
    largest = largest_bundle(config.actor.parallel, spec)
    fitting = (size for size in range(1, largest) if largest % size == 0 and num_moves / size <= _MOST_MOVES)
    return next(fitting, largest)


def bundled(spec: ModelSpec, bundle: int) -> ModelSpec:
    """Return a model whose experts are in bundles of so many."""
    return spec if bundle == 1 else replace(spec, layers=tuple(_bundled_layer(layer, bundle) for layer in spec.layers))


def _bundled_layer(layer: DecoderLayer, bundle: int) -> DecoderLayer:
    mlp = layer.mlp
    if not isinstance(mlp, MoeMlp):
        return layer
    values = {field.name: getattr(mlp, field.name) for field in fields(MoeMlp)}
    values["num_experts"] //= bundle
    values["intermediate_size"] *= bundle
    return replace(layer, mlp=ExpertBundles(**values, bundle=bundle))
