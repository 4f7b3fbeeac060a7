"""Is the model there, and do the parallel degrees divide it? Reads file headers and small JSON files only."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from hybridrl.config.choices import ModelInit, OldPolicy, RouterReplay
from hybridrl.config.schema import ExperimentConfig, MoeConfig, ParallelConfig
from hybridrl.errors import LayoutError
from hybridrl.layout.checkpoint import checkpoint_shard_map, read_checkpoint_index
from hybridrl.layout.families import read_model_spec
from hybridrl.layout.features import training_obstacles
from hybridrl.layout.model import GatedMlp, GqaAttention, MlaAttention, ModelSpec, MoeMlp
from hybridrl.preflight.command import Command
from hybridrl.preflight.pipeline import check_pipeline
from hybridrl.preflight.report import Report, divisors
from hybridrl.preflight.tokenizer import check_tokenizer


def check_model(report: Report, config: ExperimentConfig, command: Command) -> ModelSpec | None:
    """Check the model folder and everything that depends on the model; returns its spec when it could be read."""
    folder = Path(config.model.path)
    if report.draft.is_broken("model.path"):
        return None
    if not folder.is_dir():
        expected = "a folder with config.json, tokenizer.json and *.safetensors files"
        report.add("model.path", folder, expected, "correct the path")
        return None
    spec = _read_spec(report, folder)
    tokenizer = check_tokenizer(report, config, command, folder)
    if spec is not None:
        for obstacle in training_obstacles(spec):
            got = f"a {spec.family} model with {obstacle}"
            report.add("model.path", got, "features that the Megatron engine trains", "use another model")
        _check_weights(report, config, command, spec, folder)
        if tokenizer is not None and tokenizer.vocab_size > spec.vocab_size:
            got = f"a tokenizer of {tokenizer.vocab_size} tokens in {folder}"
            report.add(
                "model.path", got, f"at most the model's vocab_size {spec.vocab_size}", "use the model's own tokenizer"
            )
        check_degrees(report, "actor.parallel", config.actor.parallel, spec)
        _check_balance(report, config.actor.moe, spec)
        if command is Command.TRAIN:
            _check_rollout(report, config, spec)
            _check_replay(report, config, spec)
    return spec


def _check_balance(report: Report, config: MoeConfig, spec: ModelSpec) -> None:
    experts = [mlp for layer in spec.layers if isinstance(mlp := layer.mlp, MoeMlp)]
    for name in ("aux_loss_coef", "z_loss_coef"):
        if (weight := getattr(config, name)) and not experts:
            report.add(f"actor.moe.{name}", weight, "0, since the model has no experts", "set it to 0")
    if config.bias_update_rate and not any(mlp.correction_bias for mlp in experts):
        expected = f"0, since no router of a {spec.family} model has a bias"
        report.add("actor.moe.bias_update_rate", config.bias_update_rate, expected, "set it to 0")


def _check_replay(report: Report, config: ExperimentConfig, spec: ModelSpec) -> None:
    key, replay = "actor.router_replay", config.actor.router_replay
    if replay is RouterReplay.OFF:
        return
    if not spec.moe_layers:
        report.add(key, replay.value, "off, since the model has no experts", "set it to off")
    if replay is RouterReplay.R2 and config.algorithm.rollout_correction.old_policy is OldPolicy.BYPASS:
        expected = (
            "off or r3, since algorithm.rollout_correction.old_policy is bypass and no log-prob pass records experts"
        )
        report.add(key, replay.value, expected, "set it to r3", related=("algorithm.rollout_correction.old_policy",))


def _read_spec(report: Report, folder: Path) -> ModelSpec | None:
    try:
        return read_model_spec(folder)
    except LayoutError as e:
        report.add("model.path", folder, "a supported model", str(e))
        return None


def _check_weights(report: Report, config: ExperimentConfig, command: Command, spec: ModelSpec, folder: Path) -> None:
    if config.model.init is ModelInit.RANDOM:
        if command is Command.TRAIN:
            next_step = "train a checkpoint with hybridrl sft first and set model.path to it"
            report.add("model.init", "random", "pretrained for hybridrl train", next_step)
        return
    try:
        checkpoint_shard_map(read_checkpoint_index(folder), spec, str(folder))
    except LayoutError as e:
        report.add("model.path", folder, "the model's weights", str(e), related=("model.init",), is_need=True)


def check_degrees(report: Report, section: str, parallel: ParallelConfig, spec: ModelSpec) -> None:
    """Check parallel degrees against each other and against the sizes of the model.

    Args:
        section: Of the degrees, e.g. ``actor.parallel``.
    """
    attention = spec.layers[0].attention
    _check_heads(report, f"{section}.tp_size", parallel.tp_size, attention)
    check_pipeline(report, section, parallel, spec)
    dense_sizes = {layer.mlp.intermediate_size for layer in spec.layers if isinstance(layer.mlp, GatedMlp)}
    for size in sorted(dense_sizes):
        _check_divides(report, f"{section}.tp_size", parallel.tp_size, size, "rows of a dense MLP (intermediate_size)")
    experts = [layer.mlp for layer in spec.layers if isinstance(layer.mlp, MoeMlp)]
    if not experts:
        for name, degree in (("ep_size", parallel.ep_size), ("etp_size", parallel.etp_size)):
            if degree > 1:
                report.add(f"{section}.{name}", degree, "1, since the model has no experts", "set it to 1")
        return
    for count in sorted({mlp.num_experts for mlp in experts}):
        _check_divides(report, f"{section}.ep_size", parallel.ep_size, count, "experts")
    for size in sorted({mlp.intermediate_size for mlp in experts}):
        what = "rows of an expert (moe_intermediate_size)"
        _check_divides(report, f"{section}.etp_size", parallel.etp_size, size, what)
    if parallel.tp_size > 1 and not parallel.sequence_parallel:
        expected = "true, since tp_size > 1 and the model has experts"
        report.add(f"{section}.sequence_parallel", "false", expected, "set it to true", related=(f"{section}.tp_size",))


def _check_rollout(report: Report, config: ExperimentConfig, spec: ModelSpec) -> None:
    rollout = config.rollout
    _check_heads(report, "rollout.tp_size", rollout.tp_size, spec.layers[0].attention)
    for size in _unique(layer.mlp.intermediate_size for layer in spec.layers):
        _check_divides(report, "rollout.tp_size", rollout.tp_size, size, "rows of an MLP or expert (intermediate size)")
    if rollout.max_model_tokens > spec.max_positions:
        expected = f"at most the model's max_position_embeddings {spec.max_positions}"
        report.add("rollout.max_model_tokens", rollout.max_model_tokens, expected, "lower it", related=("model.path",))


def _check_heads(report: Report, key: str, degree: int, attention: GqaAttention | MlaAttention) -> None:
    kv = attention.num_kv_heads if isinstance(attention, GqaAttention) else attention.num_heads
    if attention.num_heads % degree:
        _check_divides(report, key, degree, attention.num_heads, "attention heads")
    elif kv % degree and degree % kv:
        report.add(key, degree, f"a divisor or a multiple of the model's {kv} key-value heads", "choose another degree")


def _check_divides(report: Report, key: str, degree: int, total: int, what: str) -> None:
    if total % degree:
        report.add(key, degree, f"a divisor of the model's {total} {what}", f"choose one of {divisors(total)}")


def _unique(numbers: Iterable[int]) -> list[int]:
    return sorted(set(numbers))
