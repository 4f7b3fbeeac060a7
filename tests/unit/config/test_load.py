"""Loading: merge order, types, places, and every fault of a single key."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

from hybridrl.config.choices import LrSchedule, Platform
from hybridrl.config.dump import resolved_yaml
from hybridrl.config.load import read_draft
from hybridrl.config.schema import ExperimentConfig

MINIMAL = "name: demo\nmodel:\n  path: weights\n"


def write(folder: Path, text: str, name: str = "run.yaml") -> Path:
    path = folder / name
    path.write_text(text)
    return path


def problems(path: Path, *overrides: str) -> list[str]:
    return list(read_draft(path, overrides).problems)


def load(path: Path, overrides: Sequence[str] = ()) -> ExperimentConfig:
    draft = read_draft(path, overrides)
    assert not draft.problems
    return draft.config


def test_overrides_win_over_the_file_and_the_file_over_its_includes(tmp_path: Path) -> None:
    write(tmp_path, "seed: 3\nplatform: cpu\nrollout:\n  top_p: 0.5\n  temperature: 0.7\n", "base.yaml")
    path = write(tmp_path, f"include: base.yaml\n{MINIMAL}rollout:\n  top_p: 0.9\nseed: 4\n")
    config = load(path, ["seed=5"])
    assert (config.seed, config.platform) == (5, Platform.CPU)
    assert (config.rollout.top_p, config.rollout.temperature) == (0.9, 0.7)


def test_later_includes_win_over_earlier_ones(tmp_path: Path) -> None:
    write(tmp_path, "seed: 3\n", "a.yaml")
    write(tmp_path, "seed: 4\n", "b.yaml")
    assert load(write(tmp_path, f"include: [a.yaml, b.yaml]\n{MINIMAL}")).seed == 4


def test_values_have_the_declared_types(tmp_path: Path) -> None:
    text = (
        MINIMAL
        + "actor: {optimizer: {lr: 1e-5, schedule: cosine, clip_grad_norm: 1}}\ntrainer: {save_hf_at_end: false}\n"
    )
    config = load(write(tmp_path, text), ["trainer.stop_at_accuracy=null"])
    optimizer = config.actor.optimizer
    assert optimizer.lr == 1e-5
    assert isinstance(optimizer.clip_grad_norm, float)
    assert optimizer.schedule is LrSchedule.COSINE
    assert config.trainer.save_hf_at_end is False
    assert config.trainer.stop_at_accuracy is None


def test_text_keeps_what_was_written(tmp_path: Path) -> None:
    assert load(write(tmp_path, "name: 007\nmodel: {path: w}\n")).name == "007"
    assert load(write(tmp_path, 'name: "null"\nmodel: {path: w}\n')).name == "null"


def test_input_paths_are_relative_to_the_file_that_names_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "shared").mkdir()
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    write(tmp_path / "shared", "model: {path: weights}\n", "base.yaml")
    path = write(tmp_path, "include: shared/base.yaml\nname: demo\nreward: {function: rewards.py:score}\n")
    config = load(path, ["data.train_path=prompts.jsonl"])
    assert config.model.path == str(tmp_path / "shared" / "weights")
    assert config.reward.function == str(tmp_path / "rewards.py:score")
    assert config.data.train_path == str(tmp_path / "elsewhere" / "prompts.jsonl")
    assert config.runs_dir == "runs"


def test_text_can_refer_to_other_keys(tmp_path: Path) -> None:
    path = write(tmp_path, MINIMAL + "sft:\n  output_path: ${runs_dir}/${name}-sft\n")
    assert load(path).sft.output_path == "runs/demo-sft"


def test_a_reference_to_nothing_is_an_error_with_its_line(tmp_path: Path) -> None:
    path = write(tmp_path, MINIMAL + "sft:\n  output_path: ${run_dir}/x\n")
    assert problems(path) == [
        f"{path}:5: sft.output_path: got ${{run_dir}}/x, expected the name of another key in it; "
        "Interpolation key 'run_dir' not found"
    ]


def test_the_resolved_file_loads_to_an_equal_configuration(tmp_path: Path) -> None:
    config = load(
        write(tmp_path, MINIMAL + "algorithm: {policy_loss: {clip_low: 0.1}}\nactor: {optimizer: {lr: 3e-7}}\n")
    )
    assert load(write(tmp_path, resolved_yaml(config))) == config


def test_every_problem_is_listed_with_its_place(tmp_path: Path) -> None:
    path = write(tmp_path, "seed: x\nplatfrom: cpu\nactor:\n  parallel:\n    tp_size: 0\nrollout:\n  top_p: 1.5\n")
    assert problems(path, "algorithm.samples_per_prompt=0") == [
        f"{path}:1: seed: got x, expected a whole number >= 0 and <= 4294967295; it is: Seed of prompts, sampling and initialisation",
        f"{path}:2: platfrom: unknown key, expected a key of the schema; did you mean platform?",
        f"{path}:5: actor.parallel.tp_size: got 0, expected a whole number >= 1; "
        "it is: Tensor-parallel degree of dense layers",
        f"{path}:7: rollout.top_p: got 1.5, expected a number > 0 and <= 1; "
        "it is: Nucleus mass; below 1 the ratio to the trainer is no longer on-policy",
        "command line: algorithm.samples_per_prompt: got 0, expected a whole number >= 1; "
        "it is: Samples per prompt: the group of group-normalised advantages",
        f"{path}: name: missing, expected text; it is: Run name; results go to <runs_dir>/<name>",
        f"{path}: model.path: missing, expected text; it is: Folder with config.json, tokenizer and safetensors files",
    ]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("tp_size: 2", "tp_size: unknown key, expected a key of the schema; did you mean actor.parallel.tp_size or"),
        ("zzz: 2", "zzz: unknown key, expected a key of the schema; keys of the root: name, runs_dir, seed,"),
        ("platform: 3", "platform: got 3, expected one of cpu, cuda; it is: Hardware"),
        ("placement: split", "placement: got split, expected a section; set one of its keys: actor, reference,"),
        (
            "actor: {recompute: ful}",
            "actor.recompute: got ful, expected one of none, selective, full; did you mean full?",
        ),
        ("platform: CPU", "platform: got CPU, expected one of cpu, cuda; did you mean cpu?"),
        ("seed: 1.5", "seed: got 1.5, expected a whole number >= 0"),
        ("seed: '1'", "seed: got '1', expected a whole number >= 0 and <= 4294967295; remove the quotes"),
        ("seed: null", "seed: got null, expected a whole number >= 0"),
        ("seed: [1]", "seed: got a list, expected a whole number >= 0"),
        ("seed: {a: 1}", "seed: got a section, expected a whole number >= 0"),
        ("trainer: {save_hf_at_end: 1}", "trainer.save_hf_at_end: got 1, expected true or false"),
        ("rollout: {temperature: .nan}", "rollout.temperature: got .nan, expected a number > 0"),
        ("rollout: {temperature: nan}", "rollout.temperature: got nan, expected a number > 0"),
        ("rollout: {temperature: inf}", "rollout.temperature: got inf, expected a number > 0"),
        ("rollout: {temperature: 0}", "rollout.temperature: got 0, expected a number > 0"),
        ("actor: {optimizer: {lr: -1e-3}}", "actor.optimizer.lr: got -1e-3, expected a number > 0"),
        ("trainer: {max_policy_lag: 2}", "trainer.max_policy_lag: got 2, expected a whole number >= 0 and <= 1"),
        ("actor: 3", "actor: got 3, expected a section; set one of its keys: parallel, optimizer,"),
        ("actor:", "actor: got nothing, expected a section; set one of its keys: parallel, optimizer,"),
        ("actor: [1]", "actor: got a list, expected a section; set one of its keys: parallel, optimizer,"),
        ("runs_dir: ''", "runs_dir: got '', expected text; it is: Folder of all runs"),
        (
            "include: nowhere.yaml",
            "include: got 'nowhere.yaml', expected the path of a YAML file, relative to this one",
        ),
        ("include: [[x]]", "include: got a list, expected the path of a YAML file, relative to this one"),
        ("name: again", "name: also on line 1, expected once; remove one of the two"),
    ],
)
def test_a_faulty_line_is_named_with_what_was_expected(tmp_path: Path, line: str, message: str) -> None:
    path = write(tmp_path, f"{MINIMAL}{line}\n")
    (problem,) = problems(path)
    assert problem.startswith(f"{path}:4: {message}")


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("seed", "command line: got 'seed', expected key=value, for example seed=2"),
        ("actor=1", "command line: actor: got 1, expected a section; set one of its keys: parallel,"),
        ("sed=1", "command line: sed: unknown key, expected a key of the schema; did you mean seed?"),
        ("model.path=", "command line: model.path: got '', expected text; it is: Folder with config.json"),
    ],
)
def test_a_faulty_override_is_named(tmp_path: Path, override: str, message: str) -> None:
    (problem,) = problems(write(tmp_path, MINIMAL), override)
    assert problem.startswith(message)


def test_an_override_given_twice_is_an_error(tmp_path: Path) -> None:
    path = write(tmp_path, MINIMAL)
    assert problems(path, "seed=1", "seed=2") == [
        "command line: seed: given twice, expected once; remove one of the two"
    ]


def test_files_that_cannot_be_read_are_named(tmp_path: Path) -> None:
    missing = tmp_path / "no.yaml"
    assert (
        problems(missing)[0] == f"{missing}: no such file or directory, expected a YAML configuration; correct the path"
    )
    broken = write(tmp_path, "name: demo\nmodel: {path: [\n")
    assert problems(broken)[0].startswith(f"{broken}:3: not valid YAML: ")
    binary = tmp_path / "binary.yaml"
    binary.write_bytes(b"name: \xff\xfe\n")
    assert problems(binary)[0].startswith(f"{binary}: not valid YAML: ")
    listing = write(tmp_path, "- name\n", "list.yaml")
    assert problems(listing)[0] == f"{listing}:1: got a list, expected keys and values, for example name: demo"


def test_a_file_that_includes_itself_is_an_error(tmp_path: Path) -> None:
    path = write(tmp_path, f"include: other.yaml\n{MINIMAL}")
    other = write(tmp_path, "include: run.yaml\n", "other.yaml")
    assert problems(path) == [f"{other}:1: include: {path} includes itself; remove one include"]


def test_an_empty_file_lacks_the_mandatory_keys(tmp_path: Path) -> None:
    path = write(tmp_path, "")
    assert [problem.split(": ")[1] for problem in problems(path)] == ["name", "model.path"]


def test_a_draft_keeps_defaults_in_place_of_broken_values(tmp_path: Path) -> None:
    draft = read_draft(write(tmp_path, MINIMAL + "seed: x\nactor: {parallel: {tp_size: 4}}\n"))
    assert draft.config.seed == ExperimentConfig().seed
    assert draft.is_broken("seed")
    assert not draft.is_broken("actor.parallel.tp_size")
    assert draft.where("actor.parallel.tp_size").endswith("run.yaml:5")
    assert draft.where("rollout.top_p").endswith("run.yaml")
    assert draft.keys_set("actor") == ("actor.parallel.tp_size",)
