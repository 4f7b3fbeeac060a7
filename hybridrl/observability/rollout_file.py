"""Rollouts of one step as a parquet file, one row per sample.

Read one with ``pandas.read_parquet`` or ``pyarrow.parquet.read_table``; the columns are :data:`ROLLOUT_SCHEMA`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

from hybridrl.errors import DataError
from hybridrl.observability.files import replaced
from hybridrl.observability.records import RolloutRecord

_SCALARS = {
    "prompt_id": pa.string(),
    "sample_index": pa.int32(),
    "prompt": pa.string(),
    "answer": pa.string(),
    "response": pa.string(),
    "reward": pa.float32(),
    "finish_reason": pa.string(),
    "num_turns": pa.int32(),
    "data_source": pa.string(),
}
_PER_TOKEN = {
    "token_ids": pa.int32(),
    "loss_mask": pa.bool_(),
    "rollout_logprobs": pa.float32(),
    "old_logprobs": pa.float32(),
    "advantages": pa.float32(),
    "policy_versions": pa.int32(),
}
ROLLOUT_SCHEMA = pa.schema(
    [pa.field("step", pa.int32())]
    + [pa.field(name, kind) for name, kind in _SCALARS.items()]
    + [pa.field(name, pa.list_(kind)) for name, kind in _PER_TOKEN.items()]
)


def write_rollouts(path: Path, step: int, rollouts: Sequence[RolloutRecord]) -> None:
    """Write the rollouts of one step to `path`; the folder is made when missing.

    Raises:
        ValueError: The per-token arrays of a rollout differ in length.
    """
    columns: dict[str, pa.Array] = {"step": pa.array([step] * len(rollouts), pa.int32())}
    for name, kind in _SCALARS.items():
        columns[name] = pa.array([getattr(rollout, name) for rollout in rollouts], kind)
    lengths = [len(rollout.token_ids) for rollout in rollouts]
    for name, kind in _PER_TOKEN.items():
        rows = [getattr(rollout, name) for rollout in rollouts]
        if [len(row) for row in rows] != lengths:
            raise ValueError(
                f"step {step}: {name} has {[len(row) for row in rows]} entries per sample, expected {lengths}"
            )
        columns[name] = _list_array(rows, lengths, kind)
    path.parent.mkdir(parents=True, exist_ok=True)
    with replaced(path) as temporary:
        pq.write_table(pa.table(columns, schema=ROLLOUT_SCHEMA), temporary, compression="zstd")


def _list_array(rows: Sequence[NDArray[np.generic]], lengths: Sequence[int], kind: pa.DataType) -> pa.Array:
    offsets = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
    return pa.ListArray.from_arrays(pa.array(offsets), pa.array(np.concatenate(rows), kind))


def read_rollouts(path: Path) -> list[RolloutRecord]:
    """Read what :func:`write_rollouts` wrote; columns that an older version did not write keep their defaults.

    Raises:
        DataError: The file is not one of rollouts.
    """
    with _damage_named(path):
        table = pq.read_table(path)
        columns: dict[str, Sequence[object]] = {
            name: table.column(name).to_pylist() for name in _SCALARS if name in table.column_names
        }
        columns |= {name: _arrays(table.column(name), kind) for name, kind in _PER_TOKEN.items()}
        return [
            RolloutRecord(**{name: values[row] for name, values in columns.items()})  # type: ignore[arg-type]
            for row in range(table.num_rows)
        ]


def num_tokens_in(path: Path) -> int:
    """Return the tokens of all samples of a file, from its metadata alone.

    Raises:
        DataError: The file cannot be read.
    """
    with _damage_named(path):
        metadata = pq.read_metadata(path)
    groups = [metadata.row_group(index) for index in range(metadata.num_row_groups)]
    columns = [group.column(index) for group in groups for index in range(group.num_columns)]
    return sum(int(column.num_values) for column in columns if column.path_in_schema.startswith("token_ids."))


@contextmanager
def _damage_named(path: Path) -> Iterator[None]:
    """Turn what pyarrow says of a file into an error that names it; damage beyond the footer is an OSError there."""
    try:
        yield
    except (pa.ArrowException, OSError, KeyError, TypeError) as e:
        cause = " ".join(str(e).split())
        raise DataError(f"{path}: got {cause}, expected a parquet file of rollouts; was it damaged or changed?") from e


def _arrays(column: pa.ChunkedArray, kind: pa.DataType) -> list[NDArray[np.generic]]:
    dtype = kind.to_pandas_dtype()
    return [np.asarray(row.values.to_numpy(zero_copy_only=False), dtype=dtype) for row in column]
