"""One rollout replica: an asyncio front end to a vLLM engine of `tp_size` workers.

States, and who moves between them:

    RUNNING --hold()---> STALE
    RUNNING --pause()--> PAUSED --receive()--> STALE --receive() on all workers, then commit()--> PAUSED --resume()--> RUNNING

Invariants:
- A completion never spans two versions. `pause` closes a gate of our own, waits for the completions in flight, and only then
  stops the scheduler; calls of `generate` meanwhile wait at the gate. vLLM labels every token with the version that sampled
  it, and a completion whose labels differ is an error.
- STALE means that some live weights may be new and others old, or that all are older than those in force elsewhere. Only a complete
  `receive` followed by `commit` leaves that state, and `resume` refuses until then, so nothing is ever sampled from a mixture.
- `commit` drops every cached prefix and checks that vLLM did so before the new version number comes into force.
- vLLM never answers what it was asked when its engine process died, so every wait for it also looks whether that still lives.
"""

from __future__ import annotations

import asyncio
import enum
import gc
import itertools
import os
from collections.abc import AsyncIterator, Coroutine, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from vllm import SamplingParams
from vllm.exceptions import VLLMClientError
from vllm.inputs.engine import tokens_input
from vllm.logprobs import FlatLogprobs
from vllm.outputs import CompletionOutput
from vllm.sampling_params import RequestOutputKind
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.engine.exceptions import EngineDeadError, EngineGenerateError

from hybridrl.config.choices import Platform
from hybridrl.config.schema import RolloutConfig
from hybridrl.data.generation import Completion, Routing, SamplingSpec
from hybridrl.data.sample import FinishReason
from hybridrl.engines.profiler import ProfileLaunch
from hybridrl.engines.vllm.messages import encode, values_of
from hybridrl.engines.vllm.requests import ConnectRequest, LearnRequest, ProfileRequest, ReceiveRequest
from hybridrl.engines.vllm.settings import engine_arguments, environment
from hybridrl.errors import EngineError, EngineLostError, WeightSyncError
from hybridrl.layout.shard import CanonicalTensor, ShardMap
from hybridrl.observability.heartbeat import Identity
from hybridrl.reshard.executor import TransferReport
from hybridrl.reshard.plan import Plan
from hybridrl.reshard.transports import Rendezvous

T = TypeVar("T")

_HOLD_TIMEOUT_S = 10.0
_LIVENESS_S = 0.5
_FINISH_REASONS = {"stop": FinishReason.STOP, "length": FinishReason.LENGTH}


class _State(enum.Enum):
    RUNNING = "running"
    PAUSED = "paused"
    STALE = "stale"


