"""Whole runs, from a checked configuration to the last line on the screen.

Whatever ends a run, Ctrl-C and SIGTERM included, its folder is left whole, its processes are gone, and a Ray that it started
is stopped.
"""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from hybridrl.checkpoint.folder import CheckpointFolder, Found, find_checkpoints
from hybridrl.config.dump import resolved_yaml
from hybridrl.config.schema import RESUME_AUTO, ExperimentConfig
from hybridrl.controller.checkpointing import Checkpointer
from hybridrl.controller.evaluation import Evaluator
from hybridrl.controller.hang_watch import HangWatch
from hybridrl.controller.model_reward import ModelScorer
from hybridrl.controller.parity import require_parity
from hybridrl.controller.profiles import StepProfiles
from hybridrl.controller.recovery import RecoveringRollout
from hybridrl.controller.replays import ReplayFiles
from hybridrl.controller.resuming import Resumed, checkpoints_folder, find_resumable, is_continued, load_newest
from hybridrl.controller.run_lock import sole_writer
from hybridrl.controller.startup import start_actor, start_roles
from hybridrl.controller.stopping import EXIT_FAILED, EXIT_GO_ON, EXIT_INTERRUPTED, StopRequest, stop_signals
from hybridrl.controller.supervised import train_supervised
from hybridrl.controller.tracking import open_trackers
from hybridrl.controller.trainer import Trainer, TrainResult
from hybridrl.data.dataset import open_dataset
from hybridrl.data.demonstrations import open_demonstrations
from hybridrl.data.tokenizer import load_tokenizer
from hybridrl.errors import ConfigError, RankLostError
from hybridrl.layout.parallel import parallel_sizes
from hybridrl.layout.roles import PlacedRole, by_pool, megatron_roles
from hybridrl.observability.recorder import RunRecorder
from hybridrl.observability.report import Decode
from hybridrl.rewards.score import make_scorer
from hybridrl.roles.future import wait_for
from hybridrl.roles.megatron_policy import MegatronActor
from hybridrl.roles.megatron_state import MegatronState

