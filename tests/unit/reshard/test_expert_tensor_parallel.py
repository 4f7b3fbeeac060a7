"""Experts of Transformer Engine's grouped layers when expert tensor parallelism changes."""

import numpy as np
import pytest

from hybridrl.layout.box import DType
from hybridrl.layout.families import model_spec
from hybridrl.layout.megatron import LayerSpec, MegatronLayout, megatron_shard_map
from hybridrl.layout.parallel import ParallelSizes
from hybridrl.layout.shard import Place
from hybridrl.reshard.planner import build_plan
from tests.unit.layout.models import FAMILIES, random_canonical
from tests.unit.reshard.simulation import carry_out


def _maps(spec, role, sizes):
    layout = MegatronLayout(spec, sizes, DType.FLOAT32, layer_spec=LayerSpec.TRANSFORMER_ENGINE)
    return [megatron_shard_map(layout, Place(role, r, "node", f"{role}-{r}")) for r in range(sizes.world_size)]


def _halves(weight, etp, rank):
    """Cut fused gate and up as two strided parts, which is what a rank holds."""
    gate, up = np.split(weight, 2)
    return np.concatenate([np.split(gate, etp)[rank], np.split(up, etp)[rank]])


@pytest.mark.parametrize(("etp", "new_etp"), [(2, 1), (1, 2), (2, 4)])
def test_gate_stays_above_up_when_expert_tensor_parallelism_changes(etp, new_etp):
    spec = model_spec(FAMILIES["qwen3_moe"])
    canonical = random_canonical(spec)
    sources = _maps(spec, "actor", ParallelSizes(tp=etp, etp=etp))
    destinations = _maps(spec, "other", ParallelSizes(tp=new_etp, etp=new_etp))
    prefix, name = "model.layers.1.mlp.experts.3", "0.decoder.layers.1.mlp.experts"
    gate, up, down = (canonical[f"{prefix}.{part}_proj.weight"] for part in ("gate", "up", "down"))
    fused = np.concatenate([gate, up])
    have = [
        {n: np.zeros(t.shape, np.float32) for n, t in own.tensors.items()}
        | {
            f"{name}.linear_fc1.weight3": _halves(fused, etp, rank),
            f"{name}.linear_fc2.weight3": np.ascontiguousarray(np.split(down, etp, axis=1)[rank]),
        }
        for rank, own in enumerate(sources)
    ]
    got = carry_out(build_plan(sources, destinations), have, destinations)
    for rank, local in enumerate(got):
        assert np.array_equal(local[f"{name}.linear_fc1.weight3"], _halves(fused, new_etp, rank))
        assert np.array_equal(local[f"{name}.linear_fc2.weight3"], np.split(down, new_etp, axis=1)[rank])
    if new_etp == 1:
        # The weights carry partition_stride 1; to follow that and join along the rows gives g0 u0 g1 u1.
        joined = np.concatenate([local[f"{name}.linear_fc1.weight3"] for local in have])
        assert not np.array_equal(got[0][f"{name}.linear_fc1.weight3"], joined)
