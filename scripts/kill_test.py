#!/usr/bin/env python3
"""Kill a run again and again, and hold what it comes to against a run that nobody touched.

    scripts/kill_test.py --kills 30

One run goes through undisturbed. A second one with the same configuration makes a checkpoint after every step; one of its processes
(controller, a training rank, the replica, its sampler) is killed with SIGKILL at a random moment inside a random phase, until all kills are
spent. A run that ends is started again with trainer.resume=auto. A run that loses its replica once it has started goes on in place, or ends
as well with --no-in-place. At the end:

- after each kill that ended the run, every checkpoint that has a manifest was intact, and the next start found one to go on from;
- metrics.jsonl has every step once, and every value but times and rates equals the undisturbed run's to the bit;
- every step trained on the very samples of the undisturbed run, and no sample occurs twice;
- no process that was there at a kill that the run survived is left.

With a lag and in place, prompts that are played again may be played by a newer version, so there it is not the bits that are compared: every
step trained on as many samples of the same prompts as the undisturbed run, and no token is of a version that the lag does not allow.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import random
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil
import pyarrow as pa
import pyarrow.parquet as pq

from hybridrl.checkpoint.folder import find_checkpoints
from hybridrl.checkpoint.manifest import damage_of

ROOT = Path(__file__).parents[1]
CONFIG = ROOT / "configs" / "demo" / "calc.yaml"
PHASES = ("rollout", "old_logprobs", "train", "weight_sync", "checkpoint")
START = "start"
START_S = 20.0
"""Longest wait before a kill while roles start and the checkpoint is loaded."""
REPLICA = ("replica", "sampler")
TITLES = {"rank": "ray::MegatronWorker", "replica": "ray::RolloutReplica", "sampler": "VLLM::Engine"}
"""How the processes of a run call themselves."""
CONTROLLER = "controller"
PROBE = "weight_sync/probe_abs_max"
LIFE_S = 240.0
"""Bound on every wait for a run's next move."""


@dataclass(frozen=True)
class Kill:
    """What was killed, after how many steps, and what became of the run: its exit code, or None when it went on."""

    target: str
    phase: str
    step: int
    exit_code: int | None
    num_checkpoints: int


class Life:
    """One process of the run, from start to end."""

    def __init__(self, folder: Path, name: str, config: Path, overrides: list[str]) -> None:
        self._families: list[psutil.Process] = []
        self.run_dir = folder / name
        self._phases = folder / f"{name}.phases"
        self._phases.write_text("")
        command = [sys.executable, str(Path(__file__)), "--child", str(self._phases), "train", str(config)]
        log = (folder / f"{name}.log").open("a")
        self.process = subprocess.Popen(
            [*command, f"runs_dir={folder}", f"name={name}", *overrides], stdout=log, stderr=subprocess.STDOUT, cwd=ROOT
        )
        log.close()

    def num_rows(self) -> int:
        """Return the steps that the run's folder has metrics of."""
        path = self.run_dir / "metrics.jsonl"
        return path.read_bytes().count(b"\n") if path.exists() else 0

    def wait_for_phase(self, phase: str, num_steps: int) -> None:
        """Wait until a phase begins after at least so many steps of this life; some last a millisecond."""
        deadline, seen = time.monotonic() + LIFE_S, self._phases.stat().st_size
        while True:
            assert self.process.poll() is None, f"the run ended early, exit code {self.process.returncode}; see its log"
            assert time.monotonic() < deadline, f"no {phase} after {num_steps} steps within {LIFE_S} s"
            lines = self._phases.read_bytes()[seen:].decode().rpartition("\n")[0].splitlines()
            if any(name == phase and int(number) >= num_steps for name, number in map(str.split, lines)):
                return
            time.sleep(0.002)

    def kill(self, target: str, rng: random.Random) -> tuple[str, int | None]:
        """Kill a process, and see the run to its end.

        Returns:
            What was killed, since at the very start only the controller is there, and the exit code; None when the run went on.
        """
        family = psutil.Process(self.process.pid).children(recursive=True)
        victims = [each for each in family if target in TITLES and _title(each).startswith(TITLES[target])]
        num_rows = self.num_rows()
        (rng.choice(victims) if victims else self.process).kill()
        killed = target if victims else CONTROLLER
        deadline = time.monotonic() + LIFE_S
        while self.process.poll() is None and self.num_rows() < num_rows + 2:
            assert time.monotonic() < deadline, (
                f"the run neither ended nor went on within {LIFE_S} s after losing its {target}"
            )
            time.sleep(0.1)
        if self.process.poll() is None:
            self._families += family
            return killed, None
        _end(family)
        return killed, self.process.returncode

    def finish(self) -> None:
        """See the run through to its last step."""
        assert self.process.wait(LIFE_S * 10) == 0, f"{self.run_dir}: exit code {self.process.returncode}; see its log"
        _, left = psutil.wait_procs(self._families, timeout=30)
        assert not left, f"processes outlived the run: {[_title(each) for each in left]}"


