"""Transfers of device tensors: staged through the host, and straight into device memory."""

import pytest
import torch

from hybridrl.reshard.executor import compare_reports
from hybridrl.reshard.ops import has_cuda
from tests.unit.reshard.test_executor import equal, sides
from tests.unit.reshard.world import transfer

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not (torch.cuda.is_available() and has_cuda()), reason="needs a CUDA device and the CUDA kernels"
    ),
]


def on_device(ranks):
    return [{name: tensor.cuda() for name, tensor in tensors.items()} for tensors in ranks]


@pytest.mark.parametrize("source_is_cuda", [False, True])
@pytest.mark.parametrize("destination_is_cuda", [False, True])
@pytest.mark.parametrize("kind", ["shm", "gloo"])
def test_device_tensors_are_staged_through_the_host(kind, source_is_cuda, destination_is_cuda):
    plan, have, got, want = sides()
    have = on_device(have) if source_is_cuda else have
    got = on_device(got) if destination_is_cuda else got
    sent, received = transfer(plan, have, got, kind, versions=(1, 2))
    assert equal([{name: tensor.cpu() for name, tensor in tensors.items()} for tensors in got], want)
    assert compare_reports(plan, [r[1] for r in sent], [r[1] for r in received]) == []
