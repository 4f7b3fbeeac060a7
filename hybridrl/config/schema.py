"""The experiment configuration, one dataclass per component.

Every batch size says its unit in its name. ``load.py`` merges YAML files and overrides into these types and
``hybridrl/preflight`` finds every illegal combination; a component receives its own slice, never the root.
"""

from __future__ import annotations

from dataclasses import dataclass

from hybridrl.config.algorithm import AlgorithmConfig
from hybridrl.config.choices import (
    LongPrompts,
    LrSchedule,
    ModelInit,
    Platform,
    Precision,
    ProfileTool,
    Recompute,
    RewardFailure,
    RouterReplay,
    TaskName,
    TransportName,
    WandbMode,
)
from hybridrl.config.fields import setting

RESUME_AUTO, RESUME_NEVER = "auto", "never"
"""Values of ``trainer.resume`` that are no path."""


@dataclass
class ModelConfig:
    """The policy's checkpoint."""

    path: str = setting("???", "Folder with config.json, tokenizer and safetensors files", is_input_path=True)
    init: ModelInit = setting(ModelInit.PRETRAINED, "Read the folder's weights, or draw them from the seed (sft only)")
    precision: Precision = setting(Precision.BFLOAT16, "Element type of training parameters and activations")


@dataclass
class ParallelConfig:
    """Megatron parallel degrees; the role uses tp_size * pp_size * cp_size * dp_size ranks."""

    tp_size: int = setting(1, "Tensor-parallel degree of dense layers", at_least=1)
    pp_size: int = setting(1, "Pipeline-parallel degree", at_least=1)
    ep_size: int = setting(1, "Expert-parallel degree", at_least=1)
    etp_size: int = setting(1, "Tensor-parallel degree inside each expert", at_least=1)
    cp_size: int = setting(1, "Context-parallel degree: ranks that share the tokens of each sequence", at_least=1)
    dp_size: int = setting(1, "Data-parallel degree of dense layers", at_least=1)
    sequence_parallel: bool = setting(True, "Shard norms and residuals along the sequence when tp_size > 1")
    vpp_size: int = setting(1, "Model chunks per pipeline rank; above 1 the schedule is interleaved", at_least=1)
    num_layers_in_first_pipeline_stage: int | None = setting(
        None, "Layers of the first pipeline rank, over all its chunks; null shares evenly", at_least=1
    )
    num_layers_in_last_pipeline_stage: int | None = setting(
        None, "Layers of the last pipeline rank, over all its chunks; null shares evenly", at_least=1
    )
    pipeline_layout: str | None = setting(
        None,
        "Explicit stages in Megatron-core's letters, e.g. Et*3|(tt|)*2tL: E embedding, t layer, L loss; null shares evenly",
    )


@dataclass
class OptimizerConfig:
    """AdamW with gradient clipping."""

    lr: float = setting(1e-6, "Peak learning rate", above=0)
    min_lr: float = setting(0.0, "Learning rate at the end of a decaying schedule", at_least=0)
    schedule: LrSchedule = setting(LrSchedule.CONSTANT, "Shape after warm-up")
    warmup_steps: int = setting(0, "Optimizer steps of linear warm-up", at_least=0)
    beta1: float = setting(0.9, "AdamW first-moment decay", at_least=0, below=1)
    beta2: float = setting(0.95, "AdamW second-moment decay", at_least=0, below=1)
    epsilon: float = setting(1e-8, "AdamW epsilon", above=0)
    weight_decay: float = setting(0.0, "AdamW decoupled weight decay", at_least=0)
    clip_grad_norm: float = setting(1.0, "Global gradient norm bound; 0 turns clipping off", at_least=0)


@dataclass
class MicroBatchConfig:
    """How the samples of a data-parallel rank become forward passes."""

    tokens: int = setting(
        8192,
        "Tokens per micro-batch of each data-parallel rank, over its cp ranks together, at most; samples are packed into it",
        at_least=1,
    )
    is_packed: bool = setting(True, "false pads every sample to the longest instead, for comparison")


