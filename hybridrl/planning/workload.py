"""How many prompts, samples, tokens and micro-batches a step has."""

from __future__ import annotations

from dataclasses import dataclass

from hybridrl.config.schema import ExperimentConfig
from hybridrl.layout.parallel import alignment
from hybridrl.layout.roles import PlacedRole, megatron_roles


@dataclass(frozen=True, slots=True)
class Workload:
    """The work of one step.

    Worked example: 64 prompts x 8 samples of 200 + 3000 tokens are 1.64 M tokens. 2 mini-batches on 8 data-parallel ranks: 32
    samples, 102,400 tokens per rank and update, hence 13 micro-batches of at most 8192 tokens.

    Attributes:
        num_samples: That are trained on.
        num_generated: Greedy baselines included.
        prompt_tokens: Average; `response_tokens` likewise.
        micro_batch_tokens: Most tokens of a micro-batch, over the context-parallel ranks together.
        num_micro_batches: Of each data-parallel rank in an update, if all samples are average.
    """

    num_prompts: int
    num_samples: int
    num_generated: int
    num_updates: int
    prompt_tokens: int
    response_tokens: int
    samples_per_rank: float
    micro_batch_tokens: int
    num_micro_batches: int

    @property
    def sample_tokens(self) -> int:
        """Average tokens of a sample, prompt and response."""
        return self.prompt_tokens + self.response_tokens

    @property
    def tokens_per_step(self) -> int:
        """Tokens that are trained on."""
        return self.num_samples * self.sample_tokens

    @property
    def mean_micro_batch_tokens(self) -> float:
        """Tokens of an average micro-batch."""
        return self.samples_per_rank * self.sample_tokens / self.num_micro_batches


def workload(config: ExperimentConfig, placed: PlacedRole | None = None) -> Workload:
    """Return the work of a step under the averages that the configuration assumes.

    Args:
        placed: Whose ranks share it; the actor where it is None.
    """
    algorithm, plan = config.algorithm, config.plan
    role = placed or megatron_roles(config)[0]
    parallel, budget = role.parallel, role.micro_batch.tokens
    num_samples = algorithm.prompts_per_step * algorithm.samples_per_prompt
    prompt = plan.mean_prompt_tokens or max(1, config.data.max_prompt_tokens // 2)
    response = plan.mean_response_tokens or max(1, config.rollout.max_response_tokens // 2)
    per_rank = num_samples / algorithm.mini_batches_per_step / parallel.dp_size
    fewest = max(1, -(-int(per_rank * (prompt + response)) // budget))
    multiple = parallel.pp_size if parallel.vpp_size > 1 else 1
    return Workload(
        num_prompts=algorithm.prompts_per_step,
        num_samples=num_samples,
        num_generated=num_samples + (algorithm.prompts_per_step if algorithm.needs_greedy else 0),
        num_updates=algorithm.mini_batches_per_step,
        prompt_tokens=prompt,
        response_tokens=response,
        samples_per_rank=per_rank,
        micro_batch_tokens=_round_up(budget, alignment(parallel)),
        num_micro_batches=_round_up(fewest, multiple),
    )


def _round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple
