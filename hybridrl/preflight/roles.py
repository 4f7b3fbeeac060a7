"""Do the Megatron roles fit their models, their pools and each other?"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from hybridrl.config.choices import LrSchedule, TaskName
from hybridrl.config.schema import ExperimentConfig, ParallelConfig, RoleParallelConfig
from hybridrl.data.tokenizer import load_tokenizer
from hybridrl.errors import DataError, LayoutError
from hybridrl.layout.checkpoint import checkpoint_shard_map, read_checkpoint_index
from hybridrl.layout.features import training_obstacles
from hybridrl.layout.model import ModelSpec
from hybridrl.layout.roles import ModelRole, PlacedRole, by_pool, megatron_roles
from hybridrl.layout.value_model import backbone, new_value_model_spec, read_value_model_spec
from hybridrl.preflight.batch import check_budget
from hybridrl.preflight.command import Command
from hybridrl.preflight.model import check_degrees
from hybridrl.preflight.report import Report

_DEGREES = ("tp_size", "pp_size", "ep_size", "etp_size", "cp_size", "dp_size")


def check_roles(report: Report, config: ExperimentConfig, command: Command, spec: ModelSpec | None) -> None:
    """Check the layout of every role, and what the roles of a pool have in common.

    Args:
        spec: Of the policy; None when it could not be read.
    """
    actor, *beside = megatron_roles(config)
    _check_expert_ranks(report, "actor.parallel", actor.parallel)
    if command is Command.SFT:
        return
    for placed in beside:
        own = placed.own
        assert own is not None, placed
        _check_own_pipeline(report, placed.section, own.parallel)
        role_spec = (
            _check_value_model(report, placed, spec, Path(config.model.path)) if placed.role.has_values else spec
        )
        if placed.parallel != actor.parallel:
            _check_expert_ranks(report, f"{placed.section}.parallel", placed.parallel)
        if role_spec is not None and (placed.parallel, placed.folder) != (actor.parallel, actor.folder):
            check_degrees(report, f"{placed.section}.parallel", placed.parallel, role_spec)
        if placed.parallel != actor.parallel or own.micro_batch_tokens is not None:
            keys = (f"{placed.section}.micro_batch_tokens", f"{placed.section}.parallel")
            check_budget(report, config, *keys, placed.parallel, own.micro_batch_tokens)
    for members in by_pool([actor, *beside]).values():
        for other in members[1:]:
            _check_same_layout(report, members[0], other)


def unread_by_roles(config: ExperimentConfig) -> Iterator[tuple[str, str]]:
    """Yield keys of roles that have no effect, and why."""
    if not config.algorithm.needs_reference:
        reason = "without a KL term (algorithm.policy_loss.kl_coef, algorithm.reward_kl.coef)"
        yield from (("reference", reason), ("placement.reference", reason))
    if not config.algorithm.needs_values:
        reason = "by an algorithm without values (algorithm.advantage.estimator)"
        yield from (("critic", reason), ("placement.critic", reason))
    elif config.critic.optimizer.schedule is LrSchedule.CONSTANT:
        yield "critic.optimizer.min_lr", "when critic.optimizer.schedule is constant"
    if config.data.task is not TaskName.FILE:
        yield "placement.reward_model", f"when data.task is {config.data.task.value}, which brings its own reward"
    elif config.reward.model.weight == 0:
        yield "placement.reward_model", "when reward.model.weight is 0"


def _check_expert_ranks(report: Report, section: str, parallel: ParallelConfig) -> None:
    ranks = parallel.tp_size * parallel.cp_size * parallel.dp_size
    expert_ranks = parallel.ep_size * parallel.etp_size
    if ranks % expert_ranks:
        key = f"{section}.ep_size" if parallel.ep_size > 1 else f"{section}.etp_size"
        got = f"ep_size {parallel.ep_size} x etp_size {parallel.etp_size} = {expert_ranks}"
        sizes = f"tp_size {parallel.tp_size} x cp_size {parallel.cp_size} x dp_size {parallel.dp_size}"
        expected = f"a divisor of the ranks of a pipeline stage, {sizes} = {ranks}"
        report.add(key, got, expected, "lower it or raise dp_size", related=(section,))


def _check_own_pipeline(report: Report, section: str, own: RoleParallelConfig) -> None:
    if own.pipeline_layout is not None and own.pp_size is None:
        key, expected = f"{section}.parallel.pipeline_layout", f"null, since {section}.parallel.pp_size is null"
        report.add(key, own.pipeline_layout, expected, "set both", related=(f"{section}.parallel.pp_size",))


def _check_same_layout(report: Report, first: PlacedRole, other: PlacedRole) -> None:
    """Refuse two layouts in one pool: Megatron-core's parallel_state is one per process."""
    if other.parallel == first.parallel:
        return
    differing = next((name for name in _DEGREES if _degree(other, name) != _degree(first, name)), "pipeline_layout")
    key, placement = f"{other.section}.parallel.{differing}", f"placement.{other.role.value}"
    expected = (
        f"{_degree(first, differing)} as in {first.section}.parallel, since {placement} and placement.{first.role.value} are both "
        f"{other.pool} and Megatron-core keeps one layout per process"
    )
    next_step = f"leave it out, or give the role processes of its own, e.g. with {placement}: {other.role.value}"
    report.add(key, _degree(other, differing), expected, next_step, related=(f"{first.section}.parallel", placement))


