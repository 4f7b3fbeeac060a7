"""Wrong configurations: each is refused with a message that says where, what was got, what was expected, what to do."""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Callable
from pathlib import Path

import pytest

from hybridrl.config.dump import resolved_yaml
from hybridrl.errors import ConfigError
from hybridrl.preflight.check import Checked, load_checked
from hybridrl.preflight.command import Command
from tests.unit.preflight.experiments import DENSE, FILE_TASK, MODEL, SFT, TRAIN, write_experiment, write_model


def problems(path: Path, *overrides: str, command: Command = Command.TRAIN) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        load_checked(path, overrides, command)
    return caught.value.problems


def checked(path: Path, *overrides: str, command: Command = Command.TRAIN) -> Checked:
    return load_checked(path, overrides, command)


@pytest.mark.parametrize(("text", "command"), [(TRAIN, Command.TRAIN), (FILE_TASK, Command.TRAIN), (SFT, Command.SFT)])
def test_a_good_configuration_passes_and_so_does_its_resolved_file(tmp_path: Path, text: str, command: Command) -> None:
    first = checked(write_experiment(tmp_path, text), command=command)
    resolved = tmp_path / "config.resolved.yaml"
    resolved.write_text(resolved_yaml(first.config))
    assert checked(resolved, command=command) == first


def test_the_summary_shows_the_arithmetic(tmp_path: Path) -> None:
    assert checked(write_experiment(tmp_path)).summary().splitlines() == [
        "demo: ready for hybridrl train",
        "  model    qwen3_moe, 4 layers, 66,912 parameters",
        "  actor    4 rank(s): tp 2 x pp 2 x cp 1 x dp 1, experts ep 2 x etp 1",
        "  rollout  1 vLLM replica(s), tp 1",
        "  batch    4 prompts x 8 samples = 32 samples per step; 1 optimizer step(s) of 32, "
        "shared by 1 data-parallel rank(s) in micro-batches of at most 1024 tokens",
    ]


