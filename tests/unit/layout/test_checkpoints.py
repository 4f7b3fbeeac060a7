"""Declared tensors against checkpoints that transformers really writes."""

import json

import pytest

from hybridrl.errors import LayoutError
from hybridrl.layout.checkpoint import checkpoint_shard_map, read_checkpoint_index
from hybridrl.layout.families import model_spec, read_model_spec
from tests.unit.layout.models import FAMILIES, MTP_FAMILIES

transformers = pytest.importorskip("transformers")

SMALL = {"num_hidden_layers": 2}


@pytest.fixture(scope="module", params=FAMILIES)
def saved(request, tmp_path_factory):
    config = FAMILIES[request.param] | SMALL
    folder = tmp_path_factory.mktemp(request.param)
    hf_config = transformers.AutoConfig.for_model(
        config["model_type"], **{k: v for k, v in config.items() if k != "model_type"}
    )
    transformers.AutoModelForCausalLM.from_config(hf_config).save_pretrained(folder)
    return folder


def test_declared_tensors_are_those_of_a_saved_checkpoint(saved):
    spec, index = read_model_spec(saved), read_checkpoint_index(saved)
    declared = {name: tensor.file_shape for name, tensor in spec.tensors().items()}
    assert declared == {name: entry.tensor.shape for name, entry in index.items()}


def test_a_saved_checkpoint_has_a_shard_map(saved):
    spec = read_model_spec(saved)
    shard_map = checkpoint_shard_map(read_checkpoint_index(saved), spec, str(saved))
    assert dict(shard_map.canonical) == spec.tensors()
    assert all(shard.box.shape == spec.tensors()[shard.tensor].shape for shard in shard_map.shards)


def test_a_wrong_shape_is_told_in_the_shape_of_the_file(tmp_path):
    config = transformers.AutoConfig.for_model(
        "gpt_oss", **{k: v for k, v in (FAMILIES["gpt_oss"] | SMALL).items() if k != "model_type"}
    )
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    wrong = json.loads((tmp_path / "config.json").read_text()) | {"intermediate_size": 40}
    with pytest.raises(LayoutError, match=r"gate_up_proj: shape \(8, 32, 96\), expected \(8, 32, 80\)"):
        checkpoint_shard_map(read_checkpoint_index(tmp_path), model_spec(wrong), "here")


@pytest.mark.parametrize("family", MTP_FAMILIES)
def test_prediction_layers_are_declared_on_request(family):
    without, spec = model_spec(MTP_FAMILIES[family]), model_spec(MTP_FAMILIES[family], has_mtp=True)
    extra = spec.tensors().keys() - without.tensors().keys()
    assert {"model.layers.4.eh_proj.weight", "model.layers.4.enorm.weight", "model.layers.4.hnorm.weight"} <= extra
    assert "model.layers.4.shared_head.norm.weight" in extra
    assert all(name.startswith("model.layers.4.") for name in extra)
    assert spec.tensors()["model.layers.4.eh_proj.weight"].shape == (32, 64)
