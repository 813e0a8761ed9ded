"""The section [rankzero] of Airflow's configuration."""

import pytest

from rankzero import InvalidJobError


def test_options_have_defaults_and_are_read_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    from airflow_rankzero import provider_info

    assert (provider_info.store(), provider_info.template("directory_url")) == (None, None)
    monkeypatch.setenv("AIRFLOW__RANKZERO__STORE", "s3://bucket/runs")
    assert provider_info.store() == "s3://bucket/runs"


@pytest.mark.parametrize(
    ("option", "value", "words"),
    [
        ("directory_url", "https://files/{bucket}", "only {path} and {name} can stand in it"),
        ("directory_url", "https://files/{path.bucket}", "only {path} and {name} can stand in it"),
        ("directory_url", "https://files/{", "only {path} and {name} can stand in it"),
    ],
)
def test_wrong_values_are_named(monkeypatch: pytest.MonkeyPatch, option: str, value: str, words: str) -> None:
    from airflow_rankzero import provider_info

    monkeypatch.setenv(f"AIRFLOW__RANKZERO__{option.upper()}", value)
    with pytest.raises(InvalidJobError) as caught:
        provider_info.template(option)
    assert words in str(caught.value)
