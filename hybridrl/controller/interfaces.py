"""What the controller sees of the world.

Everything that needs processes, files or a screen is behind one of these protocols, so that the loop, the sync protocol and
evaluation run on hand-written fakes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from hybridrl.data.batch import Floats, PolicyBatch, SequenceBatch, ValueBatch
from hybridrl.data.generation import Completion
from hybridrl.data.sample import Prompt, Sample
from hybridrl.data.stream import StreamState
from hybridrl.layout.roles import ModelRole
from hybridrl.observability.records import Metric, RolloutRecord
from hybridrl.rewards.result import RewardResult
from hybridrl.roles.future import Future

if TYPE_CHECKING:
    from hybridrl.algos.algorithm import Credit
    from hybridrl.checkpoint.manifest import FileRecord
    from hybridrl.controller.batches import ScoredBatch
    from hybridrl.controller.run_state import RunState
    from hybridrl.controller.weight_sync import SyncReport
    from hybridrl.engines.megatron.results import UpdateMetrics, ValueMetrics
    from hybridrl.reshard.executor import TransferReport
    from hybridrl.reshard.plan import Plan
    from hybridrl.reshard.transports import Rendezvous
    from hybridrl.roles.megatron_policy import TokenLogprobs
    from hybridrl.roles.megatron_state import RoleSave


class ActorGroup(Protocol):
    """The trained policy; see :class:`hybridrl.roles.megatron_policy.MegatronActor`."""

    def logprobs(self, batch: SequenceBatch) -> Future[TokenLogprobs]:
        """Compute log-probs under the actor."""
        ...

    def update(self, batch: PolicyBatch, *, want_logprobs: bool = False) -> Future[UpdateMetrics]:
        """Take one optimizer step; the answer has the log-probs before it where they are wanted."""
        ...


class SavedModel(Protocol):
    """A trained model as checkpoints see it; see :class:`hybridrl.roles.megatron_state.MegatronState`."""

    @property
    def role(self) -> ModelRole:
        """The model's."""
        ...

    def begin_save(self, folder: Path) -> Future[None]:
        """Copy the training state; it is written into `folder` while training goes on."""
        ...

    def poll_save(self, wait_s: float) -> Future[RoleSave]:
        """Return how the save that was begun last stands, after at most `wait_s` seconds."""
        ...

    def damage_of(self, folder: Path, files: Mapping[str, FileRecord]) -> Future[list[str]]:
        """Read files and return what is wrong with them."""
        ...

    def load_state(self, paths: Sequence[Path]) -> Future[None]:
        """Take over the training state that the ranks of any layout wrote."""
        ...


class ReferenceGroup(Protocol):
    """The frozen starting policy; see :class:`hybridrl.roles.megatron_policy.MegatronPolicy`."""

    def logprobs(self, batch: SequenceBatch) -> Future[TokenLogprobs]:
        """Compute log-probs under the reference."""
        ...


class CriticGroup(Protocol):
    """The trained values; see :class:`hybridrl.roles.megatron_value.MegatronCritic`."""

    def values(self, batch: SequenceBatch) -> Future[Floats]:
        """Compute the value of the state after every token, [num_samples, max_tokens]."""
        ...

    def update(self, batch: ValueBatch) -> Future[ValueMetrics]:
        """Take one optimizer step."""
        ...


class RewardModelGroup(Protocol):
    """A frozen model that scores; see :class:`hybridrl.roles.megatron_value.MegatronRewardModel`."""

    def rewards(self, batch: SequenceBatch) -> Future[Floats]:
        """Compute the value after the last token of each row, [num_samples]."""
        ...


class SupervisedActor(Protocol):
    """A model that learns from demonstrations."""

    def update_supervised(self, batch: SequenceBatch, loss_weights: Floats) -> Future[UpdateMetrics]:
        """Take one optimizer step on the weighted negative log-likelihood."""
        ...


class WeightSource(Protocol):
    """The side of a weight sync that has the new weights; see :class:`hybridrl.roles.megatron_policy.MegatronActor`."""

    @property
    def dp_size(self) -> int:
        """Data-parallel degree."""
        ...

    def rendezvous(self) -> tuple[str, int]:
        """Return an address where source 0 can listen and a free port there."""
        ...

    def connect_sync(
        self, rendezvous: Rendezvous, parts: Sequence[Plan], *, verify: bool, timeout_s: float
    ) -> Future[None]:
        """Connect each rank to its part of a plan; earlier connections are closed."""
        ...

    def logprobs(self, batch: SequenceBatch) -> Future[TokenLogprobs]:
        """Compute log-probs under the weights that would be sent."""
        ...

    def send_weights(self, version: int, timeout_s: float) -> Future[list[TransferReport]]:
        """Send all weights as `version`; one report per rank."""
        ...


