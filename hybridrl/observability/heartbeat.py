"""What a process of a run shows to whoever watches it: how much work it has done, what it works on, and its stacks when asked.

    advance()   one more piece of work is done: a micro-batch, a step of the sampler, a sample scored, an answer taken in
    doing()     what the process works on, when its stack alone would not say
    SIGUSR2     writes the stacks of all threads, from C: also while the main thread is stuck inside a library or holds the GIL

All of it lies in one anonymous file in memory, which other processes of the same user and node find and read through /proc (``stacks.py``):
nothing is sent, a piece of work costs a few bytes written to memory, and the file goes with its process. Linux only.
"""

from __future__ import annotations

import faulthandler
import mmap
import os
import signal
import struct
from dataclasses import dataclass

STACKS_SIGNAL = signal.SIGUSR2
PAGE_BYTES = 4096
"""Of the file: the count, then the text; stacks are written behind them."""
_COUNT = struct.Struct("<Q")
_MARK = "hybridrl"


@dataclass(frozen=True, slots=True)
class Identity:
    """A process of a run.

    Attributes:
        session: Names the run among those of the machine.
        role: The roles of a process of several are joined by ``+``.
        rank: None where there is only one.
        part: Of the rank, when it has several processes.
    """

    session: str
    role: str
    rank: int | None = None
    part: str = ""

    def __str__(self) -> str:
        """Return the name that errors use, such as ``rollout rank 0's vLLM engine``."""
        rank = "" if self.rank is None else f" rank {self.rank}"
        part = f"'s {self.part}" if self.part else ""
        return f"{self.role}{rank}{part}"

    def file_name(self) -> str:
        """Return the name of the process's file; :meth:`parse` reads it."""
        return "|".join((_MARK, self.session, self.role, "" if self.rank is None else str(self.rank), self.part))

    @staticmethod
    def parse(file_name: str) -> Identity | None:
        """Return whose file it is; None for any other file."""
        mark, *fields = file_name.split("|")
        if mark != _MARK or len(fields) != len(Identity.__slots__):
            return None
        session, role, rank, part = fields
        return Identity(session, role, int(rank) if rank else None, part)


class Heartbeat:
    """Of one process; see the module. Before :meth:`show` it counts in private memory."""

    def __init__(self) -> None:
        self.count = 0
        self._page: bytearray | mmap.mmap = bytearray(PAGE_BYTES)
        self._fd: int | None = None

    def show(self, identity: Identity) -> None:
        """Let others read this process's heartbeat and stacks, under `identity` from now on."""
        self.hide()
        self._fd = os.memfd_create(identity.file_name())
        os.ftruncate(self._fd, PAGE_BYTES)
        os.lseek(self._fd, PAGE_BYTES, os.SEEK_SET)
        self._page = mmap.mmap(self._fd, PAGE_BYTES)
        _COUNT.pack_into(self._page, 0, self.count)
        faulthandler.register(STACKS_SIGNAL, file=self._fd, all_threads=True)

    def write_stacks(self) -> None:
        """Write this process's own stacks, with the GIL held.

        The signal's handler runs without it: beside the thread that asks, which runs Python, it would read frames that change, and may crash.
        """
        if self._fd is not None:
            faulthandler.dump_traceback(self._fd, all_threads=True)

    def hide(self) -> None:
        """Show nothing any more; stacks asked for from now on would end the process, as the signal does by default."""
        if self._fd is not None:
            faulthandler.unregister(STACKS_SIGNAL)
            self._page = bytearray(PAGE_BYTES)
            os.close(self._fd)
            self._fd = None

    def advance(self) -> None:
        """Count one more piece of work."""
        self.count += 1
        _COUNT.pack_into(self._page, 0, self.count)

    def doing(self, text: str) -> None:
        """Say what the process works on; empty for nothing."""
        room = PAGE_BYTES - _COUNT.size
        self._page[_COUNT.size :] = text.encode()[:room].ljust(room, b"\0")


HEARTBEAT = Heartbeat()
"""This process's."""


def read_page(page: bytes) -> tuple[int, str]:
    """Return the count and the text of a heartbeat's first :data:`PAGE_BYTES`."""
    return _COUNT.unpack_from(page)[0], page[_COUNT.size :].rstrip(b"\0").decode(errors="replace")
