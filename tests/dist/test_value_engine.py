"""Critics and reward models on Megatron: the values of transformers, the gradient of one rank, and back to the same files."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import cache

import numpy as np
import pytest
import torch
import transformers
from safetensors.torch import load_file

from hybridrl.algos.loss.value import value_loss
from hybridrl.config.schema import ParallelConfig
from hybridrl.data.batch import SequenceBatch, ValueBatch
from hybridrl.layout.parallel import parallel_sizes
from tests.dist import layout_matrix, value_ranks
from tests.dist.gloo import run_ranks
from tests.dist.value_ranks import CLIP_VALUE, Critic
from tests.family_models import FAMILIES

NUM_ROWS, WIDTH, WORLD_SIZE = 6, 16, 4
LAYOUTS = {
    "qwen3": [
        ParallelConfig(),
        ParallelConfig(tp_size=2, pp_size=2),
        ParallelConfig(tp_size=2, sequence_parallel=False),
        ParallelConfig(cp_size=2),
    ],
    "qwen3_moe": [
        ParallelConfig(),
        ParallelConfig(tp_size=2, pp_size=2, ep_size=2),
        ParallelConfig(cp_size=2, dp_size=2),
    ],
}
CASES = [(family, number) for family, layouts in LAYOUTS.items() for number in range(len(layouts))]


def make_model(family: str, auto_class, num_labels: int = 1) -> transformers.PreTrainedModel:
    torch.manual_seed(3)
    fields = {key: value for key, value in FAMILIES[family].items() if key != "model_type"} | {"num_hidden_layers": 2}
    labels = {"num_labels": num_labels} if auto_class is not transformers.AutoModelForCausalLM else {}
    config = transformers.AutoConfig.for_model(family, **fields, **labels, dtype=torch.float32)
    model = auto_class.from_config(config, attn_implementation="eager")
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.2)
    return model.float().eval()


def ragged_batch() -> ValueBatch:
    rng = np.random.default_rng(0)
    lengths = rng.integers(3, 14, NUM_ROWS).astype(np.int32)
    real = np.arange(WIDTH) < lengths[:, None]
    mask = real & (rng.random(real.shape) < 0.8)
    token_ids = (rng.integers(0, 128, real.shape) * real).astype(np.int32)
    old, returns, weights = (rng.uniform(low, high, real.shape) * mask for low, high in ((-2, 2), (-2, 2), (0.1, 1)))
    return ValueBatch(
        SequenceBatch(token_ids, lengths),
        mask,
        old.astype(np.float32),
        returns.astype(np.float32),
        weights.astype(np.float32),
    )


BATCH = ragged_batch()


@pytest.fixture(scope="module")
def critics(tmp_path_factory):
    """Per family, the model of transformers, its folder, and what the ranks of each layout found."""

    @cache
    def critic(family: str):
        model = make_model(family, transformers.AutoModelForTokenClassification)
        root = tmp_path_factory.mktemp(family)
        model.save_pretrained(root / "hf")
        cases = [Critic(root / "hf", root / str(number), layout) for number, layout in enumerate(LAYOUTS[family])]
        outcomes = run_ranks(
            layout_matrix.run_each,
            WORLD_SIZE,
            [(case, BATCH) for case in cases],
            WORLD_SIZE,
            value_ranks.score_save_and_update,
        )
        return model, cases, [[outcome[number] for outcome in outcomes] for number in range(len(cases))]

    return critic


def transformers_values(model) -> torch.Tensor:
    """Return the values of all rows, [num_samples, max_tokens], differentiable; rubbish beyond a row's length."""
    return model(torch.from_numpy(BATCH.sequences.token_ids).long()).logits[..., 0]


def reported(outcomes, family, number, name):
    """Join the rows of all data-parallel ranks, of which just one rank reports each."""
    found = [outcome for outcome in outcomes if outcome is not None and getattr(outcome, name) is not None]
    assert len(found) == parallel_sizes(LAYOUTS[family][number]).dp
    joined = [
        (row, value) for outcome in found for row, value in zip(outcome.rows, getattr(outcome, name), strict=True)
    ]
    return np.stack([value for _, value in sorted(joined, key=lambda item: item[0])])


@pytest.mark.parametrize(("family", "number"), CASES)
def test_values_are_the_logits_of_transformers_token_classification(family, number, critics):
    model, _, outcomes = critics(family)
    lengths = BATCH.sequences.lengths
    real = np.arange(WIDTH) < lengths[:, None]
    with torch.no_grad():
        want = transformers_values(model).numpy() * real
    assert np.abs(want).max() > 1
    np.testing.assert_allclose(reported(outcomes[number], family, number, "values"), want, rtol=0, atol=1e-4)
    last = want[np.arange(NUM_ROWS), lengths - 1]
    np.testing.assert_allclose(reported(outcomes[number], family, number, "rewards"), last, rtol=0, atol=1e-4)


@pytest.mark.parametrize("family", LAYOUTS)
def test_one_rank_reports_the_loss_and_gradient_norm_of_autograd(family, critics):
    model, _, outcomes = critics(family)
    values = transformers_values(model)
    old, returns, weights = (torch.from_numpy(a) for a in (BATCH.old_values, BATCH.returns, BATCH.loss_weights))
    loss = (weights * value_loss(values, old, returns, CLIP_VALUE)).sum()
    gradients = torch.autograd.grad(loss, list(model.parameters()))
    mask = torch.from_numpy(BATCH.loss_mask)
    metrics = outcomes[0][0].metrics
    assert metrics.loss == pytest.approx(loss.item(), rel=1e-5)
    assert metrics.grad_norm == pytest.approx(float(torch.cat([g.flatten() for g in gradients]).norm()), rel=1e-4)
    assert metrics.num_tokens == int(mask.sum())
    assert metrics.value_mean == pytest.approx(values[mask].mean().item(), rel=1e-4)
    assert metrics.clip_fraction == pytest.approx(((values - old).abs() > CLIP_VALUE)[mask].float().mean().item())
    explained = 1 - (values - returns)[mask].square().mean() / returns[mask].var(correction=0)
    assert metrics.explained_variance == pytest.approx(explained.item(), rel=1e-4)


