"""How a vLLM worker cuts single tensors: whole, by rows, by columns, and several under one roof."""

from __future__ import annotations

from hybridrl.errors import LayoutError
from hybridrl.layout.box import Box, DType
from hybridrl.layout.builder import ShardMapBuilder
from hybridrl.layout.vllm.layout import VllmLayout

_VOCAB_MULTIPLE = 64


class WorkerSlices:
    """Declares one worker's tensors; the parts of the map (attention, MLP) are written in its words.

    Attributes:
        tp_rank: Rank among the workers that share dense layers.
        expert_rank: Rank among the workers that share experts.
    """

    def __init__(self, layout: VllmLayout, tp_rank: int, dp_rank: int, out: ShardMapBuilder) -> None:
        self.layout, self.out = layout, out
        self.tp_rank = tp_rank
        self.expert_size = layout.tp * layout.dp
        self.expert_rank = dp_rank * layout.tp + tp_rank

    def share(self, total: int, what: str) -> range:
        """Return this worker's part of ``range(total)`` in a dense layer.

        Raises:
            LayoutError: Naming `what` and both numbers when the parts are not equal.
        """
        return _part(total, self.layout.tp, self.tp_rank, what)

    def expert_share(self, total: int, what: str) -> range:
        """Return this worker's part of ``range(total)`` in every expert."""
        return _part(total, self.expert_size, self.expert_rank, what)

    def whole(self, tensor: str, dtype: DType | None = None) -> None:
        """Keep a whole canonical tensor under its own name."""
        self.out.whole(tensor, self.layout.local_name(tensor), dtype or self.layout.dtype)

    def rows(self, tensor: str) -> None:
        """Keep this worker's rows."""
        total, *rest = self.out.shape_of(tensor)
        mine = self.share(total, tensor)
        local = self.layout.local_name(tensor)
        self.out.local(local, (len(mine), *rest), self.layout.dtype)
        self.out.place_rows(tensor, mine, local, 0)

    def columns(self, tensor: str, mine: range) -> None:
        """Keep the columns `mine`."""
        num_rows = self.out.shape_of(tensor)[0]
        local = self.layout.local_name(tensor)
        self.out.local(local, (num_rows, len(mine)), self.layout.dtype)
        self.out.place_box(tensor, Box((0, mine.start), (num_rows, mine.stop)), local, (0, 0))

    def stacked_rows(self, local: str, parts: list[tuple[str, range]]) -> None:
        """Keep rows of several tensors in one local tensor, in the order given."""
        rest = self.out.shape_of(parts[0][0])[1:]
        self.out.local(local, (sum(len(rows) for _, rows in parts), *rest), self.layout.dtype)
        row = 0
        for tensor, rows in parts:
            self.out.place_rows(tensor, rows, local, row)
            row += len(rows)

    def vocab(self, tensor: str) -> None:
        """Keep this worker's rows of the vocabulary, which vLLM pads to a multiple of 64."""
        spec, local = self.layout.spec, self.layout.local_name(tensor)
        rows = self.share(-(-spec.vocab_size // _VOCAB_MULTIPLE) * _VOCAB_MULTIPLE, tensor)
        real = range(min(rows.start, spec.vocab_size), min(rows.stop, spec.vocab_size))
        padding = (len(rows) - len(real)) * spec.hidden_size
        self.out.local(local, (len(rows), spec.hidden_size), self.layout.dtype, num_padding=padding)
        if real:
            self.out.place_rows(tensor, real, local, 0)


def _part(total: int, degree: int, rank: int, what: str) -> range:
    if total % degree:
        raise LayoutError(
            f"{what}: {total} does not divide by rollout tp_size {degree}; choose a degree that divides it"
        )
    mine = total // degree
    return range(rank * mine, (rank + 1) * mine)