@dataclass
class MoeConfig:
    """Balance between experts. Off by default: each term moves the policy for reasons that no reward gave."""

    aux_loss_coef: float = setting(
        0.0, "Weight of the load-balancing loss of each sequence, averaged over the sequences of an update", at_least=0
    )
    z_loss_coef: float = setting(
        0.0, "Weight of the squared log-sum-exp of router logits, averaged over the tokens of an update", at_least=0
    )
    bias_update_rate: float = setting(
        0.0,
        "Step of each expert's routing bias towards an even load, per update (models whose router has such a bias)",
        at_least=0,
    )


@dataclass
class ActorConfig:
    """The Megatron role that is trained."""

    parallel: ParallelConfig = setting(ParallelConfig, "Parallel degrees")
    optimizer: OptimizerConfig = setting(OptimizerConfig, "Optimizer")
    micro_batch: MicroBatchConfig = setting(MicroBatchConfig, "Packing")
    recompute: Recompute = setting(Recompute.NONE, "Activations that the backward pass computes again")
    moe: MoeConfig = setting(MoeConfig, "Balance between experts")
    router_replay: RouterReplay = setting(
        RouterReplay.OFF,
        "Experts that an update sends tokens to: its own choice, that of the log-prob pass before it (r2), or the sampler's (r3)",
    )
    threads_per_rank: int = setting(1, "CPU threads per rank (cpu platform)", at_least=1)


@dataclass
class RoleParallelConfig:
    """Degrees of a Megatron role beside the actor; null takes the actor's."""

    tp_size: int | None = setting(None, "Tensor-parallel degree; null takes the actor's", at_least=1)
    pp_size: int | None = setting(
        None,
        "Pipeline-parallel degree, with one model chunk per rank; null takes the actor's, chunks and layout included",
        at_least=1,
    )
    ep_size: int | None = setting(None, "Expert-parallel degree; null takes the actor's", at_least=1)
    etp_size: int | None = setting(
        None, "Tensor-parallel degree inside each expert; null takes the actor's", at_least=1
    )
    cp_size: int | None = setting(None, "Context-parallel degree; null takes the actor's", at_least=1)
    dp_size: int | None = setting(None, "Data-parallel degree; null takes the actor's", at_least=1)
    pipeline_layout: str | None = setting(
        None, "Explicit stages for a pp_size of its own, as in actor.parallel; null shares evenly"
    )


@dataclass
class RoleConfig:
    """A Megatron role beside the actor. Precision, threads and packing are the actor's."""

    parallel: RoleParallelConfig = setting(RoleParallelConfig, "Parallel degrees")
    micro_batch_tokens: int | None = setting(
        None, "Tokens per micro-batch of each data-parallel rank; null takes actor.micro_batch.tokens", at_least=1
    )


@dataclass
class CriticConfig(RoleConfig):
    """The role that learns the value of each state, for algorithms that need values."""

    model_path: str | None = setting(
        None,
        "Folder of the checkpoint to start from; one without a value head gets a new one. null takes model.path",
        is_input_path=True,
    )
    optimizer: OptimizerConfig = setting(OptimizerConfig, "Optimizer")
    clip_value: float | None = setting(
        0.2, "How far a value may move from that before the update with a gradient; null does not clip", above=0
    )
    warmup_steps: int = setting(0, "First steps, in which only the critic learns", at_least=0)