def whole(outcomes) -> dict[str, torch.Tensor]:
    """Put the ranks' slices together; where several ranks hold the same, they must agree."""
    slices = [item for outcome in outcomes if outcome is not None for item in outcome.gradients]
    shapes: dict[str, list[int]] = {}
    for name, box, _ in slices:
        shapes[name] = [max(a, b.stop) for a, b in zip(shapes.get(name, [0] * len(box)), box, strict=True)]
    tensors = {name: torch.full(shape, torch.nan) for name, shape in shapes.items()}
    for name, box, piece in slices:
        there = tensors[name][box]
        assert torch.isnan(there).all() or torch.equal(there, piece), name
        tensors[name][box] = piece
    return tensors


@pytest.mark.parametrize(("family", "number"), [case for case in CASES if case[1]])
def test_the_gradient_of_an_update_is_that_of_one_rank(family, number, critics):
    outcomes = critics(family)[2]
    want, got = whole(outcomes[0]), whole(outcomes[number])
    assert want.keys() == got.keys() and want["score.weight"].norm() > 0.1 and want["score.bias"].norm() > 0.1
    for name, tensor in want.items():
        assert (got[name] - tensor).norm() <= 2e-5 * tensor.norm(), name
    one, other = (next(o.metrics for o in outcomes[n] if o is not None and o.metrics) for n in (0, number))
    for name in ("loss", "grad_norm", "value_mean", "return_mean", "explained_variance"):
        assert getattr(other, name) == pytest.approx(getattr(one, name), rel=1e-5), name
    assert (other.num_tokens, other.clip_fraction) == (one.num_tokens, one.clip_fraction)


@pytest.mark.parametrize(("family", "number"), CASES)
def test_an_export_is_the_import_bit_for_bit(family, number, critics):
    case = critics(family)[1][number]
    original, exported = (load_file(folder / "model.safetensors") for folder in (case.folder, case.target))
    assert original.keys() == exported.keys()
    assert all(torch.equal(original[name], exported[name]) for name in original)


def test_a_critic_from_a_policy_starts_with_a_new_head_that_all_ranks_share(tmp_path):
    policy = make_model("qwen3", transformers.AutoModelForCausalLM)
    policy.save_pretrained(tmp_path / "hf")
    critic = Critic(tmp_path / "hf", tmp_path / "critic", ParallelConfig(tp_size=2))
    results = run_ranks(value_ranks.start_from_policy, 2, critic)
    assert results[1][1] == []
    (message,) = results[0][1]
    assert message == f"{critic.folder} has no score.weight: the value head starts from random weights"
    heads = [tensors["0.output_layer.weight"] for tensors, _ in results]
    hidden = policy.config.hidden_size
    assert torch.equal(*heads) and heads[0].std().item() == pytest.approx(hidden**-0.5, rel=0.3)
    loaded, info = transformers.AutoModelForTokenClassification.from_pretrained(critic.target, output_loading_info=True)
    assert not any(info[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    assert torch.equal(loaded.score.weight, heads[0]) and loaded.score.bias.tolist() == [0.0]
    assert json.loads((critic.target / "config.json").read_text())["architectures"] == ["Qwen3ForTokenClassification"]
    assert torch.equal(loaded.model.embed_tokens.weight, policy.model.embed_tokens.weight)


def test_a_reward_model_of_sequence_classification_has_no_bias(tmp_path):
    model = make_model("llama", transformers.AutoModelForSequenceClassification)
    model.save_pretrained(tmp_path / "hf")
    critic = Critic(tmp_path / "hf", tmp_path / "export")
    ((outcome,),) = run_ranks(layout_matrix.run_each, 1, [(critic, BATCH)], 1, value_ranks.score_save_and_update)
    model.config.pad_token_id = None  # it would look for the last token that is none
    for row, length in enumerate(BATCH.sequences.lengths):
        tokens = torch.from_numpy(BATCH.sequences.token_ids[row : row + 1, :length]).long()
        with torch.no_grad():
            assert outcome.rewards[row] == pytest.approx(model(tokens).logits.item(), abs=1e-4)
    original, exported = (load_file(folder / "model.safetensors") for folder in (critic.folder, critic.target))
    assert original.keys() == exported.keys() and "score.bias" not in exported


def test_what_a_critic_cannot_do_is_refused_with_its_reason(tmp_path):
    make_model("qwen3", transformers.AutoModelForTokenClassification).save_pretrained(tmp_path / "one")
    make_model("qwen3", transformers.AutoModelForTokenClassification, 2).save_pretrained(tmp_path / "two")
    batch = replace(BATCH, loss_mask=BATCH.loss_weights != 0)
    (messages,) = run_ranks(value_ranks.refusals, 1, Critic(tmp_path / "one", tmp_path), tmp_path / "two", batch)
    logprobs, supervised, weights, labels, policy = messages
    assert logprobs == supervised == "qwen3: the model has a value head and gives no log-probs"
    assert "is not 0, but loss_mask leaves it out" in weights
    assert "got 2 labels, expected a value head with 1 label" in labels
    assert "got no value head" in policy
