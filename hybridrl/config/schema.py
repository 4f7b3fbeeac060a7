"""The experiment configuration, one dataclass per component.

Every batch size says its unit in its name. `config/load.py` merges YAML files and overrides into these types and
`config/check.py` finds every illegal combination; a component receives its own slice, never the root.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass, field
from typing import Any

from hybridrl.layout.parallel import ParallelSizes


class Platform(enum.Enum):
    """Hardware that ranks run on."""

    CPU = "cpu"
    CUDA = "cuda"


class Precision(enum.Enum):
    """Element type of parameters and activations."""

    FLOAT32 = "float32"
    BFLOAT16 = "bfloat16"


class TaskName(enum.Enum):
    """Where prompts come from and which agent loop plays them."""

    CALC = "calc"
    REVERSE = "reverse"
    FILE = "file"


class Placement(enum.Enum):
    """How roles share devices."""

    COLOCATED = "colocated"
    SPLIT = "split"


class TransportName(enum.Enum):
    """How weight bytes travel."""

    AUTO = "auto"
    SHM = "shm"
    GLOO = "gloo"


class LrSchedule(enum.Enum):
    """Shape of the learning rate after warm-up."""

    CONSTANT = "constant"
    LINEAR = "linear"
    COSINE = "cosine"


def _doc(default: Any, text: str) -> Any:
    """Return a dataclass field with its documentation."""
    if callable(default):
        return field(default_factory=default, metadata={"doc": text})
    return field(default=default, metadata={"doc": text})


@dataclass
class ModelConfig:
    """The policy's checkpoint."""

    path: str = _doc("???", "Folder with config.json, tokenizer and safetensors files")
    precision: Precision = _doc(Precision.BFLOAT16, "Element type of training parameters and activations")


@dataclass
class ParallelConfig:
    """Megatron parallel degrees; the role uses tp_size * pp_size * cp_size * dp_size ranks."""

    tp_size: int = _doc(1, "Tensor-parallel degree of dense layers")
    pp_size: int = _doc(1, "Pipeline-parallel degree")
    ep_size: int = _doc(1, "Expert-parallel degree")
    etp_size: int = _doc(1, "Tensor-parallel degree inside each expert")
    cp_size: int = _doc(1, "Context-parallel degree")
    dp_size: int = _doc(1, "Data-parallel degree of dense layers")
    sequence_parallel: bool = _doc(True, "Shard norms and residuals along the sequence when tp_size > 1")

    def sizes(self) -> ParallelSizes:
        """Return the degrees in the layout language."""
        return ParallelSizes(self.tp_size, self.pp_size, self.ep_size, self.etp_size, self.cp_size, self.dp_size)


@dataclass
class OptimizerConfig:
    """AdamW with gradient clipping."""

    lr: float = _doc(1e-6, "Peak learning rate")
    min_lr: float = _doc(0.0, "Learning rate at the end of a decaying schedule")
    schedule: LrSchedule = _doc(LrSchedule.CONSTANT, "Shape after warm-up")
    warmup_steps: int = _doc(0, "Optimizer steps of linear warm-up")
    beta1: float = _doc(0.9, "AdamW first-moment decay")
    beta2: float = _doc(0.95, "AdamW second-moment decay")
    epsilon: float = _doc(1e-8, "AdamW epsilon")
    weight_decay: float = _doc(0.0, "AdamW decoupled weight decay")
    clip_grad_norm: float = _doc(1.0, "Global gradient norm bound; 0 turns clipping off")


@dataclass
class ActorConfig:
    """The Megatron role that is trained."""

    parallel: ParallelConfig = _doc(ParallelConfig, "Parallel degrees")
    optimizer: OptimizerConfig = _doc(OptimizerConfig, "Optimizer")
    micro_batch_samples_per_rank: int = _doc(1, "Samples per micro-batch on each data-parallel rank")
    threads_per_rank: int = _doc(1, "CPU threads per rank (cpu platform)")


@dataclass
class RolloutConfig:
    """vLLM replicas and sampling."""

    num_replicas: int = _doc(1, "Independent vLLM engines")
    tp_size: int = _doc(1, "Tensor-parallel degree of each replica")
    precision: Precision = _doc(Precision.BFLOAT16, "Element type of weights and activations")
    temperature: float = _doc(1.0, "Sampling temperature; also divides the logits in training")
    top_p: float = _doc(1.0, "Nucleus mass; below 1 the ratio to the trainer is no longer on-policy")
    max_response_tokens: int = _doc(1024, "Policy tokens per turn, at most")
    max_model_tokens: int = _doc(2048, "Prompt and response together, at most")
    gpu_memory_fraction: float = _doc(0.6, "Share of device memory for vLLM (cuda platform)")
    kv_cache_gib: int = _doc(1, "KV cache size in GiB (cpu platform)")
    max_running_samples: int = _doc(256, "Sequences decoded at once per replica")
    enforce_eager: bool = _doc(False, "Skip graph capture and compilation")


