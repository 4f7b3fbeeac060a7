"""Packages that are missing or do not fit together."""

from __future__ import annotations

import importlib.metadata
from collections.abc import Callable

from hybridrl.cli.doctor.finding import Verdict
from hybridrl.cli.doctor.software import cuda_of_torch, kernels, nccl, packages


def installed(**versions: str) -> Callable[[str], str]:
    def version_of(name: str) -> str:
        if name.replace("-", "_") not in versions:
            raise importlib.metadata.PackageNotFoundError(name)
        return versions[name.replace("-", "_")]

    return version_of


def test_a_missing_package_is_a_problem_only_where_every_run_needs_it() -> None:
    found = {finding.what: finding for finding in packages(installed(), None)}
    assert found["torch"].verdict is found["vllm"].verdict is Verdict.PROBLEM
    assert found["torch"].advice == "run make setup"
    assert found["transformer-engine"].verdict is Verdict.OK and "wandb" not in found


def test_either_vllm_will_do_and_gpus_miss_transformer_engine() -> None:
    found = {finding.what: finding for finding in packages(installed(vllm="0.33.0"), "13.0")}
    assert found["vllm"].verdict is Verdict.OK and found["vllm"].state == "vllm 0.33.0"
    assert found["transformer-engine"].verdict is Verdict.WARNING


def test_an_nccl_for_another_cuda_is_named() -> None:
    assert not list(nccl(installed(nvidia_nccl_cu13="2.28"), None))
    (fits,) = nccl(installed(nvidia_nccl_cu13="2.28"), "13.0")
    (both,) = nccl(installed(nvidia_nccl_cu13="2.28", nvidia_nccl_cu12="2.27"), "13.0")
    assert fits.verdict is Verdict.OK and fits.state == "nvidia-nccl-cu13 2.28"
    assert both.verdict is Verdict.WARNING and "keep nvidia-nccl-cu13 only" in both.advice


def test_the_kernels_and_the_cuda_of_torch_are_found_here() -> None:
    is_cpu_build = importlib.metadata.version("torch").endswith("+cpu")
    assert (cuda_of_torch() is None) is is_cpu_build
    assert kernels().verdict is Verdict.OK
