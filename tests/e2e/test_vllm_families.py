"""Every family from Megatron layouts into real vLLM models: byte-equal to what vLLM's own loaders make of the checkpoint."""

from __future__ import annotations

import multiprocessing
import os
import time
import traceback
from collections.abc import Iterator
from multiprocessing.connection import Connection, wait
from pathlib import Path

import pytest
import torch
import transformers

from hybridrl.layout.box import DType
from hybridrl.layout.families import model_spec
from hybridrl.layout.megatron import MegatronLayout, PipelineLayout
from hybridrl.layout.parallel import ParallelSizes
from tests.unit.layout.models import EXPERT_FAMILIES, FAMILIES

_TIMEOUT_S = 240
pytestmark = pytest.mark.timeout(_TIMEOUT_S + 30)  # the first test waits for vLLM to be imported
_ONE_MORE_STAGE_AT_EACH_END = PipelineLayout(
    virtual_size=2, account_for_embedding_in_pipeline_split=True, account_for_loss_in_pipeline_split=True
)
SOURCES = {
    "tp2-pp2-ep2": (ParallelSizes(tp=2, pp=2, ep=2), PipelineLayout()),
    "pp4-vpp2": (ParallelSizes(pp=4), _ONE_MORE_STAGE_AT_EACH_END),
    "tp2-ep2-etp2": (ParallelSizes(tp=2, dp=2, ep=2, etp=2), PipelineLayout()),
    "tp4": (ParallelSizes(tp=4), PipelineLayout()),
}
REPLICAS = {
    "tp1": {},
    "tp2": {"tp": 2},
    "tp2-ep": {"tp": 2, "has_expert_parallel": True},
    "pp2": {"pp": 2},
}
# Six layers and one more stage at each end make the eight chunks of PP4 VPP2; vLLM wants to know how DeepSeek's router chooses.
MODELS = {
    name: config
    | {"num_hidden_layers": 6}
    | ({"topk_method": "noaux_tc"} if config["model_type"] == "deepseek_v3" else {})
    for name, config in FAMILIES.items()
}


def save_checkpoint(config: dict[str, object], folder: Path, seed: int) -> Path:
    """Write a random model of transformers in bfloat16, its correction biases in float32."""
    torch.manual_seed(seed)
    fields = {key: value for key, value in config.items() if key != "model_type"}
    hf_config = transformers.AutoConfig.for_model(config["model_type"], **fields)
    model = transformers.AutoModelForCausalLM.from_config(hf_config).to(torch.bfloat16)
    for name, tensor in model.state_dict(keep_vars=True).items():
        if name.endswith("e_score_correction_bias"):
            tensor.data = tensor.data.float()
        torch.nn.init.normal_(tensor.data)
    model.save_pretrained(folder)
    return folder


def source_layouts(config: dict[str, object], is_moe: bool) -> dict[str, MegatronLayout]:
    """Return every source layout; dense families have no expert axes."""
    spec = model_spec(config)
    return {
        name: MegatronLayout(
            spec,
            sizes if is_moe else ParallelSizes(tp=sizes.tp, pp=sizes.pp, dp=sizes.dp),
            DType.BFLOAT16,
            vocab_divisor=16,
            pipeline=pipeline,
        )
        for name, (sizes, pipeline) in SOURCES.items()
    }


def serve(rank: int, init_method: str, pipe: Connection) -> None:
    """Answer (checkpoints, replica, sources) with the problems found, until the pipe closes."""
    os.environ.update(OMP_NUM_THREADS="1", GLOO_SOCKET_IFNAME="lo", VLLM_LOGGING_LEVEL="ERROR")
    os.environ["VLLM_DIST_IDENT"] = (
        f"families-{os.getppid()}"  # in the names of vLLM's shared memory; equal on both ranks
    )
    torch.set_num_threads(1)
    from tests.e2e import vllm_families, vllm_models  # slow to import, and only wanted here

    vllm_models.start(rank, init_method)
    while True:
        try:
            checkpoints, replica, sources = pipe.recv()
        except EOFError:
            return
        try:
            pipe.send(vllm_families.check(rank, checkpoints, vllm_models.Replica(**replica), sources))
        except Exception:  # noqa: BLE001 - the process boundary: the test shows it
            pipe.send([traceback.format_exc()])


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[Connection]]:
    """Start two vLLM ranks for all tests of this file."""
    context = multiprocessing.get_context("spawn")
    init_method = f"file://{tmp_path_factory.mktemp('world')}/store"
    pipes = [context.Pipe() for _ in range(2)]
    processes = [
        context.Process(target=serve, args=(rank, init_method, theirs), daemon=True)
        for rank, (_, theirs) in enumerate(pipes)
    ]
    for process in processes:
        process.start()
    for _, theirs in pipes:
        theirs.close()
    yield [ours for ours, _ in pipes]
    for process in processes:
        process.kill()
        process.join()


@pytest.fixture(scope="module", params=MODELS)
def family(request: pytest.FixtureRequest) -> str:
    """Name a family; its checkpoints are written once."""
    return str(request.param)


@pytest.fixture(scope="module")
def checkpoints(family: str, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Write two checkpoints of different weights."""
    first, second = (save_checkpoint(MODELS[family], tmp_path_factory.mktemp(family), seed) for seed in range(2))
    return first, second


@pytest.mark.parametrize("replica", REPLICAS)
def test_an_update_equals_a_fresh_load_byte_for_byte(family, replica, checkpoints, ranks):
    if family not in EXPERT_FAMILIES and replica == "tp2-ep":
        pytest.skip("a dense model has no experts")
    job = (checkpoints, REPLICAS[replica], source_layouts(MODELS[family], family in EXPERT_FAMILIES))
    for pipe in ranks:
        pipe.send(job)
    answers: dict[int, list[str]] = {}
    deadline = time.monotonic() + _TIMEOUT_S
    while len(answers) < len(ranks) and (ready := wait(ranks, deadline - time.monotonic())):
        answers |= {ranks.index(pipe): pipe.recv() for pipe in ready}
        if any(answers.values()):
            break  # the other may wait for this one in a collective
    problems = [f"rank {rank}: {problem}" for rank, answer in answers.items() for problem in answer]
    assert not problems, "\n".join(problems[:20])
    assert len(answers) == len(ranks), f"only ranks {sorted(answers)} answered within {_TIMEOUT_S} s"
