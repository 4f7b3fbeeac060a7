import dataclasses

import numpy as np
import pyarrow.parquet as pq
import pytest

from hybridrl.observability.rollout_file import ROLLOUT_SCHEMA, write_rollouts
from tests.unit.observability.rollouts import make_rollout


def test_rollouts_of_unequal_length_come_back_exactly(tmp_path):
    rollouts = [make_rollout(index, num_tokens=4 + index) for index in range(3)]
    path = tmp_path / "rollouts" / "step_000005.parquet"

    write_rollouts(path, 5, rollouts)

    table = pq.read_table(path)
    assert table.schema.equals(ROLLOUT_SCHEMA)
    for row, rollout in zip(table.to_pylist(), rollouts, strict=True):
        assert row.pop("step") == 5
        for name, value in row.items():
            expected = getattr(rollout, name)
            if isinstance(expected, np.ndarray):
                assert np.array_equal(np.array(value, expected.dtype), expected), name
            else:
                assert value == expected, name


def test_every_field_of_a_rollout_has_a_column():
    fields = {field.name for field in dataclasses.fields(make_rollout())}

    assert set(ROLLOUT_SCHEMA.names) == fields | {"step"}


def test_arrays_of_different_length_are_refused_by_name(tmp_path):
    broken = dataclasses.replace(make_rollout(), advantages=np.zeros(3, np.float32))

    with pytest.raises(ValueError, match=r"step 2: advantages has \[3\] entries per sample, expected \[6\]"):
        write_rollouts(tmp_path / "step.parquet", 2, [broken])

    assert list(tmp_path.iterdir()) == []