COMMAND_LINE_FAULTS: list[tuple[tuple[str, ...], str]] = [
    (
        ("actor.parallel.tp_size=3", "actor.parallel.ep_size=1"),
        "actor.parallel.tp_size: got 3, expected a divisor of the model's 4 attention heads; choose one of 1, 2, 4",
    ),
    (
        ("actor.parallel.ep_size=3", "actor.parallel.tp_size=1", "actor.parallel.dp_size=3"),
        "actor.parallel.ep_size: got 3, expected a divisor of the model's 8 experts; choose one of 1, 2, 4, 8",
    ),
    (
        ("actor.parallel.pp_size=3",),
        "actor.parallel.pp_size: got 3, expected a divisor of the model's 4 layers; choose one of 1, 2, 4, or list the stages in pipeline_layout",
    ),
    (
        (
            "actor.parallel.etp_size=32",
            "actor.parallel.ep_size=1",
            "actor.parallel.dp_size=16",
        ),
        "actor.parallel.etp_size: got 32, expected a divisor of the model's 16 rows of an expert",
    ),
    (
        ("actor.parallel.ep_size=4",),
        "actor.parallel.ep_size: got ep_size 4 x etp_size 1 = 4, expected a divisor of the ranks of a pipeline stage, "
        "tp_size 2 x cp_size 1 x dp_size 1 = 2; lower it or raise dp_size",
    ),
    (
        ("actor.parallel.vpp_size=3",),
        "actor.parallel.vpp_size: got 3, expected a divisor of the 2 layers of a pipeline rank; choose one of 1, 2",
    ),
    (
        ("actor.parallel.pp_size=1", "actor.parallel.vpp_size=2"),
        "actor.parallel.vpp_size: got 2, expected nothing, since pp_size is 1; remove it or raise pp_size",
    ),
    (
        ("actor.parallel.pipeline_layout=Et|tttL", "actor.parallel.vpp_size=2"),
        "actor.parallel.pipeline_layout: got 2 stages, expected pp_size 2 x vpp_size 2 = 4; list as many",
    ),
    (
        ("actor.parallel.pipeline_layout=Ettt|ttL",),
        "actor.parallel.pipeline_layout: got Ettt|ttL, expected stages that hold the model's 4 layers",
    ),
    (
        ("actor.parallel.pipeline_layout=Ett|ttL", "actor.parallel.num_layers_in_first_pipeline_stage=1"),
        "actor.parallel.num_layers_in_first_pipeline_stage: got 1, expected null beside pipeline_layout",
    ),
    (
        ("actor.parallel.num_layers_in_first_pipeline_stage=5",),
        "actor.parallel.num_layers_in_first_pipeline_stage: got 5, expected stages that hold the model's 4 layers",
    ),
    (
        ("actor.parallel.sequence_parallel=false",),
        "actor.parallel.sequence_parallel: got false, expected true, since tp_size > 1 and the model has experts",
    ),
    (
        ("rollout.tp_size=3",),
        "rollout.tp_size: got 3, expected a divisor of the model's 4 attention heads; choose one of 1, 2, 4",
    ),
    (
        ("algorithm.mini_batches_per_step=3",),
        "algorithm.mini_batches_per_step: got 3, expected a divisor of 4 prompts x 8 samples = 32 samples per step; "
        "choose one of 1, 2, 4, 8, 16, 32",
    ),
    (
        ("actor.parallel.dp_size=33",),
        "actor.parallel.dp_size: got 33, expected at most the 32 samples per optimizer step (4 prompts x 8 samples / 1)",
    ),
    (
        ("actor.micro_batch.tokens=64", "actor.parallel.cp_size=3"),
        "actor.micro_batch.tokens: got 64, expected at least 66, the longest sample (rollout.max_model_tokens) as a multiple "
        "of 6; raise it",
    ),
    (
        ("rollout.max_model_tokens=50",),
        "rollout.max_model_tokens: got 50, expected at least 51 = 16 prompt tokens (data.max_prompt_tokens) + 35 tokens "
        "of responses and tool results (task calc); raise it",
    ),
    (
        ("rollout.max_model_tokens=1024",),
        "rollout.max_model_tokens: got 1024, expected at most the model's max_position_embeddings 512; lower it",
    ),
    (
        ("rollout.gpu_memory_fraction=0.5",),
        "rollout.gpu_memory_fraction: got a value, expected none: it is not read when platform is cpu; remove it",
    ),
    (
        ("data.prompt_key=question",),
        "data.prompt_key: got a value, expected none: it is not read when data.task is calc; remove it",
    ),
    (
        ("reward.on_error=drop",),
        "reward.on_error: got a value, expected none: it is not read when data.task is calc, which brings its own reward",
    ),
    (
        ("sft.num_steps=3",),
        "sft.num_steps: got a value, expected none: it is not read by hybridrl train; remove it",
    ),
    (
        ("checkpoint.keep=3",),
        "checkpoint.keep: got a value, expected none: it is not read when checkpoint.every_steps is 0; remove it",
    ),
    (
        ("actor.optimizer.min_lr=1e-8",),
        "actor.optimizer.min_lr: got a value, expected none: it is not read when actor.optimizer.schedule is constant",
    ),
    (
        ("actor.optimizer.min_lr=1", "actor.optimizer.schedule=linear"),
        "actor.optimizer.min_lr: got 1.0, expected at most actor.optimizer.lr = 1e-06; lower it",
    ),
    (
        ("trainer.replay_steps=first",),
        "trainer.replay_steps: got first, expected steps such as 0,10-12,/50; correct it",
    ),
    (
        ("tracking.prometheus_host=0.0.0.0",),
        "tracking.prometheus_host: got a value, expected none: it is not read when tracking.prometheus_port is null; remove it",
    ),
    (
        ("trainer.hang_timeout_s=300", "trainer.rollout_timeout_s=360"),
        "trainer.hang_timeout_s: got 300, expected at most 80% of trainer.rollout_timeout_s 360, which would end a call before it is seen "
        "to hang; lower it",
    ),
    (
        ("trainer.stop_at_accuracy=0.9", "trainer.eval_every_steps=0"),
        "trainer.stop_at_accuracy: got 0.9, expected null, since trainer.eval_every_steps is 0; turn evaluation on",
    ),
    (
        (
            "actor.optimizer.schedule=cosine",
            "actor.optimizer.warmup_steps=6",
            "trainer.num_steps=3",
            "algorithm.mini_batches_per_step=2",
        ),
        "actor.optimizer.warmup_steps: got 6, expected less than the run's 6 optimizer step(s) (trainer.num_steps x "
        "algorithm.mini_batches_per_step x algorithm.epochs_per_step), since schedule is cosine; lower it or set actor.optimizer.schedule to constant",
    ),
    (
        ("rollout.top_p=0.9", "trainer.max_logprob_gap=0.5"),
        "rollout.top_p: got 0.9, expected 1, since trainer.max_logprob_gap is set: the sampler's log-probs are those of "
        "the nucleus, the trainer's are not; set it to 1 or trainer.max_logprob_gap to null",
    ),
    (
        ("model.precision=float32", "trainer.max_logprob_gap=0.01"),
        "trainer.max_logprob_gap: got 0.01, expected at least 0.05, since model.precision float32 and rollout.precision "
        "bfloat16 differ; raise it or use one precision",
    ),
    (
        ("seed=4294967295", "rollout.num_replicas=2"),
        "seed: got 4294967295, expected at most 4294967294: replica i of 2 has seed + i; lower it",
    ),
    (
        ("data.num_eval_prompts=145801",),
        "data.num_eval_prompts: got 145801, expected at most 145800, half of the questions that task calc holds out; lower",
    ),
    (
        ("model.init=random",),
        "model.init: got random, expected pretrained for hybridrl train; train a checkpoint with hybridrl sft first",
    ),
    (
        ("name=a/b",),
        "name: got 'a/b', expected the name of a folder inside runs_dir; use letters, digits, dots, dashes and",
    ),
    (
        ("platform=cuda", "placement.rollout=train"),
        "placement.rollout: got train, expected a pool other than that of placement.actor, since platform is cuda: weights do "
        "not move between two processes on one device (no CUDA IPC); name another",
    ),
]


