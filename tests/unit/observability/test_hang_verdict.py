"""Who holds a run up, told from the stacks of its processes; frames are those that the real stack shows."""

from __future__ import annotations

from pathlib import Path

import psutil

from hybridrl.observability.hang_report import write_report
from hybridrl.observability.hang_verdict import PendingCall, verdict
from hybridrl.observability.heartbeat import Identity
from hybridrl.observability.stacks import Frame, ProcessReport, Stack

PACKAGES = "/env/lib/python3.11/site-packages/"
RAY_IDLE = (Frame(f"{PACKAGES}ray/_private/worker.py", 971, "main_loop", "self.core_worker.run_task_loop()"),)
RAY_CALL = (Frame(f"{PACKAGES}ray/_private/function_manager.py", 700, "actor_method_executor"), *RAY_IDLE)
LIBRARY_WAIT = (Frame("/usr/lib/python3.11/threading.py", 327, "wait", "waiter.acquire()"),)
SLEEP = (Frame("/src/rewards.py", 7, "score", "time.sleep(3600)"),)
MAPPINGS = f"{PACKAGES}megatron/core/tensor_parallel/mappings.py"
UPDATE = [PendingCall("actor", rank, "update") for rank in range(4)]
WAITS = ProcessReport(
    Identity("s", "controller"),
    1,
    psutil.STATUS_SLEEPING,
    stacks=(
        (Frame("/src/hybridrl/roles/group.py", 99, "poll"), Frame("/src/hybridrl/roles/future.py", 104, "wait_all")),
    ),
)


def collective(name: str = "all_reduce", line: int = 24) -> Stack:
    c10d = f"{PACKAGES}torch/distributed/"
    return (
        Frame(f"{c10d}distributed_c10d.py", 3020, name, "work.wait()"),
        Frame(f"{c10d}c10d_logger.py", 83, "wrapper", "return func(*args, **kwargs)"),
        Frame(MAPPINGS, line, "_reduce", f"torch.distributed.{name}(input_)"),
        *RAY_CALL,
    )


def process(
    role: str,
    rank: int | None,
    *stacks: Stack,
    part: str = "",
    state: str = psutil.STATUS_SLEEPING,
    doing: str = "",
    host: str = WAITS.host,
) -> ProcessReport:
    return ProcessReport(Identity("s", role, rank, part), 100, state, doing, stacks or None, host)


def sentence(*reports: ProcessReport, pending: list[PendingCall] | None = None, phases: tuple[str, ...] = ()) -> str:
    return verdict([WAITS, *reports], pending or [], phases, 600.4)


def test_the_rank_outside_a_collective_is_named_with_those_inside() -> None:
    ranks = [process("actor+reference", rank, collective()) for rank in (0, 2, 3)]
    stuck = process("actor+reference", 1, (*SLEEP, *RAY_CALL))
    assert sentence(*ranks, stuck, pending=UPDATE, phases=("train",)) == (
        "hang in phase update: no progress for 600 s; actor+reference rank 1 has not joined all_reduce "
        "(core/tensor_parallel/mappings.py:24 in _reduce), in which actor+reference ranks 0, 2, 3 wait; "
        "actor+reference rank 1 is in `time.sleep(3600)` (/src/rewards.py:7 in score)"
    )


def test_a_process_that_does_not_answer_comes_before_all_others() -> None:
    stopped = process("actor", 1, state=psutil.STATUS_STOPPED)
    busy = process("rollout", 0, (*SLEEP, *RAY_CALL))
    text = sentence(process("actor", 0, collective()), stopped, busy, pending=UPDATE[:2])
    assert "; actor rank 1 is stopped by a signal, while actor rank 0 waits in all_reduce (" in text
    assert "actor rank 1 is not answering (process state sleeping)" in sentence(process("actor", 1))
    assert "is in a system call that cannot be interrupted" in sentence(
        process("actor", 1, state=psutil.STATUS_DISK_SLEEP)
    )


