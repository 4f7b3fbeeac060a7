"""The configurations that are shipped pass their own checks."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from hybridrl.cli.main import main
from hybridrl.preflight.check import load_checked
from hybridrl.preflight.command import Command
from tests.unit.data.tokenizers import demo_tokenizer
from tests.unit.preflight.experiments import write_model

CONFIGS = Path(__file__).resolve().parents[3] / "configs"
DEMO = CONFIGS / "demo"


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    """The demo's model folder with weights of zeros."""
    folder = tmp_path / "checkpoint"
    shutil.copytree(DEMO / "model", folder)
    write_model(folder, json.loads((folder / "config.json").read_text()))
    return folder


@pytest.mark.parametrize("name", ["calc", "reverse"])
def test_a_demo_trains_on_four_ranks(name: str) -> None:
    checked = load_checked(DEMO / f"{name}.yaml", [], Command.TRAIN)
    assert "actor    4 rank(s): tp 2 x pp 2 x cp 1 x dp 1, experts ep 2 x etp 1" in checked.summary()
    assert "32 prompts x 8 samples = 256 samples per step" in checked.summary()


@pytest.mark.parametrize("name", ["calc-ppo", "reverse-ppo"])
def test_a_demo_of_ppo_has_a_critic_on_the_same_ranks(name: str) -> None:
    checked = load_checked(DEMO / f"{name}.yaml", [], Command.TRAIN)
    assert "actor, critic 4 rank(s): tp 2 x pp 2" in checked.summary()
    assert checked.config.algorithm.needs_values and checked.config.critic.optimizer.lr == 1e-3


@pytest.mark.parametrize("name", ["calc", "reverse"])
def test_a_demo_checkpoint_is_small_and_has_the_demo_model(name: str) -> None:
    folder = DEMO / "checkpoints" / name
    assert sum(file.stat().st_size for file in folder.iterdir()) < 4_000_000
    for file in (DEMO / "model").iterdir():
        assert (folder / file.name).read_bytes() == file.read_bytes()


@pytest.mark.parametrize("name", ["calc-sft", "reverse-sft"])
def test_a_warm_start_passes_its_checks(name: str, tmp_path: Path) -> None:
    overrides = [f"sft.output_path={tmp_path / 'out'}"]
    assert load_checked(DEMO / f"{name}.yaml", overrides, Command.SFT).spec.family == "qwen3_moe"


def test_the_example_with_files_reads_its_prompts(checkpoint: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", str(CONFIGS / "examples" / "prompts.yaml"), f"model.path={checkpoint}"]) == 0
    assert "arithmetic: ready for hybridrl train" in capsys.readouterr().out


def test_the_model_folder_is_what_the_script_writes(tmp_path: Path) -> None:
    import importlib.util

    script = CONFIGS.parent / "scripts" / "make_demo_checkpoints.py"
    spec = importlib.util.spec_from_file_location("make_demo_checkpoints", script)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    module.write_model_folder(tmp_path)
    for path in (DEMO / "model").iterdir():
        assert (tmp_path / path.name).read_bytes() == path.read_bytes()
    assert demo_tokenizer().vocab_size == module.model_config()["vocab_size"]
