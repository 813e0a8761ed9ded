"""The section [rankzero] of Airflow's configuration."""

import pytest

from rankzero import InvalidJobError


def test_options_have_defaults_and_are_read_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    from airflow_rankzero import config

    assert (config.store(), config.retention_days(), config.directory_url()) == (None, 30, None)
    monkeypatch.setenv("AIRFLOW__RANKZERO__STORE", "s3://bucket/runs")
    monkeypatch.setenv("AIRFLOW__RANKZERO__RETENTION_DAYS", "7")
    assert (config.store(), config.retention_days()) == ("s3://bucket/runs", 7)
    monkeypatch.setenv("AIRFLOW__RANKZERO__RETENTION_DAYS", "0")
    assert config.retention_days() is None


@pytest.mark.parametrize(
    ("option", "value", "words"),
    [
        ("retention_days", "a week", "'a week'; it must be a whole number"),
        ("retention_days", "-1", "'-1'; it must be a whole number"),
        ("directory_url", "https://files/{bucket}", "only {path} and {name} can stand in it"),
        ("directory_url", "https://files/{path.bucket}", "only {path} and {name} can stand in it"),
        ("directory_url", "https://files/{", "only {path} and {name} can stand in it"),
    ],
)
def test_wrong_values_are_named(monkeypatch: pytest.MonkeyPatch, option: str, value: str, words: str) -> None:
    from airflow_rankzero import config

    monkeypatch.setenv(f"AIRFLOW__RANKZERO__{option.upper()}", value)
    with pytest.raises(InvalidJobError) as caught:
        getattr(config, option)()
    assert words in str(caught.value)