@dataclass
class RolloutConfig:
    """vLLM replicas and sampling."""

    num_replicas: int = setting(1, "Independent vLLM engines", at_least=1)
    tp_size: int = setting(1, "Tensor-parallel degree of each replica", at_least=1)
    precision: Precision = setting(Precision.BFLOAT16, "Element type of weights and activations")
    temperature: float = setting(1.0, "Sampling temperature; also divides the logits in training", above=0)
    top_p: float = setting(
        1.0, "Nucleus mass; below 1 the ratio to the trainer is no longer on-policy", above=0, at_most=1
    )
    max_response_tokens: int = setting(1024, "Policy tokens per turn, at most", at_least=1)
    max_model_tokens: int = setting(2048, "Prompt and response together, at most", at_least=2)
    gpu_memory_fraction: float = setting(0.6, "Share of device memory for vLLM (cuda platform)", above=0, below=1)
    kv_cache_gib: int = setting(1, "KV cache size in GiB (cpu platform)", at_least=1)
    threads_per_rank: int = setting(1, "CPU threads of each vLLM worker (cpu platform)", at_least=1)
    max_running_samples: int = setting(256, "Sequences decoded at once per replica", at_least=1)
    enforce_eager: bool = setting(False, "Skip graph capture and compilation")
    max_restarts: int = setting(
        3,
        "Replicas that may be started again after they died, in one job; the next death ends it. With 0 every one does",
        at_least=0,
    )


@dataclass
class DataConfig:
    """Prompts for training and evaluation."""

    task: TaskName = setting(TaskName.FILE, "Generated task, or prompts from files")
    train_path: str | None = setting(
        None,
        "Training prompts (task: file): a .jsonl or .parquet file, a Hugging Face dataset folder, or a .yaml file that "
        "mixes several of them",
        is_input_path=True,
    )
    eval_path: str | None = setting(
        None, "Evaluation prompts (task: file), of the same kinds as train_path", is_input_path=True
    )
    prompt_key: str = setting("prompt", "Column with the prompt: text, or a list of chat messages")
    answer_key: str = setting("answer", "Column with the ground truth; a.b is field b of column a")
    id_key: str | None = setting(None, "Column with a unique id; without one, rows are numbered")
    text_as_chat: bool = setting(False, "Put prompts that are plain text into the chat template as one user message")
    system_prompt: str | None = setting(None, "First message of every chat that has no system message of its own")
    max_prompt_tokens: int = setting(1024, "Longest prompt; long_prompts says what happens to longer ones", at_least=1)
    long_prompts: LongPrompts = setting(
        LongPrompts.ERROR,
        "What happens to longer prompts: an error, dropped and counted, or cut and counted (truncate_left keeps the end)",
    )
    curriculum: str | None = setting(
        None,
        "file.py:function taking (prompts, epoch) and returning the order of an epoch as row indices; none shuffles",
        is_input_path=True,
    )
    num_eval_prompts: int = setting(256, "Held-out prompts per evaluation", at_least=1)
    eval_samples_per_prompt: int = setting(1, "Samples per held-out prompt: the n of pass@k", at_least=1)


@dataclass
class FormatRewardConfig:
    """Whether the response matches a pattern."""

    weight: float = setting(0.0, "Weight in the reward; 0 is off", at_least=0)
    pattern: str | None = setting(
        None, "Python regular expression that the whole response must match; . matches newlines"
    )


@dataclass
class CodeRewardConfig:
    """Python programs that the policy writes, run on the tests of each prompt in a sandbox."""

    weight: float = setting(0.0, "Weight in the reward; 0 is off", at_least=0)
    test_timeout_s: float = setting(2.0, "Seconds (wall and CPU) that a program may take for one test", above=0)
    timeout_s: float = setting(
        8.0, "Seconds that all tests of a program may take; tests left over count as failed", above=0
    )
    memory_mib: int = setting(512, "Address space of a program, in MiB", at_least=64)
    num_processes: int = setting(8, "Processes and threads that a program may have at once", at_least=1)
    file_mib: int = setting(8, "Largest file that a program may write, in MiB", at_least=1)
    output_kib: int = setting(256, "Output of a program that is read, in KiB; more ends it", at_least=1)
    allow_network: bool = setting(False, "Run programs although this machine cannot take the network away from them")