def _title(process: psutil.Process) -> str:
    with contextlib.suppress(psutil.Error):
        return " ".join(process.cmdline())
    return ""


def _end(family: list[psutil.Process]) -> None:
    """Give processes of a dead run time to notice, then end what is left."""
    _, left = psutil.wait_procs(family, timeout=30)
    for each in left:
        with contextlib.suppress(psutil.Error):
            each.kill()


def run_child(phases_file: Path, arguments: list[str]) -> int:
    """Run the command line, noting in a file each phase that begins, and after how many steps of this process."""
    from hybridrl.cli.main import main
    from hybridrl.observability.recorder import RunRecorder

    original, original_record = RunRecorder.phase, RunRecorder.record_step
    num_steps = 0

    @contextlib.contextmanager
    def phase(self: RunRecorder, name: str) -> Iterator[None]:
        with phases_file.open("a") as file:
            file.write(f"{name} {num_steps}\n")
        with original(self, name):
            yield

    def record_step(self: RunRecorder, number: int, *arguments: object) -> None:
        nonlocal num_steps
        original_record(self, number, *arguments)  # type: ignore[arg-type]
        num_steps += 1

    RunRecorder.phase, RunRecorder.record_step = phase, record_step  # type: ignore[method-assign]
    return main(arguments)


def check_checkpoints(folder: Path) -> int:
    """Assert that every checkpoint with a manifest is as it was written; return how many there are."""
    found = find_checkpoints(folder)
    assert not found.damaged, found.damaged
    for checkpoint in found.complete:
        for name, record in checkpoint.manifest.files.items():
            assert (damage := damage_of(checkpoint.folder, name, record, reads_content=True)) is None, damage
    return len(found.complete)


def rows_of(run_dir: Path) -> list[dict[str, object]]:
    """Return the metrics of a run without times and rates, which no two runs share, and without the count of its restarts."""
    rows = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    own = ("time_s/", "throughput/", "rollout/restarts")
    return [{k: v for k, v in row.items() if not k.startswith(own) and not k.endswith("seconds")} for row in rows]


def compare_metrics(run_dir: Path, undisturbed: Path) -> None:
    """Assert that both runs had the same metrics."""
    expected, got = rows_of(undisturbed), rows_of(run_dir)
    for one, other in zip(expected, got, strict=True):
        if PROBE not in one:
            other.pop(PROBE, None)  # the first sync after a restart is always probed
        differing = {
            key: (one.get(key), other.get(key)) for key in one.keys() | other.keys() if one.get(key) != other.get(key)
        }
        assert not differing, f"step {one['step']}: undisturbed and killed run differ: {differing}"


def compare_samples(run_dir: Path, undisturbed: Path, num_steps: int, max_lag: int, *, is_exact: bool) -> int:
    """Assert that both runs trained on the same samples, or on samples of the same names; return their number."""
    assert [row["step"] for row in rows_of(run_dir)] == list(range(num_steps)), "not every step once"
    seen: set[tuple[str, int]] = set()
    for step in range(num_steps):
        tables = [pq.read_table(run / "rollouts" / f"step_{step:06d}.parquet") for run in (undisturbed, run_dir)]
        if is_exact:
            assert tables[0].equals(tables[1]), f"step {step}: other samples than in the undisturbed run"
        expected, names = map(_names, tables)
        assert names == expected, f"step {step}: samples of other prompts than in the undisturbed run"
        assert len(set(names)) == len(names) and not seen & set(names), f"step {step}: a sample is used twice"
        versions = {version for row in tables[1]["policy_versions"].to_pylist() for version in row if version >= 0}
        assert versions <= set(range(step - max_lag, step + 1)), f"step {step} trained on samples of {versions}"
        seen |= set(names)
    return len(seen)


