"""`hybridrl parity` on the real stack."""

from __future__ import annotations

import os

import pytest

from hybridrl.cli.main import main
from hybridrl.controller.scoring import run_in_process
from hybridrl.errors import EngineError
from tests.e2e.runs import CALC, demo_config

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]


def test_all_engines_agree_and_a_tolerance_of_zero_finds_the_first_rounding(tmp_path, capfd):
    code = main(["parity", str(CALC), f"runs_dir={tmp_path}", "actor.parallel.pp_size=1", "--tolerance", "0"])
    out = capfd.readouterr().out
    assert code == 1
    # What float32 rounds first, and no finding about the log-probs of any engine.
    assert "first over the tolerance: layer 0, core attention" in out
    assert all(engine in out for engine in ("Megatron model, one rank", "Megatron engine, tp 2 ep 2", "vLLM "))
    assert "log-probs differ" not in out


def die(config, token_ids):
    os._exit(9)


def test_a_process_that_dies_is_an_error_in_words(tmp_path):
    with pytest.raises(
        EngineError, match=r"vLLM: its process died while it scored 3 tokens, perhaps for want of memory"
    ):
        run_in_process("vLLM", die, demo_config(tmp_path, "dies"), [1, 2, 3])