@pytest.mark.parametrize(
    ("overrides", "message"), COMMAND_LINE_FAULTS, ids=lambda value: value[0] if isinstance(value, tuple) else ""
)
def test_an_illegal_combination_is_explained(tmp_path: Path, overrides: tuple[str, ...], message: str) -> None:
    found = problems(write_experiment(tmp_path), *overrides)
    assert any(problem.startswith(f"command line: {message}") for problem in found), found
    assert {problem.split(": ")[1] for problem in found} <= {override.partition("=")[0] for override in overrides}


@pytest.mark.parametrize(
    "overrides",
    [
        ("actor.optimizer.schedule=cosine", "actor.optimizer.warmup_steps=5", "trainer.num_steps=6"),
        ("actor.optimizer.warmup_steps=7", "trainer.num_steps=6"),
        ("rollout.top_p=0.9",),
        ("model.precision=float32", "trainer.max_logprob_gap=0.05"),
        ("trainer.max_logprob_gap=0.01",),
        ("seed=4294967294", "rollout.num_replicas=2"),
        ("data.num_eval_prompts=145800",),
    ],
)
def test_values_at_a_limit_pass(tmp_path: Path, overrides: tuple[str, ...]) -> None:
    assert checked(write_experiment(tmp_path), *overrides).command is Command.TRAIN


def test_training_on_gpus_is_refused_since_no_run_was_tested(tmp_path: Path) -> None:
    (problem,) = problems(write_experiment(tmp_path), "platform=cuda", "placement.rollout=side")
    assert problem == (
        "command line: platform: got cuda, expected cpu: training on GPUs is not supported yet, since no run on them "
        "was tested; set it to cpu"
    )


