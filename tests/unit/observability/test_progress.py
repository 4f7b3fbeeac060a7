import io
import math

from rich.console import Console

from hybridrl.observability.progress import LiveProgress, PlainProgress, open_progress

METRICS = {
    "reward/mean": 0.8125,
    "response_tokens/mean": 18.25,
    "throughput/tokens_per_s": 2612.4,
    "logprob/rollout_vs_old_abs_max": 1.9e-5,
    "time_s/rollout": 0.61,
    "time_s/train": 0.5,
    "time_s/step": 1.25,
}


def terminal() -> Console:
    return Console(file=io.StringIO(), force_terminal=True, width=110, color_system=None)


def test_a_pipe_gets_plain_lines_and_a_terminal_a_live_panel():
    assert isinstance(open_progress("calc", 3, Console(file=io.StringIO())), PlainProgress)
    live = open_progress("calc", 3, terminal())
    live.close()

    assert isinstance(live, LiveProgress)


def test_a_plain_step_is_one_line_with_numbers_and_phase_times(capsys):
    PlainProgress(40).step(11, METRICS)

    printed = capsys.readouterr().out
    assert printed == (
        "step 12/40  reward 0.812  response tokens 18.2  tokens/s 2,612  log-prob gap 1.9e-05  "
        "rollout 0.61s  train 0.50s  step 1.25s\n"
    )


def test_plain_lines_say_what_starts_and_what_an_evaluation_gave(capsys):
    progress = PlainProgress(40)
    progress.status("starting 4 Megatron ranks")
    progress.phases(("rollout",))
    progress.evaluation(10, {"eval/accuracy": 0.875})

    assert capsys.readouterr().out == "starting 4 Megatron ranks\nevaluation after step 10/40  accuracy 0.875\n"


def test_the_live_panel_shows_numbers_phases_and_the_last_evaluation():
    console = terminal()
    live = LiveProgress("calc", 40, console)
    live.evaluation(0, {"eval/accuracy": 0.31})
    live.step(0, METRICS)
    live.step(1, METRICS | {"reward/mean": 0.9})
    live.phases(("train",))
    live.close()

    shown = console.file.getvalue()
    for text in ("step 2/40", "accuracy 0.310", "reward 0.900", "tokens/s 2,612", "rollout", "0.61 s", "▁█"):
        assert text in shown, text


def test_the_live_panel_survives_a_reward_that_is_not_a_number():
    live = LiveProgress("calc", 40, terminal())
    live.step(0, {"reward/mean": math.nan, "time_s/step": 1.0})
    live.step(1, {"reward/mean": math.inf})
    live.close()