@dataclass
class HttpRewardConfig:
    """A reward service: POST of {"prompt", "response", "answer", "data_source"}, answered by {"reward": number}."""

    weight: float = setting(0.0, "Weight in the reward; 0 is off", at_least=0)
    url: str | None = setting(None, "http:// or https:// address of the service")
    token_variable: str | None = setting(
        None, "Environment variable with the token that is sent as `Authorization: Bearer`"
    )
    attempt_timeout_s: float = setting(5.0, "Seconds that one attempt may take", above=0)
    num_attempts: int = setting(
        3, "Attempts per sample; refused connections and statuses 429 and 5xx are retried", at_least=1
    )
    backoff_s: float = setting(0.25, "Seconds before the second attempt; doubled for each further one", at_least=0)
    requests_per_s: float = setting(100.0, "Attempts per second over all reward processes, at most", above=0)


@dataclass
class ModelRewardConfig(RoleConfig):
    """A reward model: its value after the last token of a sample. It runs as the role reward_model."""

    weight: float = setting(0.0, "Weight in the reward; 0 is off", at_least=0)
    path: str | None = setting(
        None,
        "Folder of a sequence-classification checkpoint of one label and the policy's tokenizer",
        is_input_path=True,
    )


@dataclass
class RewardConfig:
    """How finished samples are scored: the weighted sum of every part that is on."""

    function: str | None = setting(
        None,
        "file.py:function taking (response: str, answer: str) -> float",
        is_input_path=True,
    )
    function_weight: float = setting(1.0, "Weight of the function", above=0)
    exact_weight: float = setting(0.0, "Weight of: the final answer is the ground truth, to the character", at_least=0)
    math_weight: float = setting(0.0, "Weight of: the final answer equals the ground truth (math-verify)", at_least=0)
    reasoning_gym_weight: float = setting(0.0, "Weight of the scores of reasoning-gym prompts", at_least=0)
    format: FormatRewardConfig = setting(FormatRewardConfig, "Pattern of the response")
    code: CodeRewardConfig = setting(CodeRewardConfig, "Sandboxed programs")
    http: HttpRewardConfig = setting(HttpRewardConfig, "Remote service")
    model: ModelRewardConfig = setting(ModelRewardConfig, "Reward model")
    on_error: RewardFailure = setting(
        RewardFailure.FAIL, "Fail the run, or drop and count the sample, when scoring fails"
    )
    num_processes: int = setting(1, "Processes that score", at_least=1)
    sample_timeout_s: float = setting(10.0, "Seconds that scoring one sample may take", above=0)
    timeout_s: float = setting(60.0, "Seconds that scoring one step's samples may take", above=0)


@dataclass
class WeightSyncConfig:
    """Weights from the actor to the rollout replicas."""

    transport: TransportName = setting(
        TransportName.AUTO,
        "auto: on cpu shm inside a node, gloo between nodes, mixed where there are both kinds of pairs; on cuda cuda_ipc inside a "
        "node, nccl between nodes",
    )
    verify: bool = setting(True, "Compare canonical checksums of every transferred piece")
    chunk_mib: int = setting(64, "Largest message between two ranks, in MiB; bounds the staging memory", at_least=1)
    timeout_s: float = setting(
        120.0, "Seconds that each phase of a weight sync may take: pause, transfer, commit, resume, probe", above=0
    )
    probe_every: int = setting(
        50,
        "Versions from one that is probed (a prompt that both engines score), to the next, beginning with 1; the first sync of a "
        "connection is always probed, and with 0 no other",
        at_least=0,
    )
    probe_tolerance: float | None = setting(
        None,
        "Largest difference of the engines' log-probs on the probe prompt, in nats; null: 0.01 when both engines use float32, else 1",
        above=0,
    )