@dataclass
class DataConfig:
    """Prompts for training and evaluation."""

    task: TaskName = _doc(TaskName.FILE, "Generated task, or prompts from files")
    train_path: str | None = _doc(None, "JSONL or parquet file with training prompts (task: file)")
    eval_path: str | None = _doc(None, "JSONL or parquet file with evaluation prompts (task: file)")
    prompt_key: str = _doc("prompt", "Column with the prompt text")
    answer_key: str = _doc("answer", "Column with the ground truth")
    max_prompt_tokens: int = _doc(1024, "Longest prompt; longer ones are an error")
    num_eval_prompts: int = _doc(256, "Held-out prompts per evaluation; one sample each")


@dataclass
class RewardConfig:
    """How finished samples are scored."""

    function: str | None = _doc(None, "file.py:function taking (response: str, answer: str) -> float; the generated tasks bring their own")
    timeout_s: float = _doc(60.0, "Seconds that scoring one batch may take")


@dataclass
class AlgorithmConfig:
    """GRPO."""

    prompts_per_step: int = _doc(32, "Prompts per step, over all replicas")
    samples_per_prompt: int = _doc(8, "Samples per prompt: the group of group-normalised advantages")
    mini_batches_per_step: int = _doc(1, "Optimizer steps per batch")
    clip_low: float = _doc(0.2, "Ratio is clipped below 1 - clip_low")
    clip_high: float = _doc(0.28, "Ratio is clipped above 1 + clip_high")
    advantage_epsilon: float = _doc(1e-4, "Added to the standard deviation of a group's rewards")
    kl_coef: float = _doc(0.0, "Weight of the k3 KL term to the frozen reference; 0 runs without one")
    entropy_coef: float = _doc(0.0, "Weight of the entropy bonus")


@dataclass
class WeightSyncConfig:
    """Weights from the actor to the rollout replicas."""

    transport: TransportName = _doc(TransportName.AUTO, "auto uses shared memory inside a node and gloo between nodes")
    verify: bool = _doc(True, "Compare canonical checksums of every transferred piece")
    chunk_mib: int = _doc(64, "Largest message between two ranks, in MiB; bounds the staging memory")
    timeout_s: float = _doc(120.0, "Seconds that one weight sync may take")


@dataclass
class TrainerConfig:
    """The loop."""

    num_steps: int = _doc(100, "Steps of rollout and update")
    max_policy_lag: int = _doc(0, "Versions by which samples may be older than the policy they train; 0 is synchronous")
    eval_every_steps: int = _doc(10, "Steps between evaluations; 0 turns them off, also the first and last")
    stop_at_accuracy: float | None = _doc(None, "End the run early once eval/accuracy reaches this")
    max_logprob_gap: float | None = _doc(None, "Fail the run when |rollout_logprobs - old_logprobs| exceeds this")
    rollout_timeout_s: float = _doc(600.0, "Seconds that the rollouts of one step may take")
    train_timeout_s: float = _doc(600.0, "Seconds that one log-prob pass or update may take")
    startup_timeout_s: float = _doc(900.0, "Seconds that starting one role may take")
    save_hf_at_end: bool = _doc(True, "Export the trained policy as an HF checkpoint under the run folder")


@dataclass
class SftConfig:
    """Supervised fine-tuning (`hybridrl sft`)."""

    num_steps: int = _doc(120, "Optimizer steps")
    samples_per_step: int = _doc(128, "Demonstrations per optimizer step, over all ranks")
    tool_fraction: float = _doc(0.35, "Share of demonstrations that show the rewarded behaviour (generated tasks)")
    output_path: str = _doc("runs/sft", "Folder for the HF checkpoint")


@dataclass
class ExperimentConfig:
    """Everything that one experiment needs."""

    name: str = _doc("???", "Run name; results go to <runs_dir>/<name>")
    runs_dir: str = _doc("runs", "Folder of all runs")
    seed: int = _doc(1, "Seed of prompts, sampling and initialisation")
    platform: Platform = _doc(Platform.CUDA, "Hardware")
    placement: Placement = _doc(Placement.COLOCATED, "Whether actor and rollout share devices")
    ray_address: str | None = _doc(None, "Existing Ray cluster; none starts one on this machine")
    model: ModelConfig = _doc(ModelConfig, "Policy")
    actor: ActorConfig = _doc(ActorConfig, "Training role")
    rollout: RolloutConfig = _doc(RolloutConfig, "Generation role")
    data: DataConfig = _doc(DataConfig, "Prompts")
    reward: RewardConfig = _doc(RewardConfig, "Scoring")
    algorithm: AlgorithmConfig = _doc(AlgorithmConfig, "Algorithm")
    weight_sync: WeightSyncConfig = _doc(WeightSyncConfig, "Weight sync")
    trainer: TrainerConfig = _doc(TrainerConfig, "Loop")
    sft: SftConfig = _doc(SftConfig, "Supervised stage")
