"""Builds ``hybridrl._C`` from ``kernels/``: C++ always, CUDA where nvcc is.

Environment:
    HYBRIDRL_BUILD_CUDA: auto (default: build the CUDA part where nvcc is found), 0 (never) or 1 (fail without nvcc).
    HYBRIDRL_CUDA_ARCHS: Semicolon-separated compute capabilities; default "80;90a;100".
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from pybind11.setup_helpers import Pybind11Extension, build_ext
from setuptools import setup

KERNELS = Path("kernels")


def find_nvcc() -> str | None:
    """Return the path of nvcc when the CUDA part is to be built."""
    mode = os.environ.get("HYBRIDRL_BUILD_CUDA", "auto")
    if mode not in ("auto", "0", "1"):
        raise SystemExit(f"HYBRIDRL_BUILD_CUDA is {mode!r}, expected auto, 0 or 1")
    home = os.environ.get("CUDA_HOME", "/usr/local/cuda")
    nvcc = shutil.which("nvcc") or shutil.which("nvcc", path=f"{home}/bin")
    if mode == "1" and nvcc is None:
        raise SystemExit("HYBRIDRL_BUILD_CUDA=1, but nvcc is neither on PATH nor under CUDA_HOME")
    return None if mode == "0" else nvcc


class BuildKernels(build_ext):
    """Compiles the CUDA sources with nvcc and links them into the extension."""

    def build_extension(self, extension: Pybind11Extension) -> None:
        """Build the extension, with its CUDA part where that is wanted and works."""
        nvcc = find_nvcc()
        if nvcc is not None:
            try:
                objects, libraries = self._compile_cuda(nvcc)
            except subprocess.CalledProcessError as e:
                if os.environ.get("HYBRIDRL_BUILD_CUDA") == "1":
                    raise SystemExit(f"nvcc failed:\n{e.stderr}") from e
                print(f"warning: the CUDA kernels were left out, nvcc failed:\n{e.stderr}")
            else:
                extension.extra_objects = objects
                extension.library_dirs += libraries
                extension.libraries += ["cudart_static", "dl", "rt"]
                extension.define_macros.append(("HYBRIDRL_WITH_CUDA", "1"))
        super().build_extension(extension)

    def _compile_cuda(self, nvcc: str) -> tuple[list[str], list[str]]:
        folder = Path(self.build_temp)
        folder.mkdir(parents=True, exist_ok=True)
        archs = os.environ.get("HYBRIDRL_CUDA_ARCHS", "80;90a;100").split(";")
        targets = [f"-gencode=arch=compute_{arch},code=sm_{arch}" for arch in archs]

        def compile_source(source: Path) -> str:
            target = folder / f"{source.stem}_cuda.o"
            options = [
                "-O3",
                "-std=c++17",
                "--threads",
                "0",
                "-Xcompiler",
                "-fPIC",
                "-c",
                str(source),
                "-o",
                str(target),
            ]
            subprocess.run([nvcc, *targets, *options], check=True, capture_output=True, text=True)
            return str(target)

        with ThreadPoolExecutor() as pool:
            objects = list(pool.map(compile_source, sorted(KERNELS.glob("*.cu"))))
        return objects, self._library_folders(nvcc)

    @staticmethod
    def _library_folders(nvcc: str) -> list[str]:
        """Ask nvcc, which may be a wrapper anywhere, where its static runtime is."""
        plan = subprocess.run([nvcc, "--dryrun", "-x", "cu", os.devnull], check=True, capture_output=True, text=True)
        folders = [Path(part) for part in re.findall(r'-L"?([^"\s]+)', plan.stdout + plan.stderr)]
        folders += [folder.parent for folder in folders]
        return [str(folder) for folder in folders if (folder / "libcudart_static.a").exists()]


extension = Pybind11Extension(
    "hybridrl._C",
    sorted(str(path) for path in KERNELS.glob("*.cpp")),
    include_dirs=[str(KERNELS)],
    depends=sorted(str(path) for path in KERNELS.iterdir()),  # a changed header or .cu file is a reason to build again
    cxx_std=17,
    extra_compile_args=["-O3", "-pthread", "-Wall", "-Wextra", "-Wno-maybe-uninitialized"],
    extra_link_args=["-pthread"],
)

setup(ext_modules=[extension], cmdclass={"build_ext": BuildKernels})
