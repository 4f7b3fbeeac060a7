"""The training state of a model on Megatron ranks as the controller sees it: saved while training goes on, and taken over."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from hybridrl.checkpoint.folder import rank_file
from hybridrl.layout.roles import ModelRole
from hybridrl.roles.dispatch import broadcast, per_rank
from hybridrl.roles.future import Future
from hybridrl.roles.megatron_pool import MegatronPool, nothing

if TYPE_CHECKING:
    from hybridrl.checkpoint.manifest import FileRecord
    from hybridrl.roles.megatron_worker import RankSave


@dataclass(frozen=True, slots=True)
class RoleSave:
    """How the save of all ranks stands.

    Attributes:
        is_done: Whether every rank has written its file, or failed to.
        files: Those that are on disk, by name.
        errors: One line per rank that failed.
    """

    is_done: bool
    files: Mapping[str, FileRecord]
    errors: tuple[str, ...] = ()


class MegatronState:
    """What a trained model must remember to go on.

    Attributes:
        role: The model's.
    """

    def __init__(self, pool: MegatronPool, role: ModelRole) -> None:
        self.role = role
        self._group = pool.group(role)
        self._timeouts = pool.timeouts

    def begin_save(self, folder: Path) -> Future[None]:
        """Copy the state of every rank into host memory; the ranks go on while they write it into `folder`."""
        timeout_s = self._timeouts.train_timeout_s
        arguments = broadcast(self.role, folder)
        return self._group.call("begin_save", arguments, nothing, phase="begin_save", timeout_s=timeout_s)

    def poll_save(self, wait_s: float) -> Future[RoleSave]:
        """Return how the save that was begun last stands, after at most `wait_s` seconds."""
        timeout_s = wait_s + self._timeouts.train_timeout_s
        arguments = broadcast(self.role, wait_s)
        return self._group.call("poll_save", arguments, self._joined, phase="poll_save", timeout_s=timeout_s)

    def damage_of(self, folder: Path, files: Mapping[str, FileRecord]) -> Future[list[str]]:
        """Read all files of a checkpoint, each rank a share, and return what is wrong with them."""
        names = sorted(files, key=lambda name: -files[name].num_bytes)
        num_ranks = len(self._group.ranks)
        shares = [{name: files[name] for name in names[rank::num_ranks]} for rank in range(num_ranks)]
        return self._group.call(
            "damage_of",
            per_rank([(folder, share) for share in shares]),
            lambda found: [damage for of_rank in found for damage in of_rank],
            phase="damage_of",
            timeout_s=self._timeouts.startup_timeout_s,
        )

    def load_state(self, paths: Sequence[Path]) -> Future[None]:
        """Take over the state that ranks of any layout wrote."""
        timeout_s = self._timeouts.startup_timeout_s
        arguments = broadcast(self.role, paths)
        return self._group.call("load_state", arguments, nothing, phase="load_state", timeout_s=timeout_s)

    def _joined(self, saves: list[RankSave]) -> RoleSave:
        role = self.role.value
        files = {rank_file(role, rank): save.record for rank, save in enumerate(saves) if save.record}
        errors = tuple(f"{role} rank {rank}: {save.error}" for rank, save in enumerate(saves) if save.error)
        return RoleSave(all(save.is_done for save in saves), files, errors)