class RolloutEngine:
    """A vLLM replica that continues token sequences and takes new weights; make one with :meth:`start`."""

    def __init__(self, llm: AsyncLLM, max_model_tokens: int, moe_layers: Sequence[int] = ()) -> None:
        self._llm = llm
        self._moe_layers = list(moe_layers)
        self._has_recorder = False
        self._max_model_tokens = max_model_tokens
        self._state = _State.RUNNING
        self._version = 0
        self._received: int | None = None
        self._gate = asyncio.Event()
        self._gate.set()
        self._idle = asyncio.Event()
        self._idle.set()
        self._num_running = 0
        self._request_ids = itertools.count()

    @classmethod
    async def start(
        cls,
        folder: Path,
        config: RolloutConfig,
        platform: Platform,
        seed: int,
        *,
        policy_version: int = 0,
        moe_layers: Sequence[int] = (),
        cores: Sequence[Sequence[int]] | None = None,
        identity: Identity | None = None,
    ) -> RolloutEngine:
        """Start the replica's processes and load a checkpoint as version `policy_version`.

        Sets environment variables of this process, which vLLM's processes inherit: one engine per process.

        Args:
            folder: HF checkpoint folder; no tokenizer is needed.
            moe_layers: Decoder layers whose choice of experts is recorded with every completion; empty records nothing.
            cores: CPU cores of each worker (cpu platform); None leaves placement to the operating system.
            identity: Of the replica; its workers show their heartbeats as parts of it. None: they show none.

        Raises:
            EngineError: vLLM did not start.
        """
        os.environ.update(environment(platform, config, cores))
        try:
            arguments = engine_arguments(folder, platform, config, seed, records_routing=bool(moe_layers))
            llm = AsyncLLM.from_engine_args(arguments)
        except (RuntimeError, ValueError, OSError) as e:
            raise EngineError(f"rollout engine: vLLM did not start on {folder} with {config}: {e}") from e
        engine = cls(llm, config.max_model_tokens, moe_layers)
        gc.collect()
        gc.freeze()  # start-up objects stay for good; scanning them again stalls generation for half a second each time
        await engine._call("hybridrl_end_with", os.getpid())
        if identity is not None:
            part = (
                "vLLM engine" if config.tp_size == 1 else "vLLM worker"
            )  # a single worker runs inside the engine's process
            await engine._call("hybridrl_show", replace(identity, part=part))
        if moe_layers and platform is Platform.CPU:
            await engine._call("hybridrl_record_routing", None)
            engine._has_recorder = True
        await engine._set_version(policy_version)
        return engine

    @property
    def policy_version(self) -> int:
        """Version of the weights that new completions are sampled from."""
        return self._version

    @property
    def num_running(self) -> int:
        """Completions in flight."""
        return self._num_running

    async def generate(self, token_ids: Sequence[int], sampling: SamplingSpec) -> Completion:
        """Continue a token sequence; see :class:`TokenEngine`. Waits while the engine is paused; cancelling aborts.

        Raises:
            EngineLostError: vLLM's engine process died; so raise the methods below.
            EngineError: The prompt leaves no room for a token, or vLLM failed.
        """
        room = self._max_model_tokens - len(token_ids)
        if room < 1 or not token_ids:
            raise EngineError(
                f"rollout engine: prompt of {len(token_ids)} tokens, expected 1 to {self._max_model_tokens - 1} "
                "(rollout.max_model_tokens less one)"
            )
        params = _sampling_params(sampling, room)
        async with self._running():
            request_id = str(next(self._request_ids))
            output = await self._generate(request_id, list(token_ids), params)
            return self._completion(output, await self._routing(request_id, output, len(token_ids)))

    async def pause(self, timeout_s: float) -> None:
        """Let running completions finish, hold new ones, and stop the scheduler. Idempotent.

        Raises:
            EngineError: The engine was not still after `timeout_s` seconds; if it was running, it goes on as before.
        """
        self._gate.clear()
        try:
            async with asyncio.timeout(timeout_s):
                await self._idle.wait()
                await self._answer("pause", self._llm.pause_generation(mode="wait", clear_cache=True))
        except TimeoutError as e:
            if self._state is _State.RUNNING:  # whatever else it was, nothing may be sampled now
                await self._answer("resume", self._llm.resume_generation())
                self._gate.set()
            raise EngineError(
                f"rollout engine: not still {timeout_s} s after pause, {self._num_running} completions in flight; "
                "lower rollout.max_response_tokens or raise the timeout"
            ) from e
        if self._state is _State.RUNNING:
            self._state = _State.PAUSED

    async def resume(self) -> None:
        """Go on generating with the committed weights.

        Raises:
            WeightSyncError: The last weight transfer was not committed.
        """
        if self._state is _State.STALE:
            raise WeightSyncError(
                f"rollout engine: the last weight transfer was not committed, so weights may be a mixture; version {self._version} "
                "stays in force and nothing is sampled. Repeat the transfer and commit it, or restart the replica"
            )
        await self._answer("resume", self._llm.resume_generation())
        self._state = _State.RUNNING
        self._gate.set()

    async def hold(self) -> None:
        """Generate nothing until a transfer was committed; for an engine whose own weights are not those in force elsewhere.

        Raises:
            EngineError: Completions still ran.
        """
        await self.pause(_HOLD_TIMEOUT_S)
        self._state = _State.STALE

    async def shard_maps(
        self, canonical: Mapping[str, CanonicalTensor], *, first_rank: int, node: str
    ) -> list[ShardMap]:
        """Return where each worker keeps each checkpoint element.

        Args:
            canonical: Every tensor of the checkpoint (``ModelSpec.tensors()``).
            first_rank: Rollout rank of this replica's worker 0; replicas number their workers through.
            node: Identity of this node; equal ones share memory.
        """
        maps: list[ShardMap] = await self._call("hybridrl_shard_map", LearnRequest(canonical, first_rank, node))
        return maps

    async def connect(self, rendezvous: Rendezvous, parts: Sequence[Plan]) -> None:
        """Connect every worker with the plan's sources, which connect at the same time; an earlier connection is closed.

        Args:
            parts: What each worker receives, in rank order; each may be the whole plan.
        """
        await self._call("hybridrl_connect", ConnectRequest(rendezvous, tuple(parts)))

    async def receive(self, *, version: int, verify: bool, deadline_s: float) -> list[TransferReport]:
        """Receive all weights on all workers, while the sources send. The engine is STALE until `commit`.

        Returns:
            One report per worker, in rank order.

        Raises:
            WeightSyncError: The engine is not paused.
            EngineError: A worker failed; names it. Connect again before the next attempt.
        """
        if self._state is _State.RUNNING:
            raise WeightSyncError("rollout engine: receive while generating; pause the engine first")
        self._state, self._received = _State.STALE, None
        reports: list[TransferReport] = await self._call(
            "hybridrl_receive", ReceiveRequest(version, verify, deadline_s)
        )
        self._received = version
        return reports

    async def commit(self, version: int) -> None:
        """Declare the received weights to be policy version `version` and drop every cached prefix.

        Raises:
            WeightSyncError: `version` is not what was received last, or vLLM kept cached prefixes.
        """
        if self._state is not _State.STALE or self._received != version:
            raise WeightSyncError(
                f"rollout engine: commit of version {version} in state {self._state.value}, last complete transfer "
                f"{self._received}; version {self._version} stays in force"
            )
        if not await self._answer("commit", self._llm.reset_prefix_cache()):
            raise WeightSyncError(
                f"rollout engine: vLLM kept cached prefixes of version {self._version}; version {version} is not committed"
            )
        await self._set_version(version)
        self._state = _State.PAUSED
        self._received = None

    async def disconnect(self) -> None:
        """Close every worker's transport."""
        await self._call("hybridrl_disconnect", None)

    async def begin_profile(self, launch: ProfileLaunch | None, step: int, *, first_rank: int) -> None:
        """Profile the workers whose ranks are profiled; see :class:`Profiler`."""
        await self._call("hybridrl_begin_profile", ProfileRequest(launch, step, first_rank))

    async def end_profile(self) -> None:
        """End the profiles, of which there may be none."""
        await self._call("hybridrl_end_profile", None)

    def shutdown(self) -> None:
        """Stop all processes of this replica."""
        self._gate.clear()
        self._llm.shutdown(timeout=10.0)
        gc.unfreeze()

    @asynccontextmanager
    async def _running(self) -> AsyncIterator[None]:
        """Pass the gate, and count as a running completion until left."""
        while not self._gate.is_set():
            await self._gate.wait()
        self._num_running += 1
        self._idle.clear()
        try:
            yield
        finally:
            self._num_running -= 1
            if self._num_running == 0:
                self._idle.set()

    async def _generate(self, request_id: str, token_ids: list[int], params: SamplingParams) -> CompletionOutput:
        try:
            async for output in self._llm.generate(tokens_input(token_ids), params, request_id):
                if output.finished:
                    return output.outputs[0]
        except (VLLMClientError, EngineDeadError, EngineGenerateError) as e:
            if isinstance(e, EngineDeadError) or self._llm.errored:
                raise _lost("generate") from e
            raise EngineError(
                f"rollout engine: vLLM failed on a prompt of {len(token_ids)} tokens with {params}: {e}"
            ) from e
        raise EngineError(f"rollout engine: request {request_id} ended without an output")

    async def _routing(self, request_id: str, output: CompletionOutput, num_prompt_tokens: int) -> Routing | None:
        """Return the experts of every token but the last; None unless they are recorded."""
        if not self._moe_layers:
            return None
        routing: Routing | None
        if self._has_recorder:
            routing = (await self._call("hybridrl_take_routing", request_id))[0]
        else:
            every_layer = output.routed_experts
            routing = None if every_layer is None else every_layer[:, self._moe_layers].astype(np.int16)
        expected = num_prompt_tokens + len(output.token_ids) - 1
        if routing is None or routing.shape[:2] != (expected, len(self._moe_layers)):
            raise EngineError(
                f"rollout engine: got the routing of {None if routing is None else routing.shape[:2]} (tokens, layers), expected "
                f"{(expected, len(self._moe_layers))}"
            )
        return routing

    def _completion(self, output: CompletionOutput, routing: Routing | None) -> Completion:
        versions = sorted({span.version for span in output.weight_versions or ()})
        if versions != [str(self._version)]:
            raise EngineError(
                f"rollout engine: a completion was sampled by versions {versions}, expected {self._version}"
            )
        if output.finish_reason not in _FINISH_REASONS:
            raise EngineError(
                f"rollout engine: a completion ended with {output.finish_reason!r}, expected stop or length"
            )
        token_ids, logprobs = list(output.token_ids), output.logprobs
        if not isinstance(logprobs, FlatLogprobs) or logprobs.token_ids != token_ids:
            raise EngineError("rollout engine: vLLM returned log-probs that do not belong to the sampled tokens")
        return Completion(
            tuple(token_ids), tuple(logprobs.logprobs), _FINISH_REASONS[output.finish_reason], self._version, routing
        )

    async def _set_version(self, version: int) -> None:
        await self._answer("commit", self._llm.update_weight_version(str(version)))
        self._version = version

    async def _call(self, method: str, request: object) -> Any:
        """Call a method of the worker extension on every worker."""
        what = method.removeprefix("hybridrl_")
        return values_of(await self._answer(what, self._llm.collective_rpc(method, args=(encode(request),))), what)

    async def _answer(self, what: str, asked: Coroutine[Any, Any, T]) -> T:
        """Wait for an answer of vLLM's engine process for as long as it lives."""
        answer = asyncio.ensure_future(asked)
        try:
            while not (await asyncio.wait([answer], timeout=_LIVENESS_S))[0]:
                if self._llm.errored:
                    raise EngineDeadError
            return answer.result()
        except EngineDeadError as e:
            raise _lost(what) from e
        finally:
            answer.cancel()


def _lost(what: str) -> EngineLostError:
    return EngineLostError(
        f"rollout engine: {what} found vLLM's engine process dead; its last words are in this replica's log"
    )


def _sampling_params(spec: SamplingSpec, room: int) -> SamplingParams:
    """Translate to vLLM, asking for the log-prob of each sampled token and nothing else."""
    try:
        return SamplingParams(
            temperature=spec.temperature,
            top_p=spec.top_p,
            max_tokens=min(spec.max_tokens, room),
            stop_token_ids=list(spec.stop_token_ids),
            seed=spec.seed,
            ignore_eos=True,  # only the tokens that the request names end it
            logprobs=0,
            flat_logprobs=True,
            detokenize=False,
            output_kind=RequestOutputKind.FINAL_ONLY,
            skip_clone=True,
        )
    except VLLMClientError as e:
        raise EngineError(f"rollout engine: vLLM refuses {spec}: {e}") from e