def test_a_problem_names_the_line_of_the_file(tmp_path: Path) -> None:
    path = write_experiment(tmp_path, TRAIN.replace("tokens: 1024", "tokens: 63"))
    (problem,) = problems(path)
    assert problem.startswith(f"{path}:7: actor.micro_batch.tokens: got 63, expected at least 64")


def test_key_value_heads_divide_or_are_divided(tmp_path: Path) -> None:
    model = {**MODEL, "num_attention_heads": 12, "num_key_value_heads": 3}
    path = write_experiment(tmp_path, model=model)
    (problem,) = problems(path)
    assert problem == (
        f"{path}:6: actor.parallel.tp_size: got 2, expected a divisor or a multiple of the model's 3 key-value heads; "
        "choose another degree"
    )
    assert checked(path, "actor.parallel.tp_size=6").spec.layers[0].attention.num_kv_heads == 3


def test_a_dense_model_has_no_expert_degrees_and_needs_its_mlp_divided(tmp_path: Path) -> None:
    path = write_experiment(tmp_path, model={**DENSE, "intermediate_size": 25})
    assert [problem.removeprefix(f"{path}:6: ") for problem in problems(path)] == [
        "actor.parallel.tp_size: got 2, expected a divisor of the model's 25 rows of a dense MLP (intermediate_size); "
        "choose one of 1, 5, 25",
        "actor.parallel.ep_size: got 2, expected 1, since the model has no experts; set it to 1",
    ]


def test_balance_between_experts_needs_experts_and_biases(tmp_path: Path) -> None:
    path = write_experiment(tmp_path)
    assert checked(path, "actor.moe.aux_loss_coef=0.01", "actor.moe.z_loss_coef=0.001")
    assert problems(path, "actor.moe.bias_update_rate=0.001") == [
        "command line: actor.moe.bias_update_rate: got 0.001, expected 0, since no router of a qwen3_moe model has a bias; "
        "set it to 0"
    ]
    (tmp_path / "dense").mkdir()
    dense = write_experiment(tmp_path / "dense", model=DENSE)
    found = problems(dense, "actor.moe.aux_loss_coef=0.01", "actor.moe.z_loss_coef=0.5", "actor.parallel.ep_size=1")
    assert found == [
        "command line: actor.moe.aux_loss_coef: got 0.01, expected 0, since the model has no experts; set it to 0",
        "command line: actor.moe.z_loss_coef: got 0.5, expected 0, since the model has no experts; set it to 0",
    ]


def test_a_model_that_training_does_not_compute_is_refused_with_what_it_needs(tmp_path: Path) -> None:
    biased = {"model_type": "llama", "attention_bias": True}
    path = write_experiment(tmp_path, model={**DENSE, **biased})
    assert any(
        "model.path: got a llama model with biases in some linear layers only: o_proj has one and a dense MLP has none, "
        "expected features that the Megatron engine trains" in problem
        for problem in problems(path)
    )


def _no_folder(folder: Path) -> None:
    (folder / "weights").rename(folder / "elsewhere")


def _no_config(folder: Path) -> None:
    (folder / "weights" / "config.json").unlink()


def _damaged_config(folder: Path) -> None:
    (folder / "weights" / "config.json").write_text("{")


def _config_of_another_kind(folder: Path) -> None:
    (folder / "weights" / "config.json").write_text("[]")


def _other_family(folder: Path) -> None:
    (folder / "weights" / "config.json").write_text(json.dumps({**MODEL, "model_type": "gpt2"}))


def _no_tokenizer(folder: Path) -> None:
    (folder / "weights" / "tokenizer.json").unlink()


def _tokenizer_without_calls(folder: Path) -> None:
    path = folder / "weights" / "tokenizer.json"
    path.write_text(path.read_text().replace("<calc>", "<tool>"))