def test_where_the_culprits_run_is_said_when_there_are_several_hosts() -> None:
    waiting = [process("actor", rank, collective(), host=f"node-{rank}") for rank in range(8)]
    stopped = process("actor", 8, state=psutil.STATUS_STOPPED, host="node-8")
    assert sentence(*waiting, stopped).endswith("(core/tensor_parallel/mappings.py:24 in _reduce) (on node-8)")
    assert sentence(*waiting).endswith("and it does not end (on node-0, node-1, node-2, node-3 and 4 more hosts)")


def test_ranks_that_are_all_in_one_collective_are_said_to_be() -> None:
    text = sentence(*(process("actor", rank, collective()) for rank in range(2)), pending=UPDATE[:2])
    assert text.endswith(
        "actor ranks 0, 1 wait in all_reduce (core/tensor_parallel/mappings.py:24 in _reduce): all that take part are in it, "
        "and it does not end"
    )


def test_ranks_in_different_collectives_are_listed_with_each() -> None:
    text = sentence(process("actor", 0, collective()), process("actor", 1, collective("broadcast", 60)))
    assert "actor rank 0 waits in all_reduce (" in text
    assert "actor rank 1 waits in broadcast (core/tensor_parallel/mappings.py:60" in text
    assert "nobody is outside these calls, and none ends" in text


def test_a_rank_that_left_its_peers_in_a_collective_is_named() -> None:
    text = sentence(process("actor", 0, collective()), process("actor", 1, RAY_IDLE), pending=UPDATE[:1])
    assert "actor rank 1 is in no call, while actor rank 0 waits in all_reduce (" in text


def test_the_handle_of_a_collective_and_the_pipelines_messages_count_as_waiting() -> None:
    handle = (
        Frame(f"{PACKAGES}megatron/core/distributed/param_and_grad_buffer.py", 9, "finish", "handle.wait()"),
        *RAY_CALL,
    )
    p2p = f"{PACKAGES}megatron/core/pipeline_parallel/"
    message = (
        Frame(f"{p2p}p2p_communication.py", 400, "_communicate", "req.wait()"),
        Frame(f"{p2p}schedules.py", 2000, "recv_forward"),
        *RAY_CALL,
    )
    stuck = process("actor", 2, (*SLEEP, *RAY_CALL))
    text = sentence(process("actor", 0, handle), process("actor", 1, message), stuck)
    assert "actor rank 2 has not joined its peers: " in text
    assert "actor rank 0 waits in `handle.wait()` (core/distributed/param_and_grad_buffer.py:9 in finish)" in text
    assert "actor rank 1 waits in the pipeline's send and receive (core/pipeline_parallel/schedules.py:2000" in text


def test_a_transfer_joins_both_sides_and_the_side_that_is_missing_is_named() -> None:
    transfer = (
        Frame("/src/hybridrl/reshard/transports/shm.py", 88, "run", "self._wait()"),
        Frame("/src/hybridrl/reshard/executor.py", 131, "run", "self._transport.run(deadline_s)"),
        *RAY_CALL,
    )
    engine = process("rollout", 0, SLEEP, part="vLLM engine")
    pending = [PendingCall("actor", 0, "send_weights"), PendingCall("rollout", 0, "receive_weights")]
    text = sentence(process("actor", 0, transfer), engine, pending=pending)
    assert text.startswith(
        "hang in phase receive_weights: no progress for 600 s; rollout rank 0's vLLM engine has not joined"
    )
    assert "the weight transfer (hybridrl/reshard/executor.py:131 in run), in which actor rank 0 waits" in text


def test_a_backward_pass_is_looked_for_in_the_threads_that_run_it() -> None:
    main = (Frame(f"{PACKAGES}torch/autograd/graph.py", 800, "_engine_run_backward"), *RAY_CALL)
    ranks = [process("actor", rank, collective(), main) for rank in range(2)]
    assert "actor ranks 0, 1 wait in all_reduce (" in sentence(*ranks)