def _degree(placed: PlacedRole, name: str) -> object:
    return getattr(placed.parallel, name)


def _check_value_model(
    report: Report, placed: PlacedRole, policy: ModelSpec | None, policy_folder: Path
) -> ModelSpec | None:
    """Check the checkpoint of a model with a value head; returns its spec when it could be read."""
    key, folder, related = placed.folder_key, placed.folder, ("model.path",)
    if report.draft.is_broken("model.path") or report.draft.is_broken(key):
        return None
    try:
        spec = new_value_model_spec(folder)
    except LayoutError as e:
        report.add(key, folder, "a checkpoint to start from", str(e), related=related)
        return None
    try:
        spec = read_value_model_spec(folder)
        has_head = _check_weights(folder, spec)
    except LayoutError as e:
        report.add(key, folder, "a checkpoint to start from", str(e), related=related, is_need=True)
        return spec
    for obstacle in training_obstacles(spec):
        got = f"a {spec.family} model with {obstacle}"
        report.add(key, got, "features that the Megatron engine runs", "use another model", related=related)
    assert spec.value_head is not None, folder
    if spec.value_head.num_labels != 1:
        got = f"a value head of {spec.value_head.num_labels} labels in {folder}"
        report.add(key, got, "one label", "use a checkpoint with one", related=related)
    if not has_head and placed.role is ModelRole.REWARD_MODEL:
        expected = "a sequence-classification checkpoint, with score.weight"
        report.add(key, folder, expected, "use a trained reward model", related=related)
    if policy is not None and spec.vocab_size != policy.vocab_size:
        expected = f"that of model.path, {policy.vocab_size}: it reads the policy's tokens"
        report.add(key, f"a vocab_size of {spec.vocab_size}", expected, "use a model of the same tokenizer")
    else:
        _check_same_tokens(report, key, folder, policy_folder)
    return spec


def _check_weights(folder: Path, spec: ModelSpec) -> bool:
    """Check that the files hold the weights, but for a value head that starts anew; return whether they hold the head.

    Raises:
        LayoutError: When they do not.
    """
    index = read_checkpoint_index(folder)
    assert spec.value_head is not None, folder
    has_head = spec.value_head.weight in index
    checkpoint_shard_map(index, spec if has_head else backbone(spec), str(folder))
    return has_head


def _check_same_tokens(report: Report, key: str, folder: Path, policy_folder: Path) -> None:
    """Check that a tokenizer in the folder numbers tokens as the policy's does."""
    if folder == policy_folder or not (folder / "tokenizer.json").is_file():
        return
    try:
        is_same = load_tokenizer(folder).vocabulary == load_tokenizer(policy_folder).vocabulary
    except DataError as e:
        report.add(key, folder, "a tokenizer like that of model.path", str(e), related=("model.path",))
        return
    if not is_same:
        expected = "the tokens of model.path under the same numbers: it reads the policy's tokens"
        next_step = "use a model of the same tokenizer"
        report.add(key, f"another tokenizer in {folder}", expected, next_step, related=("model.path",))
