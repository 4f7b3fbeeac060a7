"""A step on disk: one parquet file, a row per sample, with one JSON object in its metadata under ``hybridrl.replay``.

The object says the version of this format, so that a file is either understood or refused; there is no pickle and nothing in a file is
run by reading it. pandas and pyarrow read the rows as those of any parquet file.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

from hybridrl.data.batch import PolicyBatch, SequenceBatch, pad_rows
from hybridrl.data.sample import FinishReason, Prompt, Sample
from hybridrl.errors import DataError
from hybridrl.observability.files import replaced
from hybridrl.replay.replay_step import ReplayStep, UpdateValues

SCHEMA_VERSION = 1
_KEY = b"hybridrl.replay"

_OF_PROMPT = {name: pa.string() for name in ("prompt_id", "text", "answer", "source", "data_source", "extra_info")}
_OF_SAMPLE = {
    "sample_index": pa.int32(),
    "finish_reason": pa.string(),
    "num_turns": pa.int32(),
    "response": pa.string(),
}
_OF_BATCH = {"reward": pa.float64(), "greedy_reward": pa.float64(), "group_id": pa.int64(), "update_number": pa.int32()}
_PER_TOKEN = {
    "token_ids": pa.int32(),
    "loss_mask": pa.bool_(),
    "policy_versions": pa.int32(),
    "rollout_logprobs": pa.float32(),
    "old_logprobs": pa.float32(),
    "ref_logprobs": pa.float32(),
    "advantages": pa.float32(),
    "loss_weights": pa.float32(),
    "values": pa.float32(),
    "returns": pa.float32(),
    "logprobs": pa.float32(),
}
_OPTIONAL = ("ref_logprobs", "values", "returns")
_SCHEMA = pa.schema(
    [pa.field(name, kind) for name, kind in (_OF_PROMPT | _OF_SAMPLE | _OF_BATCH).items()]
    + [pa.field(name, pa.list_(kind)) for name, kind in _PER_TOKEN.items()]
)


def write_step(path: Path, step: ReplayStep) -> None:
    """Write a step; the folder is made when missing."""
    columns: dict[str, Any] = {name: [getattr(sample.prompt, name) for sample in step.samples] for name in _OF_PROMPT}
    columns |= {
        "sample_index": [sample.sample_index for sample in step.samples],
        "finish_reason": [sample.finish_reason.value for sample in step.samples],
        "num_turns": [sample.num_turns for sample in step.samples],
        "response": [sample.text for sample in step.samples],
        "reward": step.rewards,
        "greedy_reward": [None] * len(step.samples) if step.greedy_rewards is None else step.greedy_rewards,
        "group_id": step.group_ids,
        "update_number": step.update_numbers,
    }
    columns |= _token_columns(step)
    metadata = {
        "schema_version": SCHEMA_VERSION,
        "step": step.step,
        "policy_version": step.version,
        "stop_texts": step.stop_texts,
        "reward_kl_coef": step.reward_kl_coef,
        "updates": [asdict(update) for update in step.updates],
        "config": step.config_text,
    }
    table = pa.table(columns, schema=_SCHEMA.with_metadata({_KEY: json.dumps(metadata)}))
    path.parent.mkdir(parents=True, exist_ok=True)
    with replaced(path) as temporary:
        pq.write_table(table, temporary, compression="zstd")


def _token_columns(step: ReplayStep) -> dict[str, list[Any]]:
    policy, lengths = step.policy, step.policy.sequences.lengths
    padded = {
        "token_ids": policy.sequences.token_ids,
        "loss_mask": policy.loss_mask,
        "policy_versions": pad_rows(
            [sample.policy_versions for sample in step.samples], policy.loss_mask.shape[1], np.int32
        ),
        "rollout_logprobs": policy.rollout_logprobs,
        "old_logprobs": policy.old_logprobs,
        "ref_logprobs": policy.ref_logprobs,
        "advantages": policy.advantages,
        "loss_weights": policy.loss_weights,
        "values": step.values,
        "returns": step.returns,
        "logprobs": step.logprobs,
    }
    return {
        name: [None] * len(lengths)
        if rows is None
        else [row[:length] for row, length in zip(rows, lengths, strict=True)]
        for name, rows in padded.items()
    }


def read_step(path: Path) -> ReplayStep:
    """Read a step.

    Raises:
        DataError: The file is damaged, is none of a step, or has another version of the format.
    """
    expected = "expected a replay file, such as replays/step_000000.parquet"
    if not path.is_file():
        raise DataError(f"{path}: is no file, {expected}")
    try:
        table = pq.read_table(path)
    except (OSError, pa.ArrowInvalid) as e:
        raise DataError(f"{path}: {e}; {expected}") from e
    try:
        metadata = json.loads((table.schema.metadata or {})[_KEY])
        found = metadata["schema_version"]
    except (KeyError, ValueError, TypeError) as e:
        raise DataError(f"{path}: parquet without the metadata {_KEY.decode()}, {expected}") from e
    if found != SCHEMA_VERSION:
        raise DataError(
            f"{path}: got schema version {found}, expected {SCHEMA_VERSION}; replay it with the version of HybridRL that wrote it"
        )
    if not table.schema.equals(_SCHEMA):
        raise DataError(f"{path}: got columns {table.schema.names}, expected {_SCHEMA.names} and their types")
    try:
        return _step(metadata, {name: table.column(name) for name in _SCHEMA.names})
    except (KeyError, ValueError, TypeError) as e:
        raise DataError(f"{path}: {type(e).__name__}: {e}; the file was changed or damaged") from e


def _step(metadata: Mapping[str, Any], columns: Mapping[str, pa.ChunkedArray]) -> ReplayStep:
    rows = {name: columns[name].to_pylist() for name in _OF_PROMPT | _OF_SAMPLE}
    lengths = np.array([len(row) for row in columns["token_ids"]], dtype=np.int32)
    tokens = {name: _padded(columns[name], name, lengths) for name in _PER_TOKEN}
    policy = PolicyBatch(
        sequences=SequenceBatch(tokens["token_ids"], lengths),
        loss_mask=tokens["loss_mask"],
        rollout_logprobs=tokens["rollout_logprobs"],
        old_logprobs=tokens["old_logprobs"],
        ref_logprobs=tokens["ref_logprobs"],
        advantages=tokens["advantages"],
        loss_weights=tokens["loss_weights"],
    )
    greedy = columns["greedy_reward"]
    return ReplayStep(
        step=int(metadata["step"]),
        version=int(metadata["policy_version"]),
        config_text=str(metadata["config"]),
        stop_texts=tuple(metadata["stop_texts"]),
        reward_kl_coef=metadata["reward_kl_coef"],
        samples=tuple(_sample(rows, row, policy, tokens["policy_versions"]) for row in range(len(lengths))),
        rewards=columns["reward"].to_numpy(),
        group_ids=columns["group_id"].to_numpy(),
        greedy_rewards=None if greedy.null_count else greedy.to_numpy(),
        update_numbers=columns["update_number"].to_numpy(),
        policy=policy,
        values=tokens["values"],
        returns=tokens["returns"],
        logprobs=tokens["logprobs"],
        updates=tuple(UpdateValues(**values) for values in metadata["updates"]),
    )


def _padded(column: pa.ChunkedArray, name: str, lengths: NDArray[np.int32]) -> Any:
    """Return [num_samples, max_tokens] numbers; None for a column that the run had nothing for."""
    if column.null_count and name in _OPTIONAL:
        return None
    dtype = _PER_TOKEN[name].to_pandas_dtype()
    rows = [np.asarray(row.values.to_numpy(zero_copy_only=False), dtype=dtype) for row in column]
    for index, (row, length) in enumerate(zip(rows, lengths, strict=True)):
        if len(row) != length:
            raise ValueError(f"row {index} has {len(row)} {name}, expected {length}")
    return pad_rows(rows, int(lengths.max(initial=1)), dtype)


def _sample(rows: Mapping[str, list[Any]], row: int, policy: PolicyBatch, versions: Any) -> Sample:
    length = int(policy.sequences.lengths[row])
    token_ids, loss_mask = policy.sequences.token_ids[row, :length], policy.loss_mask[row, :length]
    num_prompt_tokens = int(loss_mask.argmax()) if loss_mask.any() else length
    return Sample(
        prompt=Prompt(
            token_ids=tuple(token_ids[:num_prompt_tokens].tolist()), **{name: rows[name][row] for name in _OF_PROMPT}
        ),
        sample_index=rows["sample_index"][row],
        token_ids=token_ids,
        loss_mask=loss_mask,
        rollout_logprobs=policy.rollout_logprobs[row, :length],
        policy_versions=versions[row, :length],
        finish_reason=FinishReason(rows["finish_reason"][row]),
        num_turns=rows["num_turns"][row],
        text=rows["response"][row],
    )
