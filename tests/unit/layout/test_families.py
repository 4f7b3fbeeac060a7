"""Family declarations and their refusals."""

import json

import pytest

from hybridrl.errors import LayoutError
from hybridrl.layout.families import model_spec, read_model_spec
from tests.unit.layout.models import QWEN3_DENSE, QWEN3_MOE


def test_unsupported_family_lists_the_supported_ones():
    with pytest.raises(LayoutError, match=r"model_type 'gpt2' is not supported; supported are .*qwen3, qwen3_moe"):
        model_spec({"model_type": "gpt2"})


def test_missing_field_is_named():
    with pytest.raises(LayoutError, match=r"config.json: field 'num_experts' is missing"):
        model_spec({key: value for key, value in QWEN3_MOE.items() if key != "num_experts"})


def test_wrong_type_is_named():
    with pytest.raises(LayoutError, match=r"field 'hidden_size' is '32', expected an integer"):
        model_spec(QWEN3_DENSE | {"hidden_size": "32"})


def test_unsupported_variant_is_refused():
    with pytest.raises(LayoutError, match=r"rope_type is 'yarn', but only 'default' is supported"):
        model_spec(QWEN3_DENSE | {"rope_parameters": {"rope_type": "yarn", "rope_theta": 1.0}})


def test_rope_theta_is_read_from_either_place():
    nested = {key: value for key, value in QWEN3_DENSE.items() if key != "rope_theta"}
    assert model_spec(nested | {"rope_parameters": {"rope_type": "default", "rope_theta": 7.0}}).rope_theta == 7.0
    assert model_spec(QWEN3_DENSE).rope_theta == 10000.0


def test_folder_without_config_is_named(tmp_path):
    with pytest.raises(LayoutError, match=r"config.json: no such file"):
        read_model_spec(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(LayoutError, match=r"config.json: not valid JSON"):
        read_model_spec(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(QWEN3_MOE))
    assert read_model_spec(tmp_path).family == "qwen3_moe"
