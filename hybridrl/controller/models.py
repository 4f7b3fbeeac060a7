"""The Megatron models as one step of the loop asks them: every forward pass that the algorithm needs, and the updates.

    forward   actor (old_logprobs), reference (ref_logprobs), critic (values)
    update    actor and critic, mini-batch by mini-batch

What goes to several models is asked for at once: models in pools of their own compute at the same time, models of one pool in turn.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from itertools import zip_longest
from typing import TYPE_CHECKING, Any

from hybridrl.algos.algorithm import Algorithm
from hybridrl.controller.batches import ScoredBatch, mini_batches
from hybridrl.controller.interfaces import ActorGroup, CriticGroup, ReferenceGroup
from hybridrl.data.batch import Floats, PolicyBatch, ValueBatch
from hybridrl.roles.future import Future, wait_all, wait_for

if TYPE_CHECKING:
    from hybridrl.engines.megatron.results import UpdateMetrics, ValueMetrics
    from hybridrl.roles.megatron_policy import TokenLogprobs

Phase = Callable[[str], AbstractContextManager[None]]
"""Times a part of the step."""


@dataclass(frozen=True, slots=True)
class Forward:
    """What the models say about a batch before the update, [num_samples, max_tokens] each.

    Attributes:
        old: None when the sampler's log-probs are taken for the old ones.
        ref_logprobs: None without a reference.
        values: Of the state after each token; None without a critic.
    """

    old: TokenLogprobs | None
    old_logprobs: Floats
    ref_logprobs: Floats | None
    values: Floats | None


class Models:
    """The models of a run.

    Args:
        num_mini_batches: Optimizer steps per pass over a batch.
        num_epochs: Passes over a batch; the old log-probs, values and advantages stay those from before the first.
        reference: Asked by algorithms that need one.
        critic: Asked and updated by algorithms that need values.
    """

    def __init__(
        self,
        algorithm: Algorithm,
        num_mini_batches: int,
        num_epochs: int,
        *,
        actor: ActorGroup,
        reference: ReferenceGroup | None,
        critic: CriticGroup | None,
    ) -> None:
        self._algorithm = algorithm
        self._num_mini_batches, self._num_epochs = num_mini_batches, num_epochs
        self._actor = actor
        self._reference = reference if algorithm.needs_reference else None
        self._critic = critic if algorithm.needs_values else None

    def forward(self, batch: ScoredBatch, phase: Phase, beside: Sequence[Future[Any]]) -> Forward:
        """Run every forward pass that the algorithm needs.

        Args:
            phase: Times each model that is waited for.
            beside: Calls in flight, whose failure ends the wait.
        """
        plain = replace(batch.sequences, routing=None)
        actor = self._actor.logprobs(batch.sequences) if self._algorithm.needs_old_logprobs else None
        reference = self._reference.logprobs(plain) if self._reference else None
        critic = self._critic.values(plain) if self._critic else None
        beside = [*beside, *(future for future in (actor, reference, critic) if future)]
        old = ref_logprobs = values = None
        if actor:
            with phase("old_logprobs"):
                old = wait_for(actor, beside)
        if reference:
            with phase("ref_logprobs"):
                ref_logprobs = wait_for(reference, beside).logprobs
        if critic:
            with phase("values"):
                values = wait_for(critic, beside)
        return Forward(old, old.logprobs if old else batch.rollout_logprobs, ref_logprobs, values)

    def update(
        self,
        policy: PolicyBatch | None,
        values: ValueBatch | None,
        beside: Sequence[Future[Any]],
        *,
        want_logprobs: bool = False,
    ) -> tuple[list[UpdateMetrics], list[ValueMetrics]]:
        """Take the optimizer steps of actor and critic; None leaves one of them as it is.

        Args:
            beside: Calls in flight, whose failure ends the wait.
            want_logprobs: Whether the actor's answers have log-probs.
        """
        num, weigh = self._num_mini_batches, self._algorithm.loss_weights
        policies = mini_batches(policy, num, weigh) * self._num_epochs if policy else []
        states = mini_batches(values, num, weigh) * self._num_epochs if values else []
        updates, value_updates = [], []
        for actions, learnt in zip_longest(policies, states):
            actor = self._actor.update(actions, want_logprobs=want_logprobs) if actions else None
            critic = self._critic.update(learnt) if learnt and self._critic else None
            wait_all([future for future in (actor, critic) if future], beside=beside)
            if actor:
                updates.append(actor.value())
            if critic:
                value_updates.append(critic.value())
        return updates, value_updates
