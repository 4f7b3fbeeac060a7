"""What a training rank must remember to go on: main parameters, moments, buffers, counters, random numbers.

The distributed optimizer of Megatron-core holds a flat range of each parameter per data-parallel rank: a float32 main parameter
(in float32 the parameter itself) and AdamW's two moments. The parameters of the model are these main parameters, rounded, so they
are not saved a second time. Neither saving nor loading communicates.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from megatron.core import tensor_parallel

from hybridrl.checkpoint.state_file import Kind, RankState, StateFiles
from hybridrl.engines.megatron.model import named_tensors
from hybridrl.engines.megatron.optimizer import Optimizer
from hybridrl.engines.megatron.process_groups import ProcessGroups
from hybridrl.layout.box import DType
from hybridrl.layout.flat import flat_shard_map
from hybridrl.layout.megatron import MegatronLayout
from hybridrl.layout.shard import ShardMap

_MOMENTS = (Kind.EXP_AVG, Kind.EXP_AVG_SQ)


class TrainingState:
    """The state of one rank's trained model.

    Args:
        shard_map: Of the model's tensors on this rank.
    """

    def __init__(
        self,
        chunks: list[torch.nn.Module],
        optimizer: Optimizer,
        shard_map: ShardMap,
        layout: MegatronLayout,
        groups: ProcessGroups,
    ) -> None:
        self._chunks = chunks
        self._optimizer = optimizer
        self._shard_map = shard_map
        self._layout = layout
        self._groups = groups

    def snapshot(self) -> RankState:
        """Copy the state into host memory; what happens to the rank afterwards does not change the copy."""
        held = {each.name: each for each in self._held()}
        tensors = {kind: {name: _host(each.of(kind)) for name, each in held.items()} for kind in Kind}
        buffers = self._buffers()
        tensors[Kind.PARAM] |= {name: _host(tensor) for name, tensor in buffers.items()}
        flat = self._flat_map(held)
        shards = tuple(shard for shard in self._shard_map.shards if shard.local in buffers)
        shard_map = replace(
            self._shard_map,
            tensors={**flat.tensors, **{name: self._shard_map.tensors[name] for name in buffers}},
            shards=flat.shards + shards,
            padding=flat.padding,
        )
        return RankState(shard_map, tensors, self._facts())

    def load(self, paths: list[Path]) -> None:
        """Take over the state that the ranks of any layout wrote; random numbers only from ranks of this very layout.

        Raises:
            CheckpointError: The files are of another model.
            LayoutError: A file is damaged.
            ReshardError: An element is missing.
        """
        files = StateFiles(paths, self._layout.spec)
        files.load(self._shard_map, {Kind.PARAM: named_tensors(self._chunks)})
        held = {each.name: each for each in self._held()}
        files.load(self._flat_map(held), {kind: {name: each.of(kind) for name, each in held.items()} for kind in Kind})
        facts = files.facts
        self._optimizer.num_attempts = facts[0]["num_attempts"]
        self._optimizer.num_skipped = facts[0]["num_skipped"]
        for each in held.values():
            each.set_num_steps(self._optimizer.num_attempts - self._optimizer.num_skipped)
        if [each["layout"] for each in facts] == [str(self._groups.sizes)] * self._groups.sizes.world_size:
            _set_random_state(facts[self._groups.rank]["random"])

    def _held(self) -> Iterator[_Held]:
        names = {
            id(parameter): f"{index}.{name}"
            for index, chunk in enumerate(self._chunks)
            for name, parameter in chunk.named_parameters()
        }
        for part in self._optimizer.parts():
            for parameter in part.model_param_gbuf_map:
                owned = part._get_model_param_range_map(parameter)["param"]
                group, place = part.model_param_group_index_map[parameter]
                yield _Held(names[id(parameter)], range(owned.start, owned.end), part, group, place)

    def _flat_map(self, held: Mapping[str, _Held]) -> ShardMap:
        return flat_shard_map(self._shard_map, {name: each.owned for name, each in held.items()}, DType.FLOAT32)

    def _buffers(self) -> dict[str, torch.Tensor]:
        parameters = {f"{i}.{name}" for i, chunk in enumerate(self._chunks) for name, _ in chunk.named_parameters()}
        return {name: tensor for name, tensor in named_tensors(self._chunks).items() if name not in parameters}

    def _facts(self) -> dict[str, Any]:
        return {
            "num_attempts": self._optimizer.num_attempts,
            "num_skipped": self._optimizer.num_skipped,
            "dtype": self._layout.dtype.value,
            "layout": str(self._groups.sizes),
            "random": _random_state(),
        }


@dataclass(frozen=True, slots=True)
class _Held:
    """A parameter of which this rank's optimizer holds a range.

    Attributes:
        part: Megatron's optimizer of dense or of expert parameters.
        group: Index of the parameter group; `place` is the index in it.
    """

    name: str
    owned: range
    part: Any
    group: int
    place: int

    @property
    def main(self) -> torch.Tensor:
        """The float32 range that AdamW works on."""
        main: torch.Tensor = self.part.optimizer.param_groups[self.group]["params"][self.place]
        return main

    def of(self, kind: Kind) -> torch.Tensor:
        """Return the live tensor of a kind; moments that AdamW has not made yet are made here."""
        if kind is Kind.PARAM:
            return self.main.detach()
        state = self.part.optimizer.state[self.main]
        if kind.value not in state:
            state |= {moment.value: torch.zeros_like(self.main) for moment in _MOMENTS}
            self.set_num_steps(0)
        moment: torch.Tensor = state[kind.value]
        return moment

    def set_num_steps(self, num_steps: int) -> None:
        """Set the steps that AdamW has taken, which correct its bias: torch counts per parameter, fused kernels per group."""
        optimizer = self.part.optimizer
        if isinstance(optimizer, torch.optim.Adam):
            device = self.main.device
            optimizer.state[self.main]["step"] = torch.tensor(float(num_steps), dtype=torch.float32, device=device)
        else:
            optimizer.param_groups[self.group]["step"] = num_steps


def _host(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().to("cpu", copy=True).contiguous()


def _random_state() -> dict[str, str]:
    tracked = tensor_parallel.get_cuda_rng_tracker().get_states()
    return {name: state.numpy().tobytes().hex() for name, state in {**tracked, "torch": torch.get_rng_state()}.items()}


def _set_random_state(states: Mapping[str, str]) -> None:
    tensors = {name: torch.tensor(list(bytes.fromhex(state)), dtype=torch.uint8) for name, state in states.items()}
    torch.set_rng_state(tensors.pop("torch"))
    tensor_parallel.get_cuda_rng_tracker().set_states(tensors)