@dataclass
class TrainerConfig:
    """The loop."""

    num_steps: int = setting(100, "Steps of rollout and update", at_least=1)
    max_policy_lag: int = setting(
        0, "Versions by which samples may be older than the policy they train; 0 is synchronous", at_least=0, at_most=1
    )
    eval_every_steps: int = setting(
        10, "Steps between evaluations; 0 turns them off, also the first and last", at_least=0
    )
    stop_at_accuracy: float | None = setting(
        None, "End the run early once eval/accuracy reaches this", above=0, at_most=1
    )
    max_logprob_gap: float | None = setting(
        None,
        "Fail the run when |rollout_logprobs - old_logprobs| exceeds this at a token sampled by the version being trained; "
        "older tokens (max_policy_lag > 0) are reported but not bounded",
        above=0,
    )
    hang_timeout_s: float = setting(
        600.0,
        "Seconds in which nothing moves (no answer of a rank, no change of phase, no micro-batch, sampler step, scored sample or message "
        "of weights) before a step is ended as hung, with the stacks of all processes; at most 80% of rollout_timeout_s and train_timeout_s",
        above=0,
    )
    rollout_timeout_s: float = setting(3600.0, "Seconds that the rollouts of one step may take", above=0)
    train_timeout_s: float = setting(
        3600.0,
        "Seconds that one forward pass or update may take, with those before it in the queue of the same ranks",
        above=0,
    )
    startup_timeout_s: float = setting(900.0, "Seconds that starting one role may take", above=0)
    parity_check: bool = setting(
        False,
        "Before the first step, hold Megatron in its layout and vLLM against transformers as `hybridrl parity` does, and fail the "
        "run when they disagree",
    )
    resume: str = setting(
        RESUME_NEVER,
        "auto goes on in <runs_dir>/<name> from its newest valid checkpoint, and starts that run when there is none yet; never "
        "starts a new run; a path starts a new run from that checkpoint, or from the newest of that run or folder",
    )
    replay_steps: str | None = setting(
        None,
        "Steps to write a replay file of, for `hybridrl replay`: 0,10-12,/50 is step 0, steps 10 to 12 and every 50th",
    )
    save_hf_at_end: bool = setting(True, "Export the trained policy as an HF checkpoint under the run folder")


@dataclass
class CheckpointConfig:
    """What a run can go on from."""

    every_steps: int = setting(
        0, "Steps between checkpoints, of which the last step makes one too; 0 makes none", at_least=0
    )
    keep: int = setting(2, "Newest complete checkpoints that stay", at_least=1)
    is_async: bool = setting(
        True, "Write while training goes on, from a copy in host memory; false waits until everything is on disk"
    )
    folder: str | None = setting(
        None, "Folder of the checkpoints, on storage that every node shares; null is checkpoints/ in the run's folder"
    )
    timeout_s: float = setting(
        1800.0, "Seconds that writing one checkpoint may take; past that it counts as failed", above=0
    )


@dataclass
class TrackingConfig:
    """Programs that follow the metrics of a run, beside its metrics.jsonl and TensorBoard files."""

    wandb: WandbMode = setting(
        WandbMode.OFF, "Weights & Biases (package wandb); offline needs no account and no network"
    )
    wandb_project: str = setting("hybridrl", "Project of the run in Weights & Biases")
    mlflow_uri: str | None = setting(
        None,
        "MLflow (package mlflow): file:///folder, sqlite:////folder/mlflow.db or the address of a server; null turns it off",
    )
    prometheus_port: int | None = setting(
        None,
        "Port of the controller at which Prometheus reads the newest metrics; null turns it off",
        at_least=1,
        at_most=65535,
    )
    prometheus_host: str = setting("127.0.0.1", "Interface that this port listens on; it has no password")


@dataclass
class ProfileConfig:
    """Profiles of chosen roles, ranks and steps, in profiles/ of the run's folder."""

    tool: ProfileTool = setting(
        ProfileTool.OFF,
        "torch writes Chrome traces; nsys runs the processes under Nsight Systems (cuda platform); off costs nothing",
    )
    roles: str = setting(
        "actor", "Roles: some of actor, reference, critic, reward_model and rollout, with commas between"
    )
    ranks: str = setting(
        "0",
        "Ranks of each of these roles, written like steps; those of the rollout are its workers, numbered through the replicas",
    )
    steps: str = setting("2", "Steps: 0,10-12,/50 is step 0, steps 10 to 12 and every 50th")

    @property
    def role_names(self) -> tuple[str, ...]:
        """The roles, one by one."""
        return tuple(name.strip() for name in self.roles.split(","))


