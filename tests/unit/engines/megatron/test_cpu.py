"""The CPU adaptation reaches Megatron's modules only, and goes away without a trace."""

from __future__ import annotations

import sys

import pytest
import torch
from megatron.core.optimizer import clip_grads
from megatron.core.transformer.moe import moe_utils

from hybridrl.engines.megatron import cpu


@pytest.fixture
def installed():
    cpu.install()
    yield
    cpu.uninstall()


@pytest.mark.usefixtures("installed")
def test_megatron_gets_cpu_tensors_where_it_asks_for_cuda():
    seen = clip_grads.torch
    assert seen is not torch and seen.Tensor is torch.Tensor and seen.float32 is torch.float32
    assert seen.zeros(2, device="cuda").device.type == "cpu"
    assert seen.tensor([1.0], device=seen.cuda.current_device()).device.type == "cpu"
    with seen.cuda.stream(seen.cuda.Stream()):
        seen.cuda.current_stream().record_event().synchronize()


@pytest.mark.usefixtures("installed")
def test_everyone_else_keeps_torch():
    with pytest.raises(Exception, match="CUDA"):
        torch.zeros(2, device="cuda")
    assert sys.modules[__name__].torch is sys.modules["torch"]


@pytest.mark.usefixtures("installed")
def test_tensor_methods_change_only_while_a_model_is_built():
    tensor = torch.zeros(1)
    with cpu.cuda_tensor_methods():
        assert tensor.type() == "torch.cuda.FloatTensor" and tensor.cuda() is tensor
    assert tensor.type() == "torch.FloatTensor"


def test_uninstalling_restores_every_module():
    def state():
        return {name: vars(module).get("torch") for name, module in sys.modules.items() if name.startswith("megatron.")}

    before, had_gemm = state(), hasattr(moe_utils, "te_general_gemm")
    cpu.install()
    cpu.install()
    assert state() != before and cpu.is_installed()
    cpu.uninstall()
    assert state() == before and hasattr(moe_utils, "te_general_gemm") == had_gemm and not cpu.is_installed()


def test_without_the_adaptation_tensor_methods_stay():
    with cpu.cuda_tensor_methods():
        assert torch.zeros(1).type() == "torch.FloatTensor"
