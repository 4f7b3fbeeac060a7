"""The one CPU adaptation of Megatron-core: Megatron's modules see a torch without CUDA devices.

Megatron-core addresses its device as ``torch.cuda`` and ``device="cuda"``. On the cpu platform a worker process calls
:func:`install` once, before it builds a model. It rebinds the name ``torch`` inside every loaded ``megatron.*`` module to a
stand-in whose factories place tensors on the CPU, whose ``cuda`` namespace does nothing, and whose ``distributed`` gives
gloo the split sizes that it accepts. Torch itself stays as it is, so nothing outside Megatron notices, whichever thread runs.
:func:`uninstall` puts everything back.
"""

from __future__ import annotations

import contextlib
import functools
import sys
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

import torch
from megatron.core.tensor_parallel import random as megatron_random
from megatron.core.transformer import multi_latent_attention
from megatron.core.transformer.moe import moe_utils

_FACTORIES = (
    "arange",
    "empty",
    "full",
    "ones",
    "rand",
    "randn",
    "tensor",
    "zeros",
    "empty_like",
    "ones_like",
    "zeros_like",
)
_CPU = torch.device("cpu")
_undo: list[Callable[[], None]] = []


def install() -> None:
    """Adapt every Megatron module that is loaded; calling again also covers modules that were loaded since."""
    if not _undo:
        torch.compiler.set_stance("force_eager")
        _undo.append(lambda: torch.compiler.set_stance("default"))
        # Absent without Transformer Engine in 0.16.1, yet read by the router.
        if not hasattr(moe_utils, "te_general_gemm"):
            _set(moe_utils, "te_general_gemm", None)
        # True in 0.16.1 without Transformer Engine too, whose classes are then asked about with isinstance.
        _set(multi_latent_attention, "HAVE_TE", False)
        # Queues its callback until CUDA starts, which never happens here.
        _set(megatron_random, "_lazy_call", lambda callback: callback())
    stand_in = _CpuTorch()
    for name, module in list(sys.modules.items()):
        if name.startswith("megatron.") and getattr(module, "torch", None) is torch:
            _set(module, "torch", stand_in)


def uninstall() -> None:
    """Restore what :func:`install` changed, in reverse order."""
    while _undo:
        _undo.pop()()


def is_installed() -> bool:
    """Whether the adaptation is in force."""
    return bool(_undo)


@contextlib.contextmanager
def cuda_tensor_methods() -> Iterator[None]:
    """While a Megatron model or optimizer is built, let tensors answer as CUDA tensors would; does nothing unless installed.

    Shared embeddings are sent to the device with ``tensor.cuda()``, and an optimizer sorts parameters by such names of
    ``tensor.type()`` as ``torch.cuda.FloatTensor``. Both are methods of tensors, out of the reach of :func:`install`.
    """
    if not is_installed():
        yield
        return
    tensor_class: Any = torch.Tensor
    original_type, original_cuda = tensor_class.type, tensor_class.cuda

    def type_name(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        name = original_type(tensor, *args, **kwargs)
        return name.replace("torch.", "torch.cuda.", 1) if isinstance(name, str) else name

    tensor_class.type, tensor_class.cuda = type_name, lambda tensor, *args, **kwargs: tensor
    try:
        yield
    finally:
        tensor_class.type, tensor_class.cuda = original_type, original_cuda


def _set(module: ModuleType, name: str, value: object) -> None:
    if hasattr(module, name):
        original = getattr(module, name)
        _undo.append(lambda: setattr(module, name, original))
    else:
        _undo.append(lambda: delattr(module, name))
    setattr(module, name, value)


class _Overlay(ModuleType):
    """A module whose own attributes hide those of `under`; what is read through is remembered."""

    def __init__(self, under: ModuleType) -> None:
        super().__init__(under.__name__)
        self.__dict__["_under"] = under

    def __getattr__(self, name: str) -> Any:
        value = getattr(self.__dict__["_under"], name)
        self.__dict__[name] = value
        return value


class _CpuTorch(_Overlay):
    def __init__(self) -> None:
        super().__init__(torch)
        self.cuda = _CpuCuda(torch.cuda)
        self.distributed = _GlooDistributed(torch.distributed)
        for name in _FACTORIES:
            setattr(self, name, _on_cpu(getattr(torch, name)))


def _on_cpu(factory: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    @functools.wraps(factory)
    def build(*args: Any, **kwargs: Any) -> torch.Tensor:
        if kwargs.get("device") is not None:
            kwargs["device"] = _CPU
            kwargs.pop("pin_memory", None)
        return factory(*args, **kwargs)

    return build


class _GlooDistributed(_Overlay):
    """What the MoE dispatcher asks of NCCL and gloo lacks: split sizes as tensors, and pieces of unequal sizes."""

    def all_to_all_single(
        self,
        output: torch.Tensor,
        input_: torch.Tensor,
        output_split_sizes: Any = None,
        input_split_sizes: Any = None,
        **kwargs: Any,
    ) -> Any:
        sizes = [s.tolist() if isinstance(s, torch.Tensor) else s for s in (output_split_sizes, input_split_sizes)]
        return torch.distributed.all_to_all_single(output, input_, sizes[0], sizes[1], **kwargs)

    def all_gather(self, pieces: list[torch.Tensor], input_: torch.Tensor, group: Any = None) -> None:
        rows = [len(piece) for piece in pieces]
        received = input_.new_empty((sum(rows), *input_.shape[1:]))
        sent = torch.cat([input_] * len(rows))
        torch.distributed.all_to_all_single(received, sent, rows, [len(input_)] * len(rows), group=group)
        for piece, part in zip(pieces, received.split(rows), strict=True):
            piece.copy_(part)

    def reduce_scatter(self, output: torch.Tensor, pieces: list[torch.Tensor], group: Any = None) -> None:
        rows = [len(piece) for piece in pieces]
        received = output.new_empty((len(rows), *output.shape))
        torch.distributed.all_to_all_single(
            received.flatten(0, 1), torch.cat(pieces), [len(output)] * len(rows), rows, group=group
        )
        torch.sum(received, 0, out=output)


class _Stream:
    """Streams and events of a device that finishes each operation before the next begins."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        pass

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Stream)

    __hash__ = None  # type: ignore[assignment]

    def record_event(self, *args: Any) -> _Stream:
        return self

    def synchronize(self, *args: Any) -> None:
        pass

    record = wait = wait_event = wait_stream = synchronize


class _Generators:
    def __getitem__(self, device: object) -> torch.Generator:
        return torch.default_generator


def _nothing(*args: Any, **kwargs: Any) -> None:
    return None


class _CpuCuda(_Overlay):
    Stream = Event = _Stream
    default_generators = _Generators()
    set_device = synchronize = empty_cache = set_stream = staticmethod(_nothing)

    def __init__(self, under: ModuleType) -> None:
        super().__init__(under)
        self.nvtx = _Overlay(torch.cuda.nvtx)
        self.nvtx.__dict__.update(range_push=_nothing, range_pop=_nothing)
        self.random = self

    def current_device(self) -> torch.device:
        return _CPU

    def current_stream(self, *args: Any) -> _Stream:
        return _Stream()

    default_stream = current_stream

    @contextlib.contextmanager
    def stream(self, stream: _Stream | None) -> Iterator[None]:
        yield

    def get_rng_state(self, device: object = None) -> torch.Tensor:
        return torch.get_rng_state()

    def set_rng_state(self, state: torch.Tensor, device: object = None) -> None:
        torch.set_rng_state(state)

    def manual_seed(self, seed: int) -> None:
        torch.manual_seed(seed)