def _tokenizer_with_another_eos(folder: Path) -> None:
    for name in ("tokenizer.json", "tokenizer_config.json"):
        path = folder / "weights" / name
        path.write_text(path.read_text().replace("<eos>", "<end>"))


def _no_weights(folder: Path) -> None:
    (folder / "weights" / "model.safetensors").unlink()


def _truncated_weights(folder: Path) -> None:
    path = folder / "weights" / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-1])


def _weights_of_another_model(folder: Path) -> None:
    write_model(folder / "weights", {**MODEL, "num_hidden_layers": 2})
    (folder / "weights" / "config.json").write_text(json.dumps(MODEL))


def _small_vocabulary(folder: Path) -> None:
    write_model(folder / "weights", {**MODEL, "vocab_size": 32})


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (_no_folder, "expected a folder with config.json, tokenizer.json and *.safetensors files; correct the path"),
        (_no_config, "weights/config.json: no such file; expected a Hugging Face checkpoint folder"),
        (_damaged_config, "weights/config.json: not valid JSON ("),
        (_config_of_another_kind, "weights/config.json: got list, expected a JSON object"),
        (_other_family, "model_type 'gpt2' is not supported; supported are "),
        (_no_tokenizer, "weights/tokenizer.json: no such file; expected a Hugging Face fast tokenizer"),
        (_tokenizer_without_calls, "expected a tokenizer for data.task calc; "),
        (_tokenizer_without_calls, "the vocabulary has no token '<calc>'"),
        (
            _tokenizer_with_another_eos,
            "<end>' in its tokens, which earns no reward; use the demo tokenizer, or prompts of your own (data.task: file)",
        ),
        (_no_weights, "weights: no *.safetensors files; expected a Hugging Face checkpoint folder"),
        (_truncated_weights, "model.safetensors: truncated, tensor"),
        (_weights_of_another_model, "model.layers.2.input_layernorm.weight: missing; "),
        (_small_vocabulary, "got a tokenizer of 64 tokens in "),
    ],
)
def test_a_damaged_checkpoint_is_explained(tmp_path: Path, damage: Callable[[Path], None], message: str) -> None:
    path = write_experiment(tmp_path)
    damage(tmp_path)
    (problem,) = problems(path)
    assert problem.startswith(f"{path}:4: model.path: got ")
    assert message in problem


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (
            ("data.train_path=null",),
            "data.train_path: got nothing, expected a .jsonl or .parquet file with prompts, a dataset folder, or a .yaml mixture, since",
        ),
        (
            ("data.train_path=no.jsonl",),
            "expected a .jsonl or .parquet file with prompts, a dataset folder, or a .yaml mixture; there is no such file: correct",
        ),
        (
            ("data.train_path=rewards.py",),
            "expected a .jsonl or .parquet file with prompts, a dataset folder, or a .yaml mixture; convert the file or correct",
        ),
        (
            ("data.eval_path=no.jsonl",),
            "expected a .jsonl or .parquet file with prompts, a dataset folder, or a .yaml mixture; there is no such file: correct",
        ),
        (
            ("data.eval_path=null",),
            "since trainer.eval_every_steps is 10; set it, or set trainer.eval_every_steps to 0",
        ),
        (
            ("reward.function=null",),
            "reward.function: got nothing, expected file.py:function or the weight of another part",
        ),
        (
            ("trainer.resume=no/run",),
            "trainer.resume: got no/run, expected auto, never, or the folder of a checkpoint or of a run; there is no such folder",
        ),
        (("runs_dir=rewards.py/runs",), "rewards.py is a file: correct the path"),
        (
            ("checkpoint.folder=rewards.py", "checkpoint.every_steps=1"),
            "got rewards.py, expected a folder, or the name of one to make;",
        ),
        (("reward.function=no.py:score",), "no.py is no file; correct the path"),
        (("reward.function=rewards.py:points",), "defines no function 'points' (functions: score); correct the name"),
    ],
)
def test_a_missing_input_is_explained(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, overrides: tuple[str, ...], message: str
) -> None:
    path = write_experiment(tmp_path, FILE_TASK)
    monkeypatch.chdir(tmp_path)
    (problem,) = problems(path, *overrides)
    assert problem.startswith(f"command line: {overrides[0].partition('=')[0]}: got ")
    assert message in problem


