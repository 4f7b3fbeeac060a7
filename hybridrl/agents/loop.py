"""How one prompt becomes one sample: the loop's protocol and the trajectory that it writes.

    prompt ids -> engine.generate -> policy ids -> environment ids -> engine.generate -> ... -> Sample

A loop sees a :class:`TokenEngine` only. Policy tokens enter the trajectory as they were sampled and are never encoded
again; environment tokens are encoded once and not trained on.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

import numpy as np

from hybridrl.data.generation import Completion, Routing, SamplingSpec, TokenEngine
from hybridrl.data.sample import FinishReason, Prompt, Sample
from hybridrl.data.tokenizer import Tokenizer

NO_VERSION = -1


class AgentLoop(Protocol):
    """Plays one sample of a prompt."""

    async def run(self, prompt: Prompt, sample_index: int, engine: TokenEngine, sampling: SamplingSpec) -> Sample:
        """Play one sample to its end. Cancelling the call aborts its generation.

        Args:
            sampling: Temperature, nucleus mass and the token limit of a turn; its seed is the run's, from which each
                turn's own seed is derived. The loop sets the stop tokens.

        Raises:
            EngineError: The engine failed or refused the request.
        """
        ...


def turn_seed(run_seed: int, prompt_id: str, sample_index: int, turn: int) -> int:
    """Return the seed of one turn, the same on every machine and in every process, in [0, 2**31)."""
    key = f"{run_seed}/{prompt_id}/{sample_index}/{turn}".encode()
    return int.from_bytes(hashlib.blake2b(key, digest_size=8).digest(), "little") % 2**31


@dataclass(slots=True)
class Trajectory:
    """A sample while it is being played.

    Worked example: prompt ids (7, 8), a policy turn (20, 21) by version 3 and an environment's (30,) give token_ids
    7 8 20 21 30 with loss_mask 0 0 1 1 0 and policy_versions -1 -1 3 3 -1.
    """

    prompt: Prompt
    sample_index: int
    token_ids: list[int] = field(default_factory=list)
    loss_mask: list[bool] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    policy_versions: list[int] = field(default_factory=list)
    routing: list[Routing] = field(default_factory=list)
    num_turns: int = 0

    def __post_init__(self) -> None:
        self.add_environment(self.prompt.token_ids)

    async def sample_turn(
        self, engine: TokenEngine, sampling: SamplingSpec, stop_token_ids: tuple[int, ...], max_tokens: int
    ) -> Completion:
        """Let the policy continue for one turn and append what it wrote.

        Args:
            max_tokens: Limit of this turn; the limit of `sampling` holds as well.
        """
        prompt_id, seed = self.prompt.prompt_id, sampling.seed
        turn_sampling = replace(
            sampling,
            max_tokens=min(max_tokens, sampling.max_tokens),
            stop_token_ids=stop_token_ids,
            seed=None if seed is None else turn_seed(seed, prompt_id, self.sample_index, self.num_turns),
        )
        completion = await engine.generate(tuple(self.token_ids), turn_sampling)
        assert len(completion.token_ids) == len(completion.logprobs), (prompt_id, completion)
        self._append(completion.token_ids, completion.logprobs, is_policy=True, version=completion.policy_version)
        if completion.routing is not None:
            # What an earlier turn sampled stays with the experts that sampled it.
            self.routing.extend(completion.routing[len(self.routing) :])
        self.num_turns += 1
        return completion

    def add_environment(self, token_ids: Sequence[int]) -> None:
        """Append tokens that the policy did not write."""
        self._append(token_ids, [0.0] * len(token_ids), is_policy=False, version=NO_VERSION)

    def finish(self, reason: FinishReason, tokenizer: Tokenizer) -> Sample:
        """Freeze the trajectory."""
        response = self.token_ids[len(self.prompt.token_ids) :]
        return Sample(
            prompt=self.prompt,
            sample_index=self.sample_index,
            token_ids=np.array(self.token_ids, dtype=np.int32),
            loss_mask=np.array(self.loss_mask, dtype=np.bool_),
            rollout_logprobs=np.array(self.logprobs, dtype=np.float32),
            policy_versions=np.array(self.policy_versions, dtype=np.int32),
            finish_reason=reason,
            num_turns=self.num_turns,
            text=tokenizer.decode(response),
            routing=self._routing(),
        )

    def _routing(self) -> Routing | None:
        if not self.routing:
            return None
        routing = np.full((len(self.token_ids), *self.routing[0].shape), -1, dtype=np.int16)
        routing[: len(self.routing)] = self.routing
        return routing

    def _append(self, token_ids: Sequence[int], logprobs: Sequence[float], *, is_policy: bool, version: int) -> None:
        self.token_ids.extend(token_ids)
        self.logprobs.extend(logprobs)
        self.loss_mask.extend([is_policy] * len(token_ids))
        self.policy_versions.extend([version] * len(token_ids))
