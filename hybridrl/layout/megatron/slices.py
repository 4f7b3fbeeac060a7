"""How a Megatron rank cuts single tensors: whole, by rows, by columns, and gate and up together."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from hybridrl.errors import LayoutError
from hybridrl.layout.box import Box, DType
from hybridrl.layout.builder import ShardMapBuilder
from hybridrl.layout.megatron.layout import MegatronLayout
from hybridrl.layout.mlp import GatedMlp
from hybridrl.layout.parallel import Coordinates


@dataclass(frozen=True, slots=True)
class Cut:
    """Part `index` of `degree` equal parts."""

    degree: int
    index: int

    def of(self, total: int, what: str, axis: str) -> range:
        """Return this part of ``range(total)``.

        Raises:
            LayoutError: Naming `what` and both numbers when the parts are not equal.
        """
        if total % self.degree:
            raise LayoutError(
                f"{what}: {total} does not divide by {axis} {self.degree}; choose a degree that divides it"
            )
        mine = total // self.degree
        return range(self.index * mine, (self.index + 1) * mine)


class RankSlices:
    """Declares one rank's tensors; the parts of the map (attention, experts, ...) are written in its words.

    Attributes:
        tp: The rank's part of dense tensors.
        etp: The rank's part of expert tensors.
        ep: The rank's part of the experts.
    """

    def __init__(self, layout: MegatronLayout, at: Coordinates, out: ShardMapBuilder) -> None:
        self.layout = layout
        self.out = out
        self.tp = Cut(layout.sizes.tp, at.tp)
        self.etp = Cut(layout.sizes.etp, at.etp)
        self.ep = Cut(layout.sizes.ep, at.ep)

    def whole(self, tensor: str, local: str, dtype: DType | None = None) -> None:
        """Keep a whole canonical tensor."""
        self.out.whole(tensor, local, dtype or self.layout.dtype)

    def rows(self, tensor: str, local: str, dtype: DType | None = None) -> None:
        """Keep this tensor-parallel rank's rows."""
        total, *rest = self.out.shape_of(tensor)
        mine = self.tp.of(total, local, "tp_size")
        self.out.local(local, (len(mine), *rest), dtype or self.layout.dtype)
        self.out.place_rows(tensor, mine, local, 0)

    def columns(self, tensor: str, local: str, cut: Cut, axis: str = "tp_size") -> None:
        """Keep this rank's columns."""
        num_rows, total = self.out.shape_of(tensor)
        mine = cut.of(total, local, axis)
        self.out.local(local, (num_rows, len(mine)), self.layout.dtype)
        self.place_columns(tensor, mine, local, 0)

    def place_columns(self, tensor: str, columns: range, local: str, offset: int) -> None:
        """Put canonical columns, all rows of them, at element `offset` of a local tensor, tightly."""
        num_rows = self.out.shape_of(tensor)[0]
        box = Box((0, columns.start), (num_rows, columns.stop))
        self.out.place_view(tensor, box, local, offset, (len(columns), 1))

    def vocab(self, tensor: str, local: str) -> None:
        """Keep this rank's rows of the padded vocabulary."""
        spec = self.layout.spec
        mine = self.tp.of(self.layout.padded_vocab_size, local, "tp_size")
        real = range(min(spec.vocab_size, mine.start), min(spec.vocab_size, mine.stop))
        padding = (len(mine) - len(real)) * spec.hidden_size
        self.out.local(local, (len(mine), spec.hidden_size), self.layout.dtype, num_padding=padding)
        if real:
            self.out.place_rows(tensor, real, local, 0)

    def gated(self, mlp: GatedMlp, fc1: str, fc2: str, cut: Cut, axis: str) -> None:
        """Keep a SwiGLU MLP: gate and up rows of this rank in one tensor, and the matching columns of down."""
        mine = cut.of(mlp.intermediate_size, fc1, axis)
        self.out.local(fc1, (2 * len(mine), mlp.hidden_size), self.layout.dtype)
        self.place_gate_up(mlp, mine, fc1, 0, None)
        self.columns(mlp.down, fc2, cut, axis)

    def place_gate_up(self, mlp: GatedMlp, mine: range, local: str, offset: int, interleave: int | None) -> None:
        """Put gate and up rows `mine` at element `offset` of a local tensor."""
        width = mlp.hidden_size
        for run in glu_runs(mine, interleave, local):
            box = Box((run.rows.start, 0), (run.rows.stop, width))
            for tensor, row in ((mlp.gate, run.gate_row), (mlp.up, run.up_row)):
                self.out.place_view(tensor, box, local, offset + row * width, (run.step * width, 1))


@dataclass(frozen=True, slots=True)
class GluRun:
    """Rows `rows` of gate and of up; the first lies at local row `gate_row` or `up_row`, the next `step` rows further."""

    rows: range
    gate_row: int
    up_row: int
    step: int


def glu_runs(mine: range, interleave: int | None, what: str) -> Iterator[GluRun]:
    """Yield where gate and up rows lie in a fused tensor.

    Worked example, rows 4..7: all gate rows first: gate at local rows 0..3, up at 4..7. Interleaved by 1: g4 u4 g5 u5 ..., one
    run of step 2. Interleaved by 2: g4 g5 u4 u5 g6 g7 u6 u7, two runs.

    Raises:
        LayoutError: When the rows do not divide by the interleave size.
    """
    if interleave is None:
        yield GluRun(mine, 0, len(mine), 1)
    elif len(mine) % interleave:
        raise LayoutError(f"{what}: {len(mine)} gate rows do not divide by glu_interleave_size {interleave}")
    elif interleave == 1:
        yield GluRun(mine, 0, 1, 2)
    else:
        for first in range(0, len(mine), interleave):
            yield GluRun(mine[first : first + interleave], 2 * first, 2 * first + interleave, 1)