def test_no_evaluation_file_is_needed_without_evaluation(tmp_path: Path) -> None:
    path = write_experiment(tmp_path, FILE_TASK)
    assert checked(path, "data.eval_path=null", "trainer.eval_every_steps=0").config.data.eval_path is None


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (
            ("rollout.top_p=0.9",),
            "rollout.top_p: got a value, expected none: it is not read by hybridrl sft; remove it",
        ),
        (("trainer.num_steps=7",), "trainer.num_steps: got a value, expected none: it is not read by hybridrl sft"),
        (("model.init=pretrained",), None),
        (
            ("actor.parallel.dp_size=129",),
            "actor.parallel.dp_size: got 129, expected at most the 128 samples per optimizer step",
        ),
        (("trainer.train_timeout_s=7", "trainer.hang_timeout_s=5"), None),
        (
            ("actor.optimizer.warmup_steps=120", "actor.optimizer.schedule=linear"),
            "actor.optimizer.warmup_steps: got 120, expected less than the run's 120 optimizer step(s) (sft.num_steps)",
        ),
    ],
)
def test_sft_has_checks_of_its_own(tmp_path: Path, overrides: tuple[str, ...], message: str | None) -> None:
    path = write_experiment(tmp_path, SFT)
    if message is None:
        assert checked(path, *overrides, command=Command.SFT).command is Command.SFT
        return
    (problem,) = problems(path, *overrides, command=Command.SFT)
    assert problem.startswith(f"command line: {message}")


def test_sft_does_not_overwrite_its_output(tmp_path: Path) -> None:
    path = write_experiment(tmp_path, SFT)
    (tmp_path / "out").mkdir()
    (problem,) = problems(path, command=Command.SFT)
    assert problem.endswith("expected a folder that does not exist yet; choose another folder or remove this one")


def test_random_weights_need_no_weight_files(tmp_path: Path) -> None:
    path = write_experiment(tmp_path, SFT)
    _no_weights(tmp_path)
    assert checked(path, command=Command.SFT).spec.family == "qwen3_moe"


def test_all_kinds_of_problems_are_listed_at_once(tmp_path: Path) -> None:
    path = write_experiment(tmp_path, TRAIN + "sead: 3\n")
    _no_tokenizer(tmp_path)
    found = problems(path, "actor.parallel.pp_size=3", "rollout.top_p=2", "algorithm.mini_batches_per_step=3")
    assert [problem.split(": ")[1] for problem in found] == [
        "sead",
        "rollout.top_p",
        "model.path",
        "actor.parallel.pp_size",
        "algorithm.mini_batches_per_step",
    ]


