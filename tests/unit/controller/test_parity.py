"""What a parity check refuses before it loads anything."""

from __future__ import annotations

import pytest

from hybridrl.controller.parity import check_memory
from hybridrl.errors import ConfigError
from hybridrl.layout.families import model_spec
from tests.unit.preflight.experiments import DENSE


def test_a_model_too_large_for_float32_is_refused_with_both_sizes() -> None:
    # Embedding and output 64 x 32 each; a layer has 32 x (32 + 16 + 16 + 32) of attention, 3 x 32 x 24 of MLP, norms 2 x 32 + 2 x 8.
    num_parameters = 2 * 64 * 32 + 4 * (32 * 96 + 72 * 32 + 64 + 16) + 32
    spec = model_spec(DENSE)
    check_memory(spec, free_bytes=4 * num_parameters)
    with pytest.raises(ConfigError) as caught:
        check_memory(spec, free_bytes=4 * num_parameters - 1)
    assert f"model.path: got a model of {num_parameters:,} parameters, 0.0 GiB in float32" in str(caught.value)
    assert "a model of the same family with fewer layers" in str(caught.value)
