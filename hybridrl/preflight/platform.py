"""Which hardware a command can use."""

from __future__ import annotations

from hybridrl.config.choices import Platform, TransportName
from hybridrl.config.schema import ExperimentConfig, PlacementConfig
from hybridrl.preflight.command import Command
from hybridrl.preflight.report import Report

_BETWEEN_DEVICES = (TransportName.NCCL, TransportName.CUDA_IPC)


def check_platform(report: Report, config: ExperimentConfig, command: Command) -> None:
    """Check that training can reach the memory in which its platform keeps weights."""
    if command is Command.TRAIN:
        _check_transport(report, config)
    if command is Command.TRAIN and config.platform is Platform.CUDA:
        _refuse_training_on_gpus(report)
        _check_devices_are_not_shared(report, config)


def _refuse_training_on_gpus(report: Report) -> None:
    """Refuse what no run has shown; this function goes when a run on GPUs has."""
    expected = "cpu: training on GPUs is not supported yet, since no run on them was tested"
    report.add("platform", "cuda", expected, "set it to cpu", is_need=True)


def _check_devices_are_not_shared(report: Report, config: ExperimentConfig) -> None:
    if _is_shared(config.placement):
        pool = config.placement.rollout
        expected = "a pool other than that of placement.actor, since platform is cuda: weights do not move between two processes on one device (no CUDA IPC)"
        related = ("platform", "placement.actor")
        report.add("placement.rollout", pool, expected, "name another", related=related, is_need=True)


def _is_shared(placement: PlacementConfig) -> bool:
    return placement.rollout == placement.actor


def _check_transport(report: Report, config: ExperimentConfig) -> None:
    key, wanted = "weight_sync.transport", config.weight_sync.transport
    if wanted in _BETWEEN_DEVICES and config.platform is Platform.CPU:
        expected = "auto, shm, gloo or mixed, since platform is cpu: it moves bytes between CUDA devices"
        report.add(key, wanted.value, expected, "set it to auto", related=("platform",))
    elif wanted is TransportName.NCCL and _is_shared(config.placement):
        expected = "auto or cuda_ipc, since actor and rollout share a pool: NCCL does not take two ranks on one device"
        next_step = "set it to auto, or placement.rollout to a pool of its own"
        report.add(key, wanted.value, expected, next_step, related=("placement",))
