"""Takes delivery of weights chunk by chunk and puts them to work, one module at a time.

A module's planned parameters exist twice only while they are being filled: `open` makes them in load format beside the live ones,
the receiver writes into them, and `close` runs vLLM's own post-processing, copies the results into the live storage (captured
graphs and kernels keep their addresses) and drops the rest. So the extra memory is that of the modules of one chunk.

Live weights change as chunks complete: between `open` and a successful `finish` the model is a mixture, and nothing may be
sampled from it. :meth:`ModuleSink.abort` makes the modules usable for another attempt; it does not bring old weights back.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from vllm.model_executor.layers.attention import is_deferred_attention_layer
from vllm.model_executor.layers.quantization.base_config import QuantizeMethodBase
from vllm.platforms import current_platform

from hybridrl.engines.vllm.learn import LearnedLayout, split_local
from hybridrl.engines.vllm.loadformat import LiveTensors, is_loaded_in_place, materialize_parameter
from hybridrl.errors import ReshardError
from hybridrl.reshard.plan import Chunk


@dataclass(slots=True)
class _OpenModule:
    """A module whose planned parameters are in load format; `missing` are those not yet complete."""

    module: nn.Module
    live: LiveTensors
    missing: set[str]

    @classmethod
    def take(cls, module: nn.Module, missing: set[str] | None = None) -> _OpenModule:
        """Remember a module's live tensors before they are replaced."""
        return cls(module, LiveTensors.of(module), missing or set())


class ModuleSink:
    """Where the chunks of one weight transfer go; used once.

    Args:
        model: The worker's model.
        layout: What :func:`learn_layout` returned for it.
        dtype: The model's activation type, which attention layers want for their own post-processing.
    """

    def __init__(self, model: nn.Module, layout: LearnedLayout, dtype: torch.dtype) -> None:
        self._model = model
        self._layout = layout
        self._dtype = dtype
        self._open: dict[str, _OpenModule] = {}
        self._planned: dict[str, set[str]] = {}
        for local in layout.shard_map.tensors:
            self._planned.setdefault(split_local(local)[0], set()).add(local)
        # The rest are padding throughout: no chunk completes them, and they are zeroed when their module opens.
        self._received = frozenset(shard.local for shard in layout.shard_map.shards)
        self._unfinished = set(self._received)

    def open(self, chunk: Chunk) -> Mapping[str, torch.Tensor]:
        """Return the load-format tensors that a chunk writes into."""
        for local in chunk.locals:
            prefix = split_local(local)[0]
            if prefix not in self._open:
                self._open_module(prefix)
        return {local: _parameter(self._model, local).data for local in chunk.locals}

    def close(self, chunk: Chunk) -> None:
        """Put every module that is now complete to work."""
        for local in chunk.completed:
            prefix = split_local(local)[0]
            self._open[prefix].missing.discard(local)
            self._unfinished.discard(local)
            if not self._open[prefix].missing:
                self._install(prefix)

    def finish(self) -> None:
        """Run what must follow the last module: attention layers and the model's own hook.

        Raises:
            ReshardError: Some parameters were never completed; names the first.
        """
        if self._unfinished:
            first = next(name for name in self._layout.shard_map.tensors if name in self._unfinished)
            raise ReshardError(
                f"{self._layout.shard_map.place}: {len(self._unfinished)} of {len(self._layout.shard_map.tensors)} parameters "
                f"were not completed, the first is {first}; the plan does not belong to this worker"
            )
        for module in self._model.modules():
            if is_deferred_attention_layer(module):
                module.process_weights_after_loading(self._dtype)  # type: ignore[operator]
        hook: Callable[[], None] | None = getattr(self._model, "process_weights_after_loading", None)
        if hook is not None:
            hook()

    def abort(self) -> None:
        """Put the live tensors of every open module back, so that a new transfer can start."""
        for opened in self._open.values():
            opened.live.put_back(opened.module)
        self._open.clear()

    def _open_module(self, prefix: str) -> None:
        module = self._model.get_submodule(prefix)
        self._open[prefix] = _OpenModule.take(module, self._planned[prefix] & self._received)
        for local in self._planned[prefix]:
            tensor = materialize_parameter(module, split_local(local)[1])
            if local in self._layout.shard_map.padding:
                tensor.zero_()

    def _install(self, prefix: str) -> None:
        """Post-process one complete module, and with it the modules that share its parameters."""
        ready = {prefix: self._open[prefix]}
        for local in self._planned[prefix]:
            for other in self._layout.tied.get(local, ()):
                shared, name = split_local(other)
                if is_loaded_in_place(self._model.get_submodule(shared), name):
                    continue  # the copy into the live storage below serves every holder
                ready[shared] = self._open[shared] = _OpenModule.take(self._model.get_submodule(shared))
                materialize_parameter(ready[shared].module, name).copy_(_parameter(self._model, local))
        for name, opened in ready.items():
            _process(opened.module)
            _copy_into_live(opened, name)
            del self._open[name]


def _parameter(model: nn.Module, local: str) -> torch.Tensor:
    prefix, name = split_local(local)
    tensor: torch.Tensor = getattr(model.get_submodule(prefix), name)
    return tensor


def _process(module: nn.Module) -> None:
    """Turn a module's parameters from load format into kernel format, with vLLM's own code."""
    quant_method: Any = getattr(module, "quant_method", None)
    if not isinstance(quant_method, QuantizeMethodBase):
        return
    if hasattr(module, "_already_called_process_weights_after_loading"):
        delattr(module, "_already_called_process_weights_after_loading")
    experts = getattr(getattr(quant_method, "moe_kernel", None), "fused_experts", None)
    if experts is None or not current_platform.is_cpu():
        quant_method.process_weights_after_loading(module)
    else:
        # On CPU, expert weights must be packed again after every update. Some vLLM releases skip that once a kernel exists,
        # and every later forward pass would read unpacked weights; packing twice would be as wrong.
        with _watch_packing(experts) as packed:
            quant_method.process_weights_after_loading(module)
        if not packed:
            experts.process_weights_after_loading(module)
    update: Callable[[], None] | None = getattr(module, "update_param_tp_status", None)
    if update is not None:
        update()


@contextmanager
def _watch_packing(experts: Any) -> Iterator[list[bool]]:
    """Yield a list that is not empty once `experts` has packed its weights."""
    packed: list[bool] = []
    original = experts.process_weights_after_loading

    def watched(layer: nn.Module) -> None:
        packed.append(True)
        original(layer)

    experts.process_weights_after_loading = watched
    try:
        yield packed
    finally:
        del experts.process_weights_after_loading


def _copy_into_live(opened: _OpenModule, prefix: str) -> None:
    """Copy a processed module's parameters into its live storage and make the live tensors its own again."""
    for name, live in (opened.live.parameters | opened.live.buffers).items():
        new = getattr(opened.module, name)
        if new is live:
            continue
        if new.shape != live.shape or new.dtype != live.dtype:
            raise ReshardError(
                f"{prefix}.{name}: post-processing gave {tuple(new.shape)} {new.dtype}, expected {tuple(live.shape)} {live.dtype} "
                "as in the live model"
            )
        live.data.copy_(new.data)
    opened.live.put_back(opened.module)