def test_a_stuck_reward_is_named_with_its_sample_in_the_controllers_phase() -> None:
    waits = ProcessReport(
        WAITS.identity, 1, psutil.STATUS_SLEEPING, stacks=((Frame("/src/hybridrl/rewards/score.py", 150, "_wait"),),)
    )
    idle = (*LIBRARY_WAIT, Frame("/src/hybridrl/rewards/worker.py", 45, "main", "requests.get()"))
    reports = [
        process("reward process 0", None, (*SLEEP, *idle[1:]), doing="sample 3 of prompt calc-7"),
        process("reward process 1", None, idle),
        process("rollout", 0, RAY_IDLE),
    ]
    assert verdict([waits, *reports], [PendingCall("rollout", 0, "rollout")], ("reward",), 60) == (
        "hang in phase reward: no progress for 60 s; reward process 0 is in `time.sleep(3600)` (/src/rewards.py:7 in score) "
        "for sample 3 of prompt calc-7"
    )


def test_an_engine_at_work_and_a_blocked_event_loop_are_told_from_those_that_wait() -> None:
    queue = Frame(f"{PACKAGES}vllm/v1/engine/core.py", 1588, "_process_input_queue", "self.input_queue.get()")
    watcher = (Frame("/src/hybridrl/engines/vllm/orphans.py", 25, "wait", "select.select([owner], [], [])"),)
    waiting = process("rollout", 0, watcher, (*LIBRARY_WAIT, queue), part="vLLM engine")
    replica = process("rollout", 0, LIBRARY_WAIT, RAY_IDLE)
    pending = [PendingCall("rollout", 0, "rollout")]
    assert sentence(replica, waiting, pending=pending).endswith(
        "rollout rank 0 owes an answer, and every process waits for its next call"
    )
    spinning = (
        Frame(f"{PACKAGES}vllm/distributed/utils.py", 46, "sched_yield", "os.sched_yield()"),
        Frame(f"{PACKAGES}vllm/distributed/device_communicators/shm_broadcast.py", 600, "acquire_read"),
        Frame(f"{PACKAGES}vllm/v1/executor/multiproc_executor.py", 900, "worker_busy_loop"),
    )
    workers = [process("rollout", 0, spinning, part=f"vLLM worker {rank}") for rank in range(2)]
    assert "every process waits for its next call" in sentence(replica, *workers, pending=pending)
    blocked = process("rollout", 0, SLEEP, RAY_IDLE)
    assert "; rollout rank 0 is in `time.sleep(3600)`" in sentence(blocked, waiting, pending=pending)
    busy = process("rollout", 0, watcher, (*SLEEP, queue), part="vLLM engine")
    assert "; rollout rank 0's vLLM engine is in `time.sleep(3600)`" in sentence(replica, busy, pending=pending)


def test_a_controller_that_waits_for_nobody_is_the_cause() -> None:
    tracker = Frame("/src/tracker.py", 30, "append", "client.send(metrics)")
    stuck = ProcessReport(WAITS.identity, 1, psutil.STATUS_SLEEPING, stacks=((*LIBRARY_WAIT, tracker),))
    assert verdict([stuck, process("actor", 0, RAY_IDLE)], [], (), 600) == (
        "hang between phases: no progress for 600 s; controller is in `client.send(metrics)` (/src/tracker.py:30 in append)"
    )


def test_the_file_has_the_verdict_and_every_stack_with_its_source_and_is_not_overwritten(tmp_path: Path) -> None:
    reports = [
        process("actor", 0, LIBRARY_WAIT, SLEEP, doing="a task"),
        process("actor", 1, state=psutil.STATUS_STOPPED),
    ]
    first = write_report(tmp_path / "hang", "the verdict", reports)
    assert first.read_text() == (
        f"the verdict\n\n==== actor rank 0 (pid 100 on {WAITS.host}, state sleeping): a task\n"
        "-- main thread, innermost call first\n  /src/rewards.py:7 in score\n    time.sleep(3600)\n"
        "-- thread 1, innermost call first\n  /usr/lib/python3.11/threading.py:327 in wait\n    waiter.acquire()\n"
        f"\n==== actor rank 1 (pid 100 on {WAITS.host}, stopped by a signal)\nno stacks: it does not answer\n"
    )
    assert write_report(tmp_path / "hang", "later", []).name == "stacks-2.txt"
    assert first.read_text().startswith("the verdict")
