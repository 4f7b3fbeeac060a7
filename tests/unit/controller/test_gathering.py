"""Groups of a batch: replaced while they teach nothing, never lost when they do."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import given, settings
from hypothesis import strategies as st

from hybridrl.controller.gathering import Gathering
from tests.unit.controller.fakes import make_prompt, make_rewards, make_sample


def _add(gathering: Gathering, groups: dict[str, list[float | None]]) -> None:
    samples = [make_sample(make_prompt(name), i, 0) for name, rewards in groups.items() for i in range(len(rewards))]
    gathering.add(samples, make_rewards([reward for rewards in groups.values() for reward in rewards]))


def _prompts(gathering: Gathering) -> list[str]:
    return list(dict.fromkeys(sample.prompt.prompt_id for sample in gathering.batch().samples))


def test_one_round_takes_every_group_in_its_order() -> None:
    gathering = Gathering(3, max_rounds=1)
    _add(gathering, {"a": [1, 1], "b": [0, 1], "c": [0, 0]})
    assert gathering.num_wanted == 0
    assert _prompts(gathering) == ["a", "b", "c"]
    assert gathering.metrics() == {"samples/dropped": 0, "groups/replaced": 0, "rollout/rounds": 1}


def test_groups_of_equal_rewards_are_replaced_until_the_batch_is_full() -> None:
    gathering = Gathering(3, max_rounds=5)
    _add(gathering, {"a": [1, 1], "b": [0, 1], "c": [0, 0]})
    assert gathering.num_wanted == 2
    _add(gathering, {"d": [0, 1], "e": [1, 1]})
    assert gathering.num_wanted == 1
    _add(gathering, {"f": [1, 0]})
    assert gathering.num_wanted == 0
    assert _prompts(gathering) == ["b", "d", "f"]
    assert gathering.batch().rewards.tolist() == [0, 1, 0, 1, 1, 0]
    assert gathering.metrics() == {"samples/dropped": 0, "groups/replaced": 3, "rollout/rounds": 3}


def test_after_the_last_round_the_earliest_groups_fill_the_batch() -> None:
    gathering = Gathering(3, max_rounds=2)
    _add(gathering, {"a": [1, 1], "b": [0, 1], "c": [0, 0]})
    _add(gathering, {"d": [0, 0], "e": [1, 1]})
    assert gathering.num_wanted == 0
    assert _prompts(gathering) == ["b", "a", "c"]
    assert gathering.metrics() == {"samples/dropped": 0, "groups/replaced": 2, "rollout/rounds": 2}


def test_samples_without_a_score_are_dropped_and_counted_and_do_not_make_a_group_teach() -> None:
    gathering = Gathering(2, max_rounds=2)
    _add(gathering, {"a": [1, None, 0], "b": [1, None, 1]})
    assert gathering.num_wanted == 1
    _add(gathering, {"c": [None, None, None]})
    assert _prompts(gathering) == ["a", "b"]
    assert [sample.sample_index for sample in gathering.batch().samples] == [0, 2, 0, 2]
    assert gathering.metrics() == {"samples/dropped": 5, "groups/replaced": 1, "rollout/rounds": 2}


def test_nothing_scored_is_an_empty_batch() -> None:
    gathering = Gathering(1, max_rounds=1)
    _add(gathering, {"a": [None, None]})
    assert not gathering.batch().samples


@settings(deadline=None)
@given(st.integers(1, 5), st.integers(2, 4), st.randoms(use_true_random=False))
def test_every_group_that_teaches_is_trained_on_and_the_batch_has_its_size(num_groups, max_rounds, random) -> None:
    gathering, teaching, asked = Gathering(num_groups, max_rounds), [], 0
    wanted = num_groups
    while wanted:
        groups = {f"p{asked + i}": [random.choice([0, 1]) for _ in range(2)] for i in range(wanted)}
        asked += wanted
        teaching += [name for name, rewards in groups.items() if len(set(rewards)) > 1]
        _add(gathering, groups)
        wanted = gathering.num_wanted
    trained = _prompts(gathering)
    assert len(trained) == num_groups and trained[: len(teaching)] == teaching
    assert gathering.metrics()["groups/replaced"] == asked - num_groups


def _add_with_greedy(gathering: Gathering, groups: dict[str, list[float | None]]) -> None:
    """Add groups whose last sample is the greedy one."""
    samples = [
        replace(make_sample(make_prompt(name), i, 0), is_greedy=i == len(rewards) - 1)
        for name, rewards in groups.items()
        for i in range(len(rewards))
    ]
    gathering.add(samples, make_rewards([reward for rewards in groups.values() for reward in rewards]))


def test_the_reward_of_a_greedy_sample_goes_to_the_others_of_its_group() -> None:
    gathering = Gathering(2, max_rounds=1)
    _add_with_greedy(gathering, {"a": [1, None, 0.5], "b": [0, 1, 0.25]})
    batch = gathering.batch()
    assert batch.rewards.tolist() == [1, 0, 1]
    assert batch.greedy_rewards is not None and batch.greedy_rewards.tolist() == [0.5, 0.25, 0.25]
    assert gathering.metrics()["samples/dropped"] == 1


def test_a_group_whose_greedy_sample_has_no_reward_is_dropped_and_counted() -> None:
    gathering = Gathering(2, max_rounds=1)
    _add_with_greedy(gathering, {"a": [1, 0, None], "b": [0, 1, 0.25]})
    assert _prompts(gathering) == ["b"]
    assert gathering.metrics()["samples/dropped"] == 2


def test_equal_rewards_teach_when_the_greedy_one_differs() -> None:
    gathering = Gathering(2, max_rounds=2)
    _add_with_greedy(gathering, {"a": [1, 1, 0], "b": [1, 1, 1]})
    assert gathering.num_wanted == 1 and _prompts(gathering)[0] == "a"
