"""Weight sync on the real stack: Megatron ranks to vLLM replicas, byte for byte, while replicas die and come back.

The actor starts from other weights than the replicas do, so what a replica holds after a sync can only have come through it.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import ray

from hybridrl.algos.policy_loss import PolicyLossConfig
from hybridrl.config.choices import Platform, Precision, TaskName
from hybridrl.config.schema import (
    ActorConfig,
    ExperimentConfig,
    ModelConfig,
    ParallelConfig,
    RolloutConfig,
    TrainerConfig,
    WeightSyncConfig,
)
from hybridrl.controller.launches import megatron_launch
from hybridrl.controller.startup import connect, sync_session
from hybridrl.controller.weight_sync import WeightSyncer
from hybridrl.data.sample import Prompt
from hybridrl.data.tasks.demo_tokenizer import write_demo_tokenizer
from hybridrl.errors import WeightSyncError
from hybridrl.layout.cost import sequence_cost
from hybridrl.layout.families import read_model_spec
from hybridrl.layout.roles import megatron_roles
from hybridrl.roles import rollout_group
from hybridrl.roles.future import wait_all, wait_for, wait_for_both
from hybridrl.roles.megatron_policy import MegatronActor
from hybridrl.roles.megatron_pool import MegatronPool
from hybridrl.roles.placement import place_pool
from hybridrl.roles.resources import Cluster
from hybridrl.roles.rollout_group import RolloutReplicas
from hybridrl.roles.rollout_replica import RolloutLaunch
from tests.e2e.observed_replicas import ObservedReplica
from tests.e2e.tiny_models import save_qwen3_moe
from tests.family_models import FAMILIES, make_model

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]

PROMPTS = [Prompt(f"p{i}", (1, 9, 30, 31 + i), "", "", "test") for i in range(4)]


def save_deepseek_v3(folder: Path, seed: int) -> Path:
    """Write a model with latent attention, a dense first layer, shared experts and a correction bias.

    Its rotary embedding is plain, as Moonlight's: vLLM's CPU operator for it is wrong and must be off in replicas.
    """
    plain = {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}}
    make_model(FAMILIES["deepseek_v3"] | plain, seed=seed).save_pretrained(folder)
    return folder


CASES = {
    "qwen3-moe-tp2-ep2": (save_qwen3_moe, ParallelConfig(tp_size=2, ep_size=2)),
    "deepseek-v3-tp2-ep2": (save_deepseek_v3, ParallelConfig(tp_size=2, ep_size=2)),
}
"""Name -> how to save a checkpoint of a seed, and the layout of the ranks that train it."""


@dataclass
class Stack:
    """Roles that are up and connected; the replicas started from the other checkpoint."""

    config: ExperimentConfig
    actor: MegatronActor
    rollout: RolloutReplicas
    syncer: WeightSyncer

    def on_replica(self, replica: int, method: str, *arguments: object) -> Any:
        return ray.get(getattr(self.rollout._actors[replica], method).remote(*arguments), timeout=60)

    def actor_pids(self) -> list[int]:
        calls = [handle.__ray_call__.remote(lambda worker: os.getpid()) for handle in self.actor._group._actors]
        pids: list[int] = ray.get(calls, timeout=60)
        return pids

    def sampled_versions(self) -> set[int]:
        calls = [self.rollout.generate(replica, PROMPTS, 1) for replica in self.rollout.replicas]
        wait_all(calls)
        samples = [sample for call in calls for sample in call.value()]
        return {int(sample.policy_versions.max()) for sample in samples}


@pytest.fixture(scope="module", params=CASES)
def stack(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    save, parallel = CASES[request.param]
    folder = tmp_path_factory.mktemp(request.param)
    folders = [save(folder / name, seed) for seed, name in enumerate(("trained", "initial"))]
    for each in folders:
        write_demo_tokenizer(each)
    config = ExperimentConfig(
        platform=Platform.CPU,
        model=ModelConfig(path=str(folders[0]), precision=Precision.FLOAT32),
        actor=ActorConfig(parallel=parallel),
        rollout=RolloutConfig(
            num_replicas=2, tp_size=2, precision=Precision.FLOAT32, max_response_tokens=4, max_model_tokens=64,
            max_running_samples=8, enforce_eager=True,
        ),
        weight_sync=WeightSyncConfig(chunk_mib=1, timeout_s=100.0, probe_every=1),
        trainer=TrainerConfig(startup_timeout_s=200.0),
    )  # fmt: skip
    placed = place_pool(config.platform, 2, 2, 2)
    with (
        pytest.MonkeyPatch.context() as patch,
        sync_session() as session,
        Cluster(None, placed.num_cpus, folder / "logs") as cluster,
    ):
        patch.setattr(rollout_group, "RolloutReplica", ObservedReplica)
        pool = cluster.pool(placed.bundles, 60.0)
        launch = RolloutLaunch(folders[1], config.rollout, Platform.CPU, TaskName.FILE, 1)
        rollout = RolloutReplicas(pool, placed.replicas, launch, timeouts=config.trainer)
        training = megatron_launch(config, megatron_roles(config), num_updates=1)
        ranks = MegatronPool(pool, placed.ranks, training, timeouts=config.trainer)
        cost = sequence_cost(read_model_spec(folders[0]))
        actor = MegatronActor(ranks, cost, temperature=1.0, loss=PolicyLossConfig())
        try:
            pending = rollout.start()
            _, rollout_maps = wait_for_both(ranks.start(), pending)
            syncer = connect(
                actor, rollout, wait_for(actor.shard_maps()), rollout_maps, config, session, PROMPTS[0].token_ids
            )
            yield Stack(config, actor, rollout, syncer)
        finally:
            rollout.close()
            ranks.close()


def test_replicas_die_and_come_back_and_hold_what_a_fresh_load_of_the_export_holds(
    stack: Stack, tmp_path: Path
) -> None:
    """One test, since each step needs the one before: 2 replicas, 1 after SIGKILL, 2 again; the ranks that train stay."""
    rollout, syncer, pids = stack.rollout, stack.syncer, stack.actor_pids()
    before = stack.on_replica(0, "digests")
    report = syncer.sync(1)
    assert report.is_verified and report.wire_bytes == report.lower_bound_bytes
    assert report.probe_abs_max is not None and report.probe_abs_max < 1e-3
    synced = stack.on_replica(0, "digests")
    assert stack.on_replica(1, "digests") == synced != before
    assert stack.sampled_versions() == {1}

    os.kill(stack.on_replica(1, "pid"), signal.SIGKILL)
    rollout.remove(1)
    syncer.connect(rollout.shard_maps)
    alone = syncer.sync(2)
    assert alone.is_verified and alone.wire_bytes == alone.lower_bound_bytes == report.wire_bytes // 2
    assert stack.sampled_versions() == {2}

    wait_for(stack.actor.save_checkpoint(tmp_path / "export"))
    write_demo_tokenizer(tmp_path / "export")
    rollout._launch = replace(rollout._launch, folder=tmp_path / "export")
    wait_for(rollout.add(1))
    assert stack.on_replica(1, "digests") == synced, "vLLM's own load of the export differs from what was synced"

    waiting = rollout.generate(1, PROMPTS, 1)
    assert not waiting.poll(1.0), "a replica generated before its first commit"
    syncer.connect(rollout.shard_maps)
    again = syncer.sync(3)
    assert again.is_verified and again.wire_bytes == report.wire_bytes
    assert {int(sample.policy_versions.max()) for sample in wait_for(waiting)} == {3}
    assert stack.sampled_versions() == {3}
    assert stack.actor_pids() == pids


def test_the_probe_sees_a_wrong_scale_that_checksums_do_not(stack: Stack) -> None:
    stack.on_replica(1, "spoil", 1.5)
    with pytest.raises(WeightSyncError, match=r"^probe of version 4: .*replica 1 of those connected"):
        stack.syncer.sync(4)
    stack.on_replica(1, "spoil", 1.0)
    report = stack.syncer.sync(5)
    assert report.probe_abs_max is not None and report.probe_abs_max < 1e-3
