"""Settings that are one of a few words."""

from __future__ import annotations

import enum


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


class ModelInit(enum.Enum):
    """Where the first weights come from."""

    PRETRAINED = "pretrained"
    RANDOM = "random"


class RewardFailure(enum.Enum):
    """What a reward function's failure means for the run."""

    FAIL = "fail"
    DROP = "drop"


class LongPrompts(enum.Enum):
    """What happens to prompts over ``data.max_prompt_tokens``."""

    ERROR = "error"
    DROP = "drop"
    TRUNCATE_LEFT = "truncate_left"
    TRUNCATE_RIGHT = "truncate_right"


class TransportName(enum.Enum):
    """How weight bytes travel."""

    AUTO = "auto"
    SHM = "shm"
    GLOO = "gloo"
    MIXED = "mixed"
    NCCL = "nccl"
    CUDA_IPC = "cuda_ipc"


class LrSchedule(enum.Enum):
    """Shape of the learning rate after warm-up."""

    CONSTANT = "constant"
    LINEAR = "linear"
    COSINE = "cosine"


class AdvantageEstimator(enum.Enum):
    """How rewards become advantages."""

    GRPO = "grpo"
    DR_GRPO = "dr_grpo"
    RLOO = "rloo"
    REINFORCE_PP = "reinforce_pp"
    REINFORCE_PP_BASELINE = "reinforce_pp_baseline"
    REMAX = "remax"
    GAE = "gae"


class PolicyLossKind(enum.Enum):
    """How the ratio of new to old probability enters the policy loss."""

    CLIP = "clip"
    DUAL_CLIP = "dual_clip"
    GSPO = "gspo"
    CISPO = "cispo"
    SAPO = "sapo"
    GMPO = "gmpo"


class LossAggregation(enum.Enum):
    """How token losses become one number."""

    TOKEN_MEAN = "token_mean"
    SEQ_MEAN_TOKEN_MEAN = "seq_mean_token_mean"
    SEQ_MEAN_TOKEN_SUM = "seq_mean_token_sum"
    SEQ_MEAN_TOKEN_SUM_NORM = "seq_mean_token_sum_norm"


class KlEstimator(enum.Enum):
    """Estimators of the KL divergence per token."""

    K1 = "k1"
    K2 = "k2"
    K3 = "k3"


class OldPolicy(enum.Enum):
    """Whose log-probs the ratio of the policy loss compares with."""

    DECOUPLED = "decoupled"
    BYPASS = "bypass"


class CorrectionMethod(enum.Enum):
    """What happens to importance weights that are out of bounds."""

    NONE = "none"
    TRUNCATE = "truncate"
    MASK = "mask"


class CorrectionLevel(enum.Enum):
    """Over what the importance ratio is taken."""

    TOKEN = "token"
    SEQUENCE = "sequence"
    GEOMETRIC = "geometric"


class RouterReplay(enum.Enum):
    """Whose choice of experts an update takes."""

    OFF = "off"  # its own
    R2 = "r2"  # that of the log-prob pass before it
    R3 = "r3"  # that of the sampler, as does the log-prob pass


class WandbMode(enum.Enum):
    """Whether and how Weights & Biases follows a run."""

    OFF = "off"
    OFFLINE = "offline"  # into the run's folder, for `wandb sync`
    ONLINE = "online"


class ProfileTool(enum.Enum):
    """What records where the time of a process goes."""

    OFF = "off"
    TORCH = "torch"
    NSYS = "nsys"


class Recompute(enum.Enum):
    """Activations that are dropped after the forward pass."""

    NONE = "none"
    SELECTIVE = "selective"  # core attention
    FULL = "full"  # all but the input of each layer
