"""The schema as a table."""

from __future__ import annotations

from hybridrl.config.keys import experiment_schema


def test_every_key_says_what_it_means() -> None:
    keys = experiment_schema().keys
    assert all(key.setting.doc for key in keys.values())


def test_every_key_of_the_schema_has_a_default_within_its_own_bounds() -> None:
    from hybridrl.config.schema import ExperimentConfig
    from hybridrl.preflight.modes import value_of

    default = ExperimentConfig()
    for key in experiment_schema().keys.values():
        value = value_of(default, key.name)
        if isinstance(value, int | float) and not isinstance(value, bool):
            assert key.setting.admits(value), key
