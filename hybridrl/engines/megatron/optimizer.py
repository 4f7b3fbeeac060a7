"""Gradient buffers, distributed AdamW, learning-rate schedule, clipping, and the guard against non-finite gradients."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.optimizer import MegatronOptimizer, get_megatron_optimizer
from megatron.core.optimizer import OptimizerConfig as MegatronOptimizerConfig
from megatron.core.transformer.transformer_config import TransformerConfig

from hybridrl.config.choices import LrSchedule, Precision
from hybridrl.config.schema import OptimizerConfig
from hybridrl.engines.megatron.cpu import cuda_tensor_methods
from hybridrl.engines.megatron.process_groups import ProcessGroups
from hybridrl.engines.megatron.transformer_config import TORCH_DTYPES
from hybridrl.errors import EngineError

_DECAY: dict[LrSchedule, Callable[[float], float]] = {
    LrSchedule.CONSTANT: lambda progress: 1.0,
    LrSchedule.LINEAR: lambda progress: 1.0 - progress,
    LrSchedule.COSINE: lambda progress: 0.5 * (1.0 + math.cos(math.pi * progress)),
}


def learning_rate(config: OptimizerConfig, step: int, num_steps: int) -> float:
    """Return the learning rate of optimizer step `step`, counted from 0.

    Warm-up rises linearly and reaches the peak in step warmup_steps - 1; the schedule then runs from `lr` down to `min_lr`
    in the last of `num_steps` steps.
    """
    if step < config.warmup_steps:
        return config.lr * (step + 1) / config.warmup_steps
    progress = min(1.0, (step - config.warmup_steps) / max(1, num_steps - 1 - config.warmup_steps))
    share = _DECAY[config.schedule](progress)
    return (
        config.min_lr + (config.lr - config.min_lr) * share if config.schedule is not LrSchedule.CONSTANT else config.lr
    )


@dataclass(frozen=True, slots=True)
class StepResult:
    """One attempted optimizer step.

    Attributes:
        grad_norm: Before clipping.
        num_skipped: Skipped steps so far.
    """

    grad_norm: float
    lr: float
    is_skipped: bool
    num_skipped: int


def wrap_chunks(
    chunks: list[torch.nn.Module], config: TransformerConfig, precision: Precision, groups: ProcessGroups
) -> list[DistributedDataParallel]:
    """Give each chunk contiguous gradient buffers; bf16 gradients are summed in fp32."""
    ddp_config = DistributedDataParallelConfig(
        grad_reduce_in_fp32=precision is Precision.BFLOAT16,
        overlap_grad_reduce=False,
        use_distributed_optimizer=True,
        check_for_nan_in_grad=False,
    )
    return [
        DistributedDataParallel(config, ddp_config, chunk, disable_bucketing=index > 0, pg_collection=groups.collection)
        for index, chunk in enumerate(chunks)
    ]


class Optimizer:
    """AdamW over the ranks that share parameters.

    Args:
        num_steps: Optimizer steps of the whole run; only decaying schedules use it.

    Raises:
        EngineError: When a decaying schedule has no end.
    """

    def __init__(
        self,
        chunks: list[DistributedDataParallel],
        config: OptimizerConfig,
        precision: Precision,
        groups: ProcessGroups,
        num_steps: int,
    ) -> None:
        if config.schedule is not LrSchedule.CONSTANT and num_steps <= config.warmup_steps:
            raise EngineError(
                f"optimizer.schedule {config.schedule.value} needs more steps than warmup_steps {config.warmup_steps}, got {num_steps}"
            )
        self._config = config
        self._chunks = chunks
        self._num_steps = num_steps
        self.num_attempts = 0
        self.num_skipped = 0
        with cuda_tensor_methods():
            self._optimizer: MegatronOptimizer = get_megatron_optimizer(
                _megatron_config(config, precision),
                chunks,
                use_gloo_process_groups=False,
                pg_collection=groups.collection,
            )
        for group in self._optimizer.param_groups:
            group["weight_decay"] = config.weight_decay * group.get("wd_mult", 1.0)
            if groups.device.type == "cpu":
                group["fused"], group["foreach"] = True, False

    def zero_grad(self) -> None:
        """Clear all gradients."""
        for chunk in self._chunks:
            chunk.zero_grad_buffer()
        self._optimizer.zero_grad()

    def reload_parameters(self) -> None:
        """Take the parameters as they are now; call after writing into them from outside."""
        self._optimizer.reload_model_params()

    def parts(self) -> list[MegatronOptimizer]:
        """Return Megatron's optimizers of dense and of expert parameters, as far as this rank has such."""
        parts = getattr(self._optimizer, "chained_optimizers", [self._optimizer])
        return [part for part in parts if not getattr(part, "is_stub_optimizer", False)]

    @torch.no_grad()
    def step(self) -> StepResult:
        """Clip and apply the gradients, or skip the step when they are not finite. Collective over all ranks."""
        lr = learning_rate(self._config, self.num_attempts, self._num_steps)
        self.num_attempts += 1
        self._optimizer.prepare_grads()
        grad_norm = float(self._optimizer.get_grad_norm())
        if not math.isfinite(grad_norm):
            self.num_skipped += 1
            return StepResult(grad_norm, lr, True, self.num_skipped)
        self._clip(grad_norm)
        for group in self._optimizer.param_groups:
            group["lr"] = lr * group.get("lr_mult", 1.0)
        self._optimizer.step_with_ready_grads()
        return StepResult(grad_norm, lr, False, self.num_skipped)

    def _clip(self, grad_norm: float) -> None:
        bound = self._config.clip_grad_norm
        if bound <= 0 or grad_norm <= bound:
            return
        grads = [p.grad for group in self._optimizer.param_groups for p in group["params"] if p.grad is not None]
        if grads:
            torch._foreach_mul_(grads, bound / (grad_norm + 1e-6))


def _megatron_config(config: OptimizerConfig, precision: Precision) -> MegatronOptimizerConfig:
    return MegatronOptimizerConfig(
        optimizer="adam",
        lr=config.lr,
        min_lr=config.min_lr,
        weight_decay=config.weight_decay,
        adam_beta1=config.beta1,
        adam_beta2=config.beta2,
        adam_eps=config.epsilon,
        bf16=precision is Precision.BFLOAT16,
        params_dtype=TORCH_DTYPES[precision],
        use_distributed_optimizer=True,
        # Clipping is done here, where a non-finite norm can still skip the step.
        clip_grad=0.0,
    )
