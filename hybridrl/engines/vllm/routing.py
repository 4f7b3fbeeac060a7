"""Records which experts each token chose, where vLLM's own recording does not run (its CPU model runner).

vLLM's routers call a hook with the experts of every token of a step, layer by layer. A step holds the tokens of several
requests, one after another; :class:`RoutingRecorder` cuts it apart and keeps the pieces until the request is asked for.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from vllm.model_executor.layers.fused_moe.routed_experts_capturer import bind_routed_experts_capturer

from hybridrl.data.generation import Routing
from hybridrl.errors import EngineError


class RoutingRecorder:
    """Records a worker's steps; prompts must be computed whole, so prefix caching has to be off.

    Args:
        runner: vLLM's model runner, its model loaded; its ``execute_model`` is wrapped.
    """

    def __init__(self, runner: Any) -> None:
        self._runner = runner
        self._step: dict[int, torch.Tensor] = {}
        self._kept: dict[str, list[tuple[int, Routing]]] = {}
        self._execute = runner.execute_model
        bind_routed_experts_capturer(runner.get_model(), self)
        runner.execute_model = self._execute_and_keep

    def capture(self, layer_id: int, topk_ids: torch.Tensor) -> None:
        """Take the experts of one layer in the step that runs: [tokens, top_k], in the order of the router."""
        self._step[layer_id] = topk_ids.to(torch.int16)

    def take(self, request_id: str) -> Routing:
        """Return the experts of a finished request and forget them.

        Returns:
            [num_tokens - 1, num_moe_layers, top_k] int16; the last sampled token was never computed.

        Raises:
            EngineError: Nothing was recorded, or positions are missing.
        """
        pieces = self._kept.pop(request_id, [])
        num_tokens = max((start + len(piece) for start, piece in pieces), default=0)
        if not num_tokens:
            raise EngineError(f"router replay: no routing was recorded for request {request_id}")
        routing = np.full((num_tokens, *pieces[0][1].shape[1:]), -1, dtype=np.int16)
        for start, piece in pieces:
            routing[start : start + len(piece)] = piece
        if (missing := np.flatnonzero(routing[:, 0, 0] < 0)).size:
            raise EngineError(
                f"router replay: request {request_id} lacks the routing of {missing.size} of {num_tokens} tokens, first "
                f"{missing[0]}; was a cached prefix used?"
            )
        return routing

    def clear(self) -> None:
        """Forget requests that nobody asked for, such as aborted ones."""
        self._kept.clear()

    def _execute_and_keep(self, scheduler_output: Any, *args: Any, **kwargs: Any) -> Any:
        self._step.clear()
        result = self._execute(scheduler_output, *args, **kwargs)
        if self._step:
            self._keep(scheduler_output.num_scheduled_tokens)
        return result

    def _keep(self, num_scheduled: dict[str, int]) -> None:
        """Cut the step into requests. vLLM adds a random suffix to a request's name; ours is what stands before it."""
        layers = torch.stack([self._step[layer] for layer in sorted(self._step)], dim=1).numpy()
        batch, row = self._runner.input_batch, 0
        for index, request_id in enumerate(batch.req_ids):
            count, start = num_scheduled[request_id], int(batch.num_computed_tokens_cpu[index])
            pieces = self._kept.setdefault(request_id.rpartition("-")[0], [])
            pieces.append((start, layers[row : row + count].copy()))
            row += count