class RolloutGroup(Protocol):
    """The replicas that generate; see :class:`hybridrl.roles.rollout_group.RolloutReplicas`."""

    def generate(
        self, prompts: Sequence[Prompt], samples_per_prompt: int, *, with_greedy: bool = False
    ) -> Future[list[Sample]]:
        """Play samples; the answer has those of a prompt next to each other, in the order of the prompts.

        Args:
            with_greedy: Play one more sample of each prompt, greedily.
        """
        ...


class WeightDestination(Protocol):
    """The side of a weight sync that gets the new weights; see :class:`hybridrl.roles.rollout_group.RolloutReplicas`."""

    @property
    def num_replicas(self) -> int:
        """Replicas that are there."""
        ...

    def connect_sync(self, rendezvous: Rendezvous, parts: Sequence[Plan], *, timeout_s: float) -> Future[None]:
        """Connect each worker to its part of a plan; earlier connections are closed."""
        ...

    def probe(self, token_ids: Sequence[int], num_tokens: int, timeout_s: float) -> Future[list[Completion]]:
        """Let every replica continue a prompt; one answer per replica."""
        ...

    def pause(self, timeout_s: float) -> Future[None]:
        """Let running completions finish and hold new ones."""
        ...

    def receive_weights(self, version: int, *, verify: bool, timeout_s: float) -> Future[list[TransferReport]]:
        """Receive all weights as `version`; one report per worker."""
        ...

    def commit(self, version: int, timeout_s: float) -> Future[None]:
        """Put the received weights in force and drop every cached prefix."""
        ...

    def resume(self, timeout_s: float) -> Future[None]:
        """Go on generating."""
        ...


class WeightSync(Protocol):
    """Brings new weights from the actor to all replicas; see :class:`hybridrl.controller.weight_sync.WeightSyncer`."""

    def sync(self, version: int) -> SyncReport:
        """Bring the actor's weights into force as `version`.

        Raises:
            WeightSyncError: Nothing was committed.
        """
        ...


class ProfiledGroup(Protocol):
    """Processes that can profile themselves; see :class:`hybridrl.roles.megatron_pool.MegatronPool`."""

    def begin_profile(self, step: int) -> Future[None]:
        """Profile the calls of a step on the ranks that are profiled."""
        ...

    def end_profile(self) -> Future[None]:
        """Profile no more calls."""
        ...


class PromptStream(Protocol):
    """Training prompts without end."""

    @property
    def state(self) -> StreamState:
        """Where the stream stands."""
        ...

    def take(self, num_prompts: int) -> list[Prompt]:
        """Return the next prompts."""
        ...


class Checkpoints(Protocol):
    """What keeps the run's state between steps; see :class:`hybridrl.controller.checkpointing.Checkpointer`."""

    def after_step(self, state: RunState, *, is_last: bool) -> None:
        """Save the run if it is due."""
        ...

    def finish(self) -> None:
        """Wait until everything that was begun is on disk."""
        ...


class Scorer(Protocol):
    """Rewards of finished samples; see :mod:`hybridrl.rewards.score`."""

    def score(self, samples: Sequence[Sample]) -> RewardResult:
        """Return the reward of each sample, and which samples could not be scored and are to be dropped."""
        ...


class StepReplays(Protocol):
    """Files of chosen steps; see :class:`hybridrl.controller.replays.ReplayFiles`."""

    def wants(self, step: int) -> bool:
        """Return whether a step is to be recorded."""
        ...

    def record(
        self,
        step: int,
        batch: ScoredBatch,
        policy: PolicyBatch,
        credit: Credit,
        values: Floats | None,
        updates: Sequence[UpdateMetrics],
    ) -> None:
        """Write a step if it is wanted; the updates then have log-probs.

        Args:
            values: [num_samples, max_tokens] of the state after each token; None without a critic.
        """
        ...


class Recorder(Protocol):
    """The run's folder and display; see :class:`hybridrl.observability.recorder.RunRecorder`."""

    def status(self, text: str) -> None:
        """Show what is going on outside steps."""
        ...

    def phase(self, name: str) -> AbstractContextManager[None]:
        """Time a part of the step."""
        ...

    def start_steps(self) -> None:
        """Start the clock of the next step."""
        ...

    def record_evaluation(
        self, version: int, metrics: Mapping[str, Metric], rollouts: Sequence[RolloutRecord] = ()
    ) -> None:
        """Keep the metrics and samples of an evaluation of policy `version` for the step that is recorded next."""
        ...

    def record_step(self, step: int, metrics: Mapping[str, Metric], rollouts: Sequence[RolloutRecord]) -> None:
        """Write everything about one finished step."""
        ...

    def close(self) -> Path:
        """Write what is pending and return the path of the report."""
        ...
