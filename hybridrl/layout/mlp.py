"""Feed-forward part of one layer, in the words of its Hugging Face checkpoint."""

from __future__ import annotations

import enum
from collections.abc import Iterator
from dataclasses import dataclass, field

from hybridrl.layout.box import DType
from hybridrl.layout.shard import CanonicalTensor


class RouterScoring(enum.Enum):
    """How router logits become expert scores."""

    SOFTMAX = "softmax"
    SIGMOID = "sigmoid"


class ExpertActivation(enum.Enum):
    """What an expert does with gate and up."""

    SWIGLU = "swiglu"
    CLAMPED_SWIGLU = "clamped_swiglu"  # min(gate, limit) * sigmoid(alpha * gate) * (clamp(up) + 1), as in GPT-OSS


class ExpertStorage(enum.Enum):
    """How the checkpoint holds the experts of a layer."""

    PER_EXPERT = "per_expert"
    STACKED = "stacked"


@dataclass(frozen=True, slots=True)
class Projections:
    """Names of the three matrices of a SwiGLU MLP."""

    gate: str = "gate_proj"
    up: str = "up_proj"
    down: str = "down_proj"


@dataclass(frozen=True, slots=True)
class GatedMlp:
    """A dense SwiGLU MLP; `prefix` is e.g. ``model.layers.3.mlp``."""

    prefix: str
    hidden_size: int
    intermediate_size: int
    projections: Projections = field(default_factory=Projections)

    @property
    def gate(self) -> str:
        """Name of the gate weight, [intermediate, hidden]."""
        return f"{self.prefix}.{self.projections.gate}.weight"

    @property
    def up(self) -> str:
        """Name of the up weight, [intermediate, hidden]."""
        return f"{self.prefix}.{self.projections.up}.weight"

    @property
    def down(self) -> str:
        """Name of the down weight, [hidden, intermediate]."""
        return f"{self.prefix}.{self.projections.down}.weight"

    def tensors(self) -> Iterator[CanonicalTensor]:
        """Yield the tensors of the checkpoint."""
        yield CanonicalTensor(self.gate, (self.intermediate_size, self.hidden_size))
        yield CanonicalTensor(self.up, (self.intermediate_size, self.hidden_size))
        yield CanonicalTensor(self.down, (self.hidden_size, self.intermediate_size))


@dataclass(frozen=True, slots=True)
class MoeMlp:
    """A routed mixture of SwiGLU experts, perhaps with experts that all tokens share.

    Stacked experts are four tensors: ``gate_up_proj`` [experts, hidden, 2 * intermediate] with gate and up in alternate
    columns, ``gate_up_proj_bias``, ``down_proj`` [experts, intermediate, hidden] and ``down_proj_bias``. In the canonical
    space the alternation is a dimension of its own, [..., intermediate, 2], so that gate and up are boxes.

    Attributes:
        prefix: e.g. ``model.layers.3.mlp``; expert e is ``{prefix}.experts.{e}``.
        router: Canonical name of the router weight, e.g. ``model.layers.3.mlp.gate.weight``.
        intermediate_size: Per expert.
        num_experts_per_token: Top-k.
        is_topk_normalized: Whether the chosen probabilities are rescaled to sum to one.
        shared: The shared experts as one MLP.
        shared_gate: Name of the weight [1, hidden] whose sigmoid scales the shared experts' output.
        router_bias: Name of a bias added to the logits.
        correction_bias: Name of the float32 bias that is added to the scores for the choice alone.
        activation_limit: Of a clamped activation, where it clamps.
        num_groups: Experts are chosen within the best `num_groups_per_token` of so many groups.
        num_scores_per_group: A group is as good as the sum of so many of its best scores.
        routed_scaling: Factor on the output of the routed experts.
        is_router_float32: Whether vLLM keeps the router weight in float32 whatever the model's type.
    """

    prefix: str
    router: str
    hidden_size: int
    intermediate_size: int
    num_experts: int
    num_experts_per_token: int
    is_topk_normalized: bool
    projections: Projections = field(default_factory=Projections)
    storage: ExpertStorage = ExpertStorage.PER_EXPERT
    activation: ExpertActivation = ExpertActivation.SWIGLU
    activation_limit: float | None = None
    shared: GatedMlp | None = None
    shared_gate: str | None = None
    router_bias: str | None = None
    correction_bias: str | None = None
    scoring: RouterScoring = RouterScoring.SOFTMAX
    num_groups: int = 1
    num_groups_per_token: int = 1
    num_scores_per_group: int = 1
    routed_scaling: float = 1.0
    is_router_float32: bool = False

    def expert(self, index: int) -> GatedMlp:
        """Return one routed expert of a checkpoint that keeps them apart."""
        assert self.storage is ExpertStorage.PER_EXPERT, self.prefix
        return GatedMlp(f"{self.prefix}.experts.{index}", self.hidden_size, self.intermediate_size, self.projections)

    def stacked(self, part: str) -> str:
        """Return the name of a stacked tensor, e.g. "gate_up_proj_bias"."""
        return f"{self.prefix}.experts.{part}"

    def tensors(self) -> Iterator[CanonicalTensor]:
        """Yield the tensors of the checkpoint."""
        yield from self.router_tensors()
        yield from self.routed_tensors()
        yield from self.shared_tensors()

    def router_tensors(self) -> Iterator[CanonicalTensor]:
        """Yield the tensors of the router."""
        yield CanonicalTensor(self.router, (self.num_experts, self.hidden_size))
        if self.router_bias:
            yield CanonicalTensor(self.router_bias, (self.num_experts,))
        if self.correction_bias:
            yield CanonicalTensor(self.correction_bias, (self.num_experts,), dtype=DType.FLOAT32)

    def routed_tensors(self) -> Iterator[CanonicalTensor]:
        """Yield the tensors of the routed experts, which expert parallelism spreads."""
        if self.storage is ExpertStorage.STACKED:
            yield from self._stacked_tensors()
        else:
            for index in range(self.num_experts):
                yield from self.expert(index).tensors()

    def shared_tensors(self) -> Iterator[CanonicalTensor]:
        """Yield the tensors of the experts that all tokens share."""
        if self.shared:
            yield from self.shared.tensors()
        if self.shared_gate:
            yield CanonicalTensor(self.shared_gate, (1, self.hidden_size))

    def _stacked_tensors(self) -> Iterator[CanonicalTensor]:
        experts, hidden, size = self.num_experts, self.hidden_size, self.intermediate_size
        yield CanonicalTensor(self.stacked("gate_up_proj"), (experts, hidden, size, 2), (experts, hidden, 2 * size))
        yield CanonicalTensor(self.stacked("gate_up_proj_bias"), (experts, size, 2), (experts, 2 * size))
        yield CanonicalTensor(self.stacked("down_proj"), (experts, size, hidden))
        yield CanonicalTensor(self.stacked("down_proj_bias"), (experts, hidden))