@dataclass
class PlacementConfig:
    """The pool of devices that each role runs in; pools are named here, and their sizes follow from their roles.

    Megatron roles of one pool share its processes, and with them one layout.
    """

    actor: str = setting("train", "Pool of the actor")
    reference: str = setting("train", "Pool of the frozen reference")
    critic: str = setting("train", "Pool of the critic")
    reward_model: str = setting("train", "Pool of the reward model")
    rollout: str = setting("train", "Pool of the rollout replicas")


@dataclass
class SftConfig:
    """Supervised fine-tuning (`hybridrl sft`)."""

    num_steps: int = setting(120, "Optimizer steps", at_least=1)
    samples_per_step: int = setting(128, "Demonstrations per optimizer step, over all ranks", at_least=1)
    tool_fraction: float = setting(
        0.35, "Share of demonstrations that show the rewarded behaviour (generated tasks)", at_least=0, at_most=1
    )
    output_path: str = setting("runs/sft", "Folder for the HF checkpoint, relative to the working directory")


@dataclass
class PlanConfig:
    """What `hybridrl plan` assumes of a run; nothing else reads it."""

    cluster: str | None = setting(
        None, "YAML file with the cluster's devices, memory and rates; configs/clusters has some", is_input_path=True
    )
    num_nodes: int | None = setting(None, "Nodes that there are; null plans for as many as the run needs", at_least=1)
    mean_prompt_tokens: int | None = setting(
        None, "Average prompt; null takes half of data.max_prompt_tokens", at_least=1
    )
    mean_response_tokens: int | None = setting(
        None, "Average response, all turns; null takes half of rollout.max_response_tokens", at_least=1
    )
    expert_imbalance: float = setting(
        1.3, "Tokens of the busiest expert-parallel rank over the average, of models with experts", at_least=1
    )


@dataclass
class ExperimentConfig:
    """Everything that one experiment needs."""

    name: str = setting("???", "Run name; results go to <runs_dir>/<name>")
    runs_dir: str = setting("runs", "Folder of all runs, relative to the working directory")
    seed: int = setting(1, "Seed of prompts, sampling and initialisation", at_least=0, at_most=2**32 - 1)
    platform: Platform = setting(Platform.CUDA, "Hardware; hybridrl train supports cpu only for now")
    placement: PlacementConfig = setting(PlacementConfig, "Pools of the roles")
    ray_address: str | None = setting(None, "Existing Ray cluster; none starts one on this machine")
    model: ModelConfig = setting(ModelConfig, "Policy")
    actor: ActorConfig = setting(ActorConfig, "Training role")
    reference: RoleConfig = setting(RoleConfig, "Frozen starting policy, for a KL term")
    critic: CriticConfig = setting(CriticConfig, "Value role")
    rollout: RolloutConfig = setting(RolloutConfig, "Generation role")
    data: DataConfig = setting(DataConfig, "Prompts")
    reward: RewardConfig = setting(RewardConfig, "Scoring")
    algorithm: AlgorithmConfig = setting(AlgorithmConfig, "Algorithm")
    weight_sync: WeightSyncConfig = setting(WeightSyncConfig, "Weight sync")
    trainer: TrainerConfig = setting(TrainerConfig, "Loop")
    checkpoint: CheckpointConfig = setting(CheckpointConfig, "Checkpoints")
    tracking: TrackingConfig = setting(TrackingConfig, "Trackers")
    profile: ProfileConfig = setting(ProfileConfig, "Profilers")
    sft: SftConfig = setting(SftConfig, "Supervised stage")
    plan: PlanConfig = setting(PlanConfig, "Assumptions of the prediction")

    @property
    def goes_on(self) -> bool:
        """Whether the same command goes on with a run that was stopped or lost."""
        return self.checkpoint.every_steps > 0 and self.trainer.resume == RESUME_AUTO
