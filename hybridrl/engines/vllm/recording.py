"""Tensors that record where a weight loader puts them.

A :class:`RecordingTensor` stands for a checkpoint tensor but owns no data: it knows which elements of which canonical tensor
it is a view of. Slicing one gives another; copying one into a parameter appends a :class:`Write` to the log. A loader that zeroes
one means that its worker has no share in it: copies of it are counted as zeros. Any other operation is an error, because it would mean that the loader computes on weights, which a plan of copies cannot express.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from hybridrl.engines.vllm.boxes import Write
from hybridrl.errors import LayoutError
from hybridrl.layout.shard import CanonicalTensor

_aten = torch.ops.aten
_ELEMENTWISE_COPIES = frozenset({_aten.clone.default, _aten._to_copy.default})


class WriteLog:
    """Collects the writes of one load.

    Args:
        tensors: Every parameter in load format, by local name.

    Attributes:
        num_zeroed: Local name -> elements that the loader fills with zeros instead of weights.
    """

    def __init__(self, tensors: Mapping[str, torch.Tensor]) -> None:
        self._tensors = tensors  # held, so that no other storage takes over an identity
        self._owners = {storage_key(tensor): name for name, tensor in tensors.items()}
        self.writes: list[Write] = []
        self.num_zeroed: dict[str, int] = {}

    def record(self, source: RecordingTensor, target: torch.Tensor) -> None:
        """Note that `source` was copied into `target`."""
        local = self._owners.get(storage_key(target))
        if local is None:
            raise LayoutError(f"{source.tensor}: the weight loader copies it into a tensor that no module owns")
        view = source.view_of_source
        if view.numel() != target.numel():
            raise LayoutError(
                f"{source.tensor}: the weight loader broadcasts a view of shape {tuple(view.shape)} into {local} "
                f"{tuple(target.shape)}"
            )
        if source.is_zeroed:
            self.num_zeroed[local] = self.num_zeroed.get(local, 0) + target.numel()
            return
        if view.shape != target.shape:
            view, target = view.squeeze(), target.squeeze()
        self.writes.append(
            Write(
                source.tensor,
                local,
                tuple(view.shape),
                int(view.storage_offset()),
                view.stride(),
                int(target.storage_offset()),
                target.stride(),
            )
        )


class RecordingTensor(torch.Tensor):
    """A view of a canonical tensor, without data.

    Attributes:
        tensor: Canonical name.
        view_of_source: Meta tensor with the view's shape, strides and offset in the canonical tensor.
        write_log: Where copies are noted.
        is_zeroed: Whether the loader has overwritten the view with zeros.
    """

    tensor: str
    view_of_source: torch.Tensor
    write_log: WriteLog
    is_zeroed: bool = False

    @staticmethod
    def __new__(cls: type[RecordingTensor], tensor: str, view: torch.Tensor, log: WriteLog) -> RecordingTensor:
        """Wrap a meta view of canonical tensor `tensor`."""
        wrapper: RecordingTensor = torch.Tensor._make_wrapper_subclass(
            cls,
            view.shape,
            strides=view.stride(),
            storage_offset=view.storage_offset(),
            dtype=view.dtype,
            device=view.device,
        )
        wrapper.tensor, wrapper.view_of_source, wrapper.write_log = tensor, view, log
        return wrapper

    @classmethod
    def of(cls, canonical: CanonicalTensor, dtype: torch.dtype, log: WriteLog) -> RecordingTensor:
        """Stand for a whole canonical tensor."""
        return cls(canonical.name, torch.empty(canonical.file_shape, dtype=dtype, device="meta"), log)

    def _derived(self, view: torch.Tensor) -> RecordingTensor:
        """Return another view of the same canonical tensor."""
        derived = type(self)(self.tensor, view, self.write_log)
        derived.is_zeroed = self.is_zeroed
        return derived

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Record copies, follow views, refuse the rest."""
        kwargs = kwargs or {}
        if func is _aten.copy_.default and not isinstance(args[0], cls):
            args[1].write_log.record(args[1], args[0])
            return args[0]
        source = args[0] if args and isinstance(args[0], cls) else None
        if source is None:
            raise LayoutError(
                f"a weight loader applies {func} to a recorded weight; only slices and copies are understood"
            )
        if func is _aten.zero_.default:
            source.is_zeroed = True
            return source
        view = source.view_of_source
        if func in _ELEMENTWISE_COPIES:
            dtype = kwargs.get("dtype") or view.dtype
            whole = torch.empty(view.untyped_storage().nbytes() // view.itemsize, dtype=dtype, device="meta")
            return source._derived(whole.as_strided(view.shape, view.stride(), view.storage_offset()))
        result = func(view, *args[1:], **kwargs)
        views = [result] if isinstance(result, torch.Tensor) else list(result)
        if any(storage_key(item) != storage_key(view) for item in views):
            raise LayoutError(
                f"{source.tensor}: the weight loader applies {func}; only slices and copies are understood"
            )
        wrapped = [source._derived(item) for item in views]
        return wrapped[0] if isinstance(result, torch.Tensor) else type(result)(wrapped)


def storage_key(tensor: torch.Tensor) -> int:
    """Identify the storage behind a tensor, also on the meta device, for as long as that storage lives."""
    return int(tensor.untyped_storage()._cdata)