_HF_FOLDER = "hf"
_EXPORTED_STEP = "exported_step"
"""File in that folder with the number of steps that the policy in it was trained for; loaders pass it over."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """The last line of a run, and its exit code."""

    summary: str
    exit_code: int = 0


def train(config: ExperimentConfig) -> int:
    """Train with RL; return the exit code.

    Raises:
        HybridRLError: What ended the run; the message says where and what to do next.
    """
    is_shared = config.trainer.resume == RESUME_AUTO  # any other run has a folder of its own
    run_dir = Path(config.runs_dir) / config.name
    with sole_writer(run_dir, partial(print, flush=True)) if is_shared else contextlib.nullcontext():
        return _train(config)


def _train(config: ExperimentConfig) -> int:
    tokenizer = load_tokenizer(Path(config.model.path))
    dataset = open_dataset(config.data, tokenizer, config.seed)
    resumable = find_resumable(config)
    stop_texts = [tokenizer.decode([token]) for token in tokenizer.stop_token_ids]

    if _is_trained(config, resumable):
        print(f"{Path(config.runs_dir) / config.name} has its {config.trainer.num_steps} steps already", flush=True)
        return 0
    stop = StopRequest(on_term=bool(config.checkpoint.every_steps))

    def run(recorder: RunRecorder) -> Outcome:
        for note in dataset.notes:
            recorder.status(note)
        _make_checkpoints_folder(config, recorder.run_dir)
        if config.trainer.parity_check:
            require_parity(config, recorder.run_dir, recorder.status)
        first = dataset.train.first.token_ids
        with (
            _hang_watch(config, recorder, EXIT_GO_ON if config.goes_on else EXIT_FAILED) as watch,
            contextlib.closing(make_scorer(config.reward, config.data.task, stop_texts, watch.session)) as parts,
            start_roles(config, recorder.run_dir, first, watch) as roles,
        ):
            rollout = RecoveringRollout(roles.rollout, roles.weight_sync, config.rollout.max_restarts, recorder.status)
            model = roles.models.reward_model
            scorer = ModelScorer(parts, model, config.reward) if model else parts
            resumed = load_newest(resumable, roles.models.states, recorder.status)
            if resumed:
                dataset.train.restore(resumed.state.stream)
                rollout.sync(resumed.state.step)
            recorder.resume(resumed.state.step if resumed else 0)
            trainer = Trainer(
                config.trainer,
                config.algorithm,
                actor=roles.models.actor,
                rollout=rollout,
                weight_sync=rollout,
                prompts=dataset.train,
                scorer=scorer,
                evaluator=Evaluator(rollout, scorer, dataset.evaluation, config.data.eval_samples_per_prompt),
                recorder=recorder,
                reference=roles.models.reference,
                critic=roles.models.critic,
                critic_warmup_steps=config.critic.warmup_steps,
                checkpoints=_checkpointer(config, roles.models.states, recorder, resumed),
                start=resumed.state if resumed else None,
                replays=ReplayFiles(config, recorder.run_dir, stop_texts),
                stop=stop,
                profiled=StepProfiles(config.profile, roles.processes).around,
            )
            with watch.steps():
                result = trainer.run()
            if result.is_stopped:
                return _stopped(config, result, recorder.run_dir)
            if config.trainer.save_hf_at_end:
                recorder.status("writing the trained policy")
                export_policy(roles.models.actor, (recorder.run_dir / _HF_FOLDER).absolute(), result.num_steps)
        return Outcome(_summary(result))

    num_steps = config.trainer.num_steps
    with _told_how_to_go_on(config):
        return _recorded(
            config, num_steps, _what_starts(config), run, tokenizer.decode, is_continued=is_continued(config), stop=stop
        )


def sft(config: ExperimentConfig) -> int:
    """Train on demonstrations and write an HF checkpoint; return the exit code.

    Raises:
        HybridRLError: What ended the run; the message says where and what to do next.
    """
    output = Path(config.sft.output_path)
    if output.exists():
        raise ConfigError(f"sft.output_path: {output} exists already; choose another folder or remove it")
    tokenizer = load_tokenizer(Path(config.model.path))
    demonstrations = open_demonstrations(config.data, tokenizer, config.sft.tool_fraction, config.seed)

    def run(recorder: RunRecorder) -> Outcome:
        num_steps = config.sft.num_steps
        with (
            _hang_watch(config, recorder, EXIT_FAILED) as watch,
            start_actor(config, num_steps, recorder.run_dir, watch) as actor,
        ):
            with watch.steps():
                train_supervised(
                    actor, demonstrations, recorder, num_steps=num_steps, samples_per_step=config.sft.samples_per_step
                )
            recorder.status("writing the checkpoint")
            wait_for(actor.save_checkpoint(output.absolute()))
        return Outcome(f"checkpoint: {output}")

    return _recorded(
        config, config.sft.num_steps, f"starting {_ranks(megatron_roles(config)[:1])}", run, tokenizer.decode
    )


def _recorded(
    config: ExperimentConfig,
    num_steps: int,
    status: str,
    run: Callable[[RunRecorder], Outcome],
    decode: Decode = str,
    *,
    is_continued: bool = False,
    stop: StopRequest | None = None,
) -> int:
    """Run inside a run folder that is left whole; print the last line."""
    recorder = RunRecorder(
        Path(config.runs_dir), config.name, resolved_yaml(config), num_steps, decode=decode, is_continued=is_continued
    )
    try:
        with stop_signals(stop), recorder:
            for tracker in open_trackers(config, recorder.run_dir):
                recorder.track(tracker)
            recorder.status(status)
            outcome = run(recorder)
    except KeyboardInterrupt:
        print(f"interrupted; report: {recorder.close()}", flush=True)
        return EXIT_INTERRUPTED
    print(f"{outcome.summary} report: {recorder.close()}", flush=True)
    return outcome.exit_code


def _checkpointer(
    config: ExperimentConfig, models: Sequence[MegatronState], recorder: RunRecorder, resumed: Resumed | None
) -> Checkpointer | None:
    """Return what saves the run."""
    if not config.checkpoint.every_steps:
        return None
    root = checkpoints_folder(config, recorder.run_dir)
    folder = CheckpointFolder(root, config.checkpoint.keep, resumed.folder if resumed else None)
    return Checkpointer(config.checkpoint, folder, models, recorder, Path(config.model.path))


def _make_checkpoints_folder(config: ExperimentConfig, run_dir: Path) -> None:
    """Make it before anything starts: what cannot be made is refused, and the run can be gone on with from the start."""
    if not config.checkpoint.every_steps:
        return
    root = checkpoints_folder(config, run_dir)
    try:
        root.mkdir(parents=True, exist_ok=True)
    except OSError as e:
        raise ConfigError(f"checkpoint.folder: {root} cannot be made ({e}); choose another folder") from e


def export_policy(actor: MegatronActor, folder: Path, step: int) -> None:
    """Write the policy after `step` steps; what a run that goes on wrote before stays until the new one is whole."""
    fresh = folder.with_name(f"{folder.name}.new")
    shutil.rmtree(fresh, ignore_errors=True)
    wait_for(actor.save_checkpoint(fresh))
    (fresh / _EXPORTED_STEP).write_text(f"{step}\n", encoding="utf-8")
    shutil.rmtree(folder, ignore_errors=True)
    fresh.rename(folder)


def _is_trained(config: ExperimentConfig, found: Found) -> bool:
    """Whether an earlier job of this run has finished it."""
    num_steps = config.trainer.num_steps
    exported = _exported_step(Path(config.runs_dir) / config.name / _HF_FOLDER)
    is_done = bool(found.complete) and found.complete[0].manifest.step >= num_steps
    return is_continued(config) and is_done and (exported >= num_steps or not config.trainer.save_hf_at_end)


def _exported_step(folder: Path) -> int:
    """Return after how many steps the policy in the folder was exported; -1 when that cannot be told."""
    try:
        return int((folder / _EXPORTED_STEP).read_text(encoding="utf-8"))
    except (FileNotFoundError, ValueError):
        return -1


def _stopped(config: ExperimentConfig, result: TrainResult, run_dir: Path) -> Outcome:
    """Say how to go on; the exit code asks for the same command again only where that would go on."""
    code = EXIT_GO_ON if config.goes_on else EXIT_INTERRUPTED
    if not result.num_steps:  # asked while roles started
        return Outcome("stopped before the first step;", code)
    return Outcome(f"stopped after step {result.num_steps}{_how_to_go_on(config, run_dir)};", code)


def _how_to_go_on(config: ExperimentConfig, run_dir: Path) -> str:
    if not config.checkpoint.every_steps:
        return " without a checkpoint (checkpoint.every_steps is 0)"
    saved = find_checkpoints(checkpoints_folder(config, run_dir)).complete
    where = f"the checkpoint after step {saved[0].manifest.step}" if saved else ""
    if config.goes_on:
        return f"; the same command goes on from {where or 'the beginning: it has no checkpoint yet'}"
    return f"; go on from {where} with trainer.resume={run_dir}" if where else ", before its first checkpoint"


@contextlib.contextmanager
def _told_how_to_go_on(config: ExperimentConfig) -> Iterator[None]:
    """Say of a lost run whether the same command goes on with it."""
    try:
        yield
    except RankLostError as e:
        e.can_go_on = config.goes_on
        advice = (
            "The same command goes on from the newest checkpoint"
            if e.can_go_on
            else "The same command would begin anew: it goes on with checkpoint.every_steps above 0 and trainer.resume=auto"
        )
        e.args = (f"{e}\n{advice}",)
        raise


def _hang_watch(config: ExperimentConfig, recorder: RunRecorder, exit_code: int) -> HangWatch:
    return HangWatch(config.trainer, recorder.run_dir, recorder.running_phases, exit_code, recorder.timeline.add)


def _summary(result: TrainResult) -> str:
    if result.last_accuracy is None:
        return f"trained {result.num_steps} steps"
    return f"eval/accuracy {result.last_accuracy:.3f} (was {result.first_accuracy:.3f})"


def _what_starts(config: ExperimentConfig) -> str:
    rollout = config.rollout
    ranks = " and ".join(_ranks(members) for members in by_pool(megatron_roles(config)).values())
    return f"starting {ranks} and {rollout.num_replicas} vLLM replicas (tp {rollout.tp_size})"


def _ranks(members: Sequence[PlacedRole]) -> str:
    sizes = parallel_sizes(members[0].parallel)
    return (
        f"{sizes.world_size} Megatron ranks for {', '.join(member.role.value for member in members)} (tp {sizes.tp}, pp {sizes.pp}, "
        f"ep {sizes.ep}, etp {sizes.etp}, cp {sizes.cp}, dp {sizes.dp})"
    )
