"""Samples on disk, as Arrow: what was generated and is not trained on yet, to the bit.

One row per sample; `batch` says which batch it belongs to.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from pyarrow import feather

from hybridrl.data.sample import FinishReason, Prompt, Sample

_PER_TOKEN = {
    "token_ids": np.int32,
    "loss_mask": np.bool_,
    "rollout_logprobs": np.float32,
    "policy_versions": np.int32,
}
_PROMPT = ("prompt_id", "text", "answer", "source", "data_source", "extra_info")


def write_samples(path: Path, batches: Sequence[Sequence[Sample]]) -> None:
    """Write the samples of some batches."""
    rows = [_row(number, sample) for number, batch in enumerate(batches) for sample in batch]
    feather.write_feather(pa.Table.from_pylist(rows, schema=_SCHEMA), path, compression="uncompressed")


def read_samples(path: Path, num_batches: int) -> list[list[Sample]]:
    """Read what :func:`write_samples` wrote."""
    batches: list[list[Sample]] = [[] for _ in range(num_batches)]
    for row in feather.read_table(path, memory_map=False).to_pylist():
        batches[row["batch"]].append(_sample(row))
    return batches


_SCHEMA = pa.schema(
    [pa.field("batch", pa.int32()), pa.field("sample_index", pa.int32())]
    + [pa.field(f"prompt_{name}", pa.string()) for name in _PROMPT]
    + [pa.field("prompt_token_ids", pa.list_(pa.int32()))]
    + [pa.field(name, pa.list_(pa.from_numpy_dtype(kind))) for name, kind in _PER_TOKEN.items()]
    + [pa.field("finish_reason", pa.string()), pa.field("num_turns", pa.int32()), pa.field("text", pa.string())]
    + [pa.field("is_greedy", pa.bool_())]
    + [pa.field("routing", pa.list_(pa.int16())), pa.field("routing_shape", pa.list_(pa.int64()))]
)


def _row(batch: int, sample: Sample) -> dict[str, object]:
    routing = sample.routing
    return {
        "batch": batch,
        "sample_index": sample.sample_index,
        **{f"prompt_{name}": getattr(sample.prompt, name) for name in _PROMPT},
        "prompt_token_ids": sample.prompt.token_ids,
        **{name: getattr(sample, name) for name in _PER_TOKEN},
        "finish_reason": sample.finish_reason.value,
        "num_turns": sample.num_turns,
        "text": sample.text,
        "is_greedy": sample.is_greedy,
        "routing": None if routing is None else routing.reshape(-1),
        "routing_shape": None if routing is None else routing.shape,
    }


def _sample(row: dict[str, Any]) -> Sample:
    prompt = {name: row[f"prompt_{name}"] for name in _PROMPT}
    routing = None
    if row["routing_shape"] is not None:
        routing = np.array(row["routing"], dtype=np.int16).reshape(row["routing_shape"])
    arrays: dict[str, Any] = {name: np.array(row[name], dtype=kind) for name, kind in _PER_TOKEN.items()}
    return Sample(
        prompt=Prompt(token_ids=tuple(row["prompt_token_ids"]), **prompt),
        sample_index=row["sample_index"],
        **arrays,
        finish_reason=FinishReason(row["finish_reason"]),
        num_turns=row["num_turns"],
        text=row["text"],
        routing=routing,
        is_greedy=row["is_greedy"],
    )
