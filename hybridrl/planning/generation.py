"""A vLLM replica: what its memory holds, and how fast it can decode.

Decoding is bound by memory: each step reads the weights that its tokens meet, and the whole KV cache of its sequences.

    step seconds >= max((weights + KV) / (rate x share), 2 active B / peak) + all-reduces
    weights read  = dense + experts (1 - (1 - k / E) ** B), for B sequences that choose experts evenly

Source: vllm 0.32, v1/worker/gpu_worker.py (the pool), v1/kv_cache_interface.py (bytes per token).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from hybridrl.config.choices import Platform
from hybridrl.config.schema import ExperimentConfig
from hybridrl.layout.model import MlaAttention, ModelSpec, MoeMlp
from hybridrl.layout.shard import Place
from hybridrl.layout.vllm import vllm_shard_map
from hybridrl.planning.cluster import Cluster
from hybridrl.planning.layouts import DTYPES, generation_layout
from hybridrl.planning.parameters import layer_elements, map_bytes, num_active_parameters
from hybridrl.planning.workload import Workload

_GIB = 2**30
_FLOAT32 = 4
_BATCHED_TOKENS = 8192  # vLLM's default where it is not set, on devices with 70 GiB and more
_RUNTIME_BYTES = 1 * _GIB  # context and communicators
_GRAPH_BYTES = int(1.5 * _GIB)
_HIDDEN_COPIES = 10  # of a token's hidden state, in the peak of a profile run
# Share of the memory rate that decoding reaches: pessimistically, optimistically.
MEMORY_SHARES = (0.5, 0.7)
_ALL_REDUCE_S = {True: 15e-6, False: 45e-6}  # within a node, across nodes


@dataclass(frozen=True, slots=True)
class Replica:
    """Memory of one worker, and what fits into it.

    Attributes:
        pool_bytes: What vLLM takes in all; 0 where it has no pool (cpu).
        activation_bytes: Peak of a forward pass over the most tokens that are batched.
        runtime_bytes: Context, communicators and graphs.
        kv_bytes_per_token: Of one worker.
        module_bytes: Largest module in load layout, which a weight sync needs beside the weights.
        running_samples: Sequences of average length that decode at once.
    """

    weight_bytes: int
    pool_bytes: int
    activation_bytes: int
    runtime_bytes: int
    kv_bytes: int
    kv_bytes_per_token: int
    module_bytes: int
    running_samples: int

    @property
    def kv_tokens(self) -> int:
        """Tokens that the KV cache holds."""
        return self.kv_bytes // self.kv_bytes_per_token


def plan_replica(
    config: ExperimentConfig, spec: ModelSpec, held: ModelSpec, cluster: Cluster, work: Workload
) -> Replica:
    """Return what a worker's memory holds.

    Args:
        held: The model in bundles of experts (``bundles.py``).
    """
    rollout, is_cuda = config.rollout, config.platform is Platform.CUDA
    shard_map = vllm_shard_map(generation_layout(config, held), 0, Place("rollout", 0, "", ""))
    weights, activation = map_bytes(shard_map), _activation_bytes(config, spec)
    runtime = _RUNTIME_BYTES + (0 if rollout.enforce_eager else _GRAPH_BYTES) if is_cuda else 0
    pool = int(rollout.gpu_memory_fraction * cluster.memory_bytes) if is_cuda else 0
    kv = max(0, pool - weights - activation - runtime) if is_cuda else rollout.kv_cache_gib * _GIB
    per_token = kv_bytes_per_token(config, spec)
    modules: dict[str, int] = {}
    for name, tensor in shard_map.tensors.items():
        module = name.rpartition(".")[0]
        modules[module] = modules.get(module, 0) + tensor.dtype.itemsize * math.prod(tensor.shape)
    room = kv // (per_token * (work.prompt_tokens + work.response_tokens // 2))
    share = -(-work.num_generated // rollout.num_replicas)
    running = min(share, rollout.max_running_samples, room)
    return Replica(weights, pool, activation, runtime, kv, per_token, max(modules.values()), running)


def kv_bytes_per_token(config: ExperimentConfig, spec: ModelSpec) -> int:
    """Return the KV cache of a token on one worker; latent attention keeps the whole latent on each."""
    width, tp = DTYPES[config.rollout.precision].itemsize, config.rollout.tp_size
    total = 0
    for layer in spec.layers:
        attention = layer.attention
        if isinstance(attention, MlaAttention):
            total += width * attention.compressed_kv_rows
        else:
            total += 2 * width * -(-attention.num_kv_heads // tp) * attention.head_dim
    return total


def _activation_bytes(config: ExperimentConfig, spec: ModelSpec) -> int:
    """Return the peak of a profile run; an inference, not measured."""
    if config.platform is Platform.CPU:
        return 0
    rollout, width = config.rollout, DTYPES[config.rollout.precision].itemsize
    experts = [layer.mlp for layer in spec.layers if isinstance(layer.mlp, MoeMlp)]
    routed = max(
        (m.num_experts_per_token * (m.hidden_size + 3 * m.intermediate_size / rollout.tp_size) for m in experts),
        default=0.0,
    )
    per_token = width * (_HIDDEN_COPIES * spec.hidden_size + routed)
    logits = _FLOAT32 * rollout.max_running_samples * spec.vocab_size
    return int(_BATCHED_TOKENS * per_token + logits)


@dataclass(frozen=True, slots=True)
class DecodeStep:
    """One decoding step of a replica.

    Attributes:
        read_bytes: Weights and KV cache, over all workers.
        seconds: Pessimistic and optimistic.
        bound: What takes longest: "memory", "compute" or "latency".
    """

    num_samples: int
    context_tokens: int
    read_bytes: float
    seconds: tuple[float, float]
    bound: str


def decode_step(
    config: ExperimentConfig, spec: ModelSpec, cluster: Cluster, num_samples: int, context_tokens: int
) -> DecodeStep:
    """Return the roofline of a step over so many sequences of an average context."""
    tp, width = config.rollout.tp_size, DTYPES[config.rollout.precision].itemsize
    kv = num_samples * context_tokens * kv_bytes_per_token(config, spec) * tp
    read = width * _elements_read(spec, num_samples) + kv
    memory = [read / (tp * cluster.memory_gb_per_s * 1e9 * share) for share in MEMORY_SHARES]
    compute = 2 * num_active_parameters(spec) * num_samples / (tp * cluster.peak_tflops * 1e12)
    is_near = tp <= cluster.devices_per_node
    latency = 2 * len(spec.layers) * _ALL_REDUCE_S[is_near] if tp > 1 else 0.0
    seconds = [max(each, compute) + latency for each in memory]
    times = {"memory": memory[0], "compute": compute, "latency": latency}
    return DecodeStep(
        num_samples, context_tokens, read, (seconds[0], seconds[1]), max(times, key=lambda name: times[name])
    )


def _elements_read(spec: ModelSpec, num_samples: int) -> float:
    """Return the weights that one token of each of several sequences meets together; the embedding's rows are left out."""
    total = float(spec.vocab_size * spec.hidden_size)
    for layer in spec.layers:
        dense, per_expert = layer_elements(layer)
        total += dense
        if isinstance(mlp := layer.mlp, MoeMlp):
            hit = 1 - (1 - mlp.num_experts_per_token / mlp.num_experts) ** num_samples
            total += mlp.num_experts * per_expert * hit
    return total
