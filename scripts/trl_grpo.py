"""The peer of bench_vs_trl.py: TRL's GRPOTrainer on the CPU, with HF generate. Runs in TRL's own environment.

    .venv-trl/bin/python scripts/trl_grpo.py JOB.json

JOB.json holds the fields of :class:`Job`. The last line of the output is a JSON list with an object per step: seconds, reward and
response_tokens, the mean per sample.
"""

from __future__ import annotations

import json
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
from trl import GRPOConfig, GRPOTrainer


@dataclass(frozen=True, slots=True)
class Job:
    """What both sides share.

    Attributes:
        model: Folder of the checkpoint and its tokenizer.
        prompts: Text of each prompt in the order of use, with the response that earns 1.
        experts: Implementation of the experts in transformers.
    """

    model: str
    scratch: str
    prompts: list[dict[str, str]]
    num_steps: int
    prompts_per_step: int
    samples_per_prompt: int
    max_response_tokens: int
    lr: float
    warmup_steps: int
    weight_decay: float
    num_threads: int
    experts: str


class Clock(TrainerCallback):
    """Times each step, its generation included."""

    def __init__(self) -> None:
        self.seconds: list[float] = []
        self._started = 0.0

    def on_step_begin(self, *_: Any, **__: Any) -> None:
        """Start the clock."""
        self._started = time.perf_counter()

    def on_step_end(self, *_: Any, **__: Any) -> None:
        """Note the step."""
        self.seconds.append(time.perf_counter() - self._started)


def main() -> None:
    job = Job(**json.loads(Path(sys.argv[1]).read_text()))
    torch.set_num_threads(job.num_threads)
    tokenizer = AutoTokenizer.from_pretrained(job.model)

    def exact(completion_ids: list[list[int]], answer: list[str], **_: Any) -> list[float]:
        return [float(tokenizer.decode(ids) == want) for ids, want in zip(completion_ids, answer, strict=True)]

    model = AutoModelForCausalLM.from_pretrained(job.model, dtype=torch.float32, experts_implementation=job.experts)
    clock = Clock()
    trainer = GRPOTrainer(
        model=model,
        reward_funcs=exact,
        args=settings(job),
        train_dataset=Dataset.from_list(job.prompts),
        processing_class=tokenizer,
        callbacks=[clock],
    )
    trainer.train()
    log = [row for row in trainer.state.log_history if "reward" in row]
    steps = [
        {"seconds": seconds, "reward": row["reward"], "response_tokens": row["completions/mean_length"]}
        for seconds, row in zip(clock.seconds, log, strict=True)
    ]
    print(json.dumps(steps))


def settings(job: Job) -> GRPOConfig:
    """Return TRL's settings for the same optimisation problem, with what slows it down on a CPU turned off."""
    return GRPOConfig(
        output_dir=job.scratch,
        use_cpu=True,
        bf16=False,
        gradient_checkpointing=False,
        per_device_train_batch_size=job.prompts_per_step * job.samples_per_prompt,
        num_generations=job.samples_per_prompt,
        max_completion_length=job.max_response_tokens,
        max_steps=job.num_steps,
        shuffle_dataset=False,
        temperature=1.0,
        learning_rate=job.lr,
        lr_scheduler_type="constant_with_warmup",
        warmup_steps=job.warmup_steps,
        adam_beta1=0.9,
        adam_beta2=0.95,
        weight_decay=job.weight_decay,
        max_grad_norm=1.0,
        beta=0.0,
        epsilon=0.2,
        epsilon_high=0.28,
        loss_type="bnpo",
        scale_rewards="group",
        router_aux_loss_coef=0.0,
        logging_steps=1,
        disable_tqdm=True,
        save_strategy="no",
        report_to=[],
        seed=1,
    )


if __name__ == "__main__":
    main()