def test_a_broken_key_causes_no_second_problem(tmp_path: Path) -> None:
    (problem,) = problems(write_experiment(tmp_path), "actor.parallel.tp_size=x")
    assert "actor.parallel.tp_size: got x, expected a whole number >= 1" in problem


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (
            ("reward.model.weight=1",),
            "reward.model.path: got nothing, expected a checkpoint, since reward.model.weight is above 0; set it",
        ),
        (
            ("reward.model.weight=1", "reward.model.path=weights"),
            "reward.model.path: got WEIGHTS, expected a sequence-classification checkpoint, with score.weight; use a trained",
        ),
        (
            ("reward.model.path=weights",),
            "reward.model.path: got a value, expected none: it is not read when reward.model.weight is 0",
        ),
        (
            ("placement.reward_model=side",),
            "placement.reward_model: got a value, expected none: it is not read when reward.model.weight is 0",
        ),
        (
            ("reward.format.pattern=a",),
            "reward.format.pattern: got a value, expected none: it is not read when reward.format",
        ),
        (
            ("reward.format.weight=1",),
            "reward.format.pattern: got nothing, expected a pattern, since reward.format.weight",
        ),
        (
            ("reward.format.weight=1", "reward.format.pattern=("),
            "reward.format.pattern: got '(', expected a Python regular",
        ),
        (
            ("reward.code.memory_mib=128",),
            "reward.code.memory_mib: got a value, expected none: it is not read when reward.co",
        ),
        (
            ("reward.code.weight=1", "reward.code.timeout_s=10"),
            "reward.code.timeout_s: got 10, expected less than reward.sam",
        ),
        (
            ("reward.http.weight=1", "reward.http.url=host:80"),
            "reward.http.url: got host:80, expected an address such as ht",
        ),
        (("data.curriculum=rewards.py:no",), "defines no function 'no' (functions: score); correct the name"),
    ],
)
def test_a_reward_or_curriculum_that_cannot_work_is_explained(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, overrides: tuple[str, ...], message: str
) -> None:
    path = write_experiment(tmp_path, FILE_TASK)
    monkeypatch.chdir(tmp_path)
    (problem,) = problems(path, *overrides)
    assert message.replace("WEIGHTS", str(tmp_path / "weights")) in problem


def test_all_faults_of_rewards_and_data_are_listed_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write_experiment(tmp_path, FILE_TASK)
    monkeypatch.chdir(tmp_path)
    overrides = (
        "reward.model.path=weights",
        "reward.format.weight=1",
        "data.train_path=no.jsonl",
        "reward.code.file_mib=1",
    )
    assert len(problems(path, *overrides)) == 4


def test_a_reward_without_a_function_passes_when_another_part_is_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write_experiment(tmp_path, FILE_TASK)
    monkeypatch.chdir(tmp_path)
    assert checked(path, "reward.function=null", "reward.exact_weight=1").config.reward.exact_weight == 1.0
    assert checked(path, "data.train_path=weights").config.data.train_path == str(tmp_path / "weights")


def test_a_goal_for_the_accuracy_needs_more_than_a_reward_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write_experiment(tmp_path, FILE_TASK)
    monkeypatch.chdir(tmp_path)
    overrides = ("reward.model.weight=1", "trainer.stop_at_accuracy=0.9", "trainer.eval_every_steps=1")
    message = "trainer.stop_at_accuracy: got 0.9, expected null, since only reward.model.weight is above 0"
    assert any(message in problem for problem in problems(path, *overrides, "reward.function=null"))
    assert not any(message in problem for problem in problems(path, *overrides))


@pytest.mark.parametrize("wanted", ["nccl", "cuda_ipc"])
def test_transports_between_devices_are_refused_on_cpu(tmp_path: Path, wanted: str) -> None:
    (problem,) = problems(write_experiment(tmp_path), f"weight_sync.transport={wanted}")
    assert f"weight_sync.transport: got {wanted}" in problem and "since platform is cpu" in problem


def test_nccl_is_refused_where_two_roles_share_a_device(tmp_path: Path) -> None:
    overrides = ("platform=cuda", "placement.rollout=train", "weight_sync.transport=nccl")
    found = [p for p in problems(write_experiment(tmp_path), *overrides) if "weight_sync.transport" in p]
    assert len(found) == 1 and "NCCL does not take two ranks on one device" in found[0]


def test_mixed_is_accepted_on_cpu(tmp_path: Path) -> None:
    checked(write_experiment(tmp_path), "weight_sync.transport=mixed")


@pytest.mark.parametrize(
    ("override", "package"), [("tracking.wandb=offline", "wandb"), ("tracking.mlflow_uri=file:///runs", "mlflow")]
)
def test_a_tracker_needs_its_package_before_anything_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, override: str, package: str
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    key, _, value = override.partition("=")
    expected = (
        f"{key}: got {value}, expected the package {package} to be installed; pip install {package}, or turn it off"
    )
    assert problems(write_experiment(tmp_path), override) == [f"command line: {expected}"]