def _names(table: pa.Table) -> list[tuple[str, int]]:
    return list(zip(table["prompt_id"].to_pylist(), table["sample_index"].to_pylist(), strict=True))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--config", type=Path, default=CONFIG, help="a demo, in which parallel sizes and batches are made small"
    )
    parser.add_argument("--kills", type=int, default=30)
    parser.add_argument("--steps", type=int, help="of both runs; must outlast the kills (three for each)")
    parser.add_argument("--lag", type=int, default=0, help="trainer.max_policy_lag")
    parser.add_argument(
        "--in-place",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="start a lost replica again inside the run",
    )
    parser.add_argument("--targets", nargs="+", choices=(CONTROLLER, *TITLES), default=[CONTROLLER, *TITLES])
    parser.add_argument("--phases", nargs="+", choices=(START, *PHASES), default=[START, *PHASES])
    parser.add_argument("--seed", type=int, default=1, help="of targets, phases and moments")
    parser.add_argument("--set", nargs="+", default=[], metavar="KEY=VALUE", help="further settings of both runs")
    parser.add_argument("--folder", type=Path, required=True, help="for both runs and their logs")
    options = parser.parse_args()
    options.steps = options.steps or 3 * options.kills
    options.folder.mkdir(parents=True, exist_ok=True)
    overrides = [
        *("actor.parallel.pp_size=1", "algorithm.prompts_per_step=8", "algorithm.samples_per_prompt=4"),
        *(f"trainer.num_steps={options.steps}", f"trainer.max_policy_lag={options.lag}"),
        *("trainer.eval_every_steps=5", "data.num_eval_prompts=16", "trainer.save_hf_at_end=false"),
        *("trainer.resume=auto", "checkpoint.every_steps=1", "checkpoint.keep=2", "weight_sync.timeout_s=60"),
        f"rollout.max_restarts={options.kills if options.in_place else 0}",
        *options.set,
    ]
    started = time.monotonic()
    Life(options.folder, "undisturbed", options.config, overrides).finish()
    print(f"undisturbed: {options.steps} steps, {time.monotonic() - started:.0f} s", flush=True)
    kills = list(kill_often(options, overrides))
    runs, is_exact = (options.folder / "killed", options.folder / "undisturbed"), not (options.lag and options.in_place)
    if is_exact:
        compare_metrics(*runs)
    num_samples = compare_samples(*runs, options.steps, options.lag, is_exact=is_exact)
    same = "the metrics and samples" if is_exact else "as many samples of the same prompts, within the lag, as those"
    ended = sum(kill.exit_code is not None for kill in kills)
    print(
        f"{len(kills)} kills, {ended} of which ended the run and {len(kills) - ended} of which it survived in place, in "
        f"{time.monotonic() - started:.0f} s: {options.steps} steps with {same} of the "
        f"undisturbed run, {num_samples} samples each used once, {sum(k.num_checkpoints for k in kills)} checkpoints found intact"
    )
    return 0


def kill_often(options: argparse.Namespace, overrides: list[str]) -> Iterator[Kill]:
    """Run to the end, killing on the way."""
    rng = random.Random(options.seed)
    life = Life(options.folder, "killed", options.config, overrides)
    for number in range(options.kills):
        target, phase = rng.choice(options.targets), rng.choice(options.phases)
        if phase == START:
            time.sleep(rng.uniform(0, START_S))
        else:
            life.wait_for_phase(phase, rng.randint(0, 2))
            time.sleep(rng.uniform(0, 0.25))
        num_rows = life.num_rows()
        target, exit_code = life.kill(target, rng)
        assert exit_code != 0, "the run finished before its last kill; give it more --steps"
        assert exit_code is not None or target in REPLICA, f"the run goes on without its {target}"
        is_survivable = target in REPLICA and phase != START and options.in_place
        assert not is_survivable or exit_code is None, f"the run lost its {target} in {phase} and ended"
        kill = Kill(
            target,
            phase,
            num_rows,
            exit_code,
            0 if exit_code is None else check_checkpoints(life.run_dir / "checkpoints"),
        )
        print(f"kill {number + 1}: {kill}", flush=True)
        yield kill
        if exit_code is not None:
            life = Life(options.folder, "killed", options.config, overrides)
    life.finish()


if __name__ == "__main__":
    if sys.argv[1:2] == ["--child"]:
        sys.exit(run_child(Path(sys.argv[2]), sys.argv[3:]))
    sys.exit(main())
