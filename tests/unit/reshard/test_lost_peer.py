"""Texts of gloo, torch's store and NCCL: which of them say that it is the other end that is lost."""

from __future__ import annotations

import errno
import os

import pytest
import torch
import torch.distributed as dist

from hybridrl.errors import PeerLostError, ReshardError
from hybridrl.layout.shard import Place
from hybridrl.reshard.lost_peer import is_lost_peer
from hybridrl.reshard.transports.group import NamedErrors

ME, PEER = Place("actor", 0, "a", "0"), Place("rollout", 1, "b", "1")
NCCL = """NCCL error in: ProcessGroupNCCL.cpp:3690, remote process exited or there was a network error, NCCL version 2.28.9
ncclRemoteError: A call failed possibly due to a network error or a remote process exiting prematurely.
Last error:
socketProgress: Connection closed by remote peer"""

LOST = [
    # gloo: peer killed, or it closed; time is up, and what follows on the same connection
    RuntimeError(
        "[gloo/transport/tcp/pair.cc:553] Connection closed by peer [127.0.0.1]:49537. This is typically caused by"
    ),
    RuntimeError("[gloo/transport/tcp/unbound_buffer.cc:78] Timed out waiting 1000ms for recv operation to complete"),
    RuntimeError("[gloo/transport/tcp/unbound_buffer.cc:129] Timed out waiting 1000ms for send operation to complete"),
    RuntimeError("Application timeout caused pair closure"),
    RuntimeError("Gloo connectFullMesh failed with [gloo/transport/tcp/pair.h:311] Connect timeout [none]"),
    RuntimeError("Gloo connectFullMesh failed with [pair.cc:152] timed out connecting: SO_ERROR: Connection refused"),
    # torch's store: a key does not come, nobody listens, its process is gone
    dist.DistStoreError("wait timeout after 4000ms, keys: /s/0/2"),
    dist.DistNetworkError(
        "The client socket has timed out after 4000ms while trying to connect to (127.0.0.1, 50481)."
    ),
    dist.DistNetworkError("Failed to recv, got 0 bytes. Connection was likely closed. Did the remote server shutdown"),
    dist.DistNetworkError("Broken pipe"),
    # NCCL
    dist.DistBackendError(NCCL),
    dist.DistBackendError(
        "[Rank 0] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=18, OpType=SEND, Timeout(ms)=9000) "
        "ran for 9001 milliseconds before timing out."
    ),
    # the operating system
    *(OSError(number, os.strerror(number)) for number in (errno.ECONNREFUSED, errno.ETIMEDOUT, errno.EHOSTUNREACH)),
]
OWN = [
    dist.DistBackendError("NCCL error in: ProcessGroupNCCL.cpp:1, unhandled cuda error (run with NCCL_DEBUG=INFO)"),
    torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB."),
    RuntimeError("input tensor has to be contiguous"),
    RuntimeError("Tensors must be contiguous"),
    RuntimeError(),
]


@pytest.mark.parametrize("error", LOST, ids=str)
def test_a_lost_peer_is_told_from_the_text(error: Exception) -> None:
    assert is_lost_peer(error)


@pytest.mark.parametrize("error", [*OWN, ValueError("Connection closed by peer is no number")], ids=str)
def test_what_would_come_again_is_no_lost_peer(error: Exception) -> None:
    assert not is_lost_peer(error)


@pytest.mark.parametrize(
    ("errors", "kind"), [(LOST[:12], PeerLostError), (OWN, ReshardError)], ids=["lost peer", "own fault"]
)
def test_a_failed_operation_names_both_ranks_whoever_is_at_fault(
    errors: list[Exception], kind: type[ReshardError]
) -> None:
    for error in errors:
        with pytest.raises(ReshardError) as caught, NamedErrors(ME, PEER):
            raise error
        assert type(caught.value) is kind, error
        assert str(caught.value) == f"actor rank 0: transfer with rollout rank 1 failed ({error})"
        assert caught.value.__cause__ is error


def test_gloo_refuses_a_tensor_that_is_not_contiguous_without_blaming_the_peer() -> None:
    store = dist.HashStore()
    group = dist.ProcessGroupGloo(store, 0, 1)
    with pytest.raises(ReshardError) as caught, NamedErrors(ME, PEER):
        group.send([torch.zeros(8)[::2]], 0, 0)
    assert type(caught.value) is ReshardError
    assert "contiguous" in str(caught.value)
