"""Arguments as people see them."""

from __future__ import annotations

from typing import Any

import pytest

from rankzero.submit.training import MAX_TEXT, Program, params_of


def train(lr: float, *layers: int, model: dict[str, Any] | None = None, **more: Any) -> None: ...


NONE = {"layers": "tuple", "model": None}


def of_line(*words: object) -> object:
    return params_of(Program("script", __file__), words, {}, {})["args"]


def test_a_function_s_arguments_by_name() -> None:
    found = params_of(train, (0.1, 8, 16), {"model": {"depth": 2, "token": "geheim"}, "seed": object()}, {})
    assert found == {"lr": 0.1, "layers": "tuple", "model": "dict", "seed": "object"}


def test_short_numbers_are_no_secrets() -> None:
    counts = {"max_tokens": -1, "token_dim": 768, "num_tokens": 10**6, "token_dropout": 1e-05, "pad_token_id": 0}
    assert params_of(train, (1,), counts, {}) == {**NONE, "lr": 1, **counts}
    secrets = {"token": 84930218, "max_token": "geheim", "id_password": 84930218}
    assert params_of(train, (1,), secrets, {}) == {**NONE, "lr": 1, **dict.fromkeys(secrets, "***")}


def test_no_password_of_an_address_and_no_secret_of_another_argument_is_shown() -> None:
    given = {
        "db": "jdbc:postgresql://db/x?user=me&password=geheim-1",
        "model": {"token": "geheim-2"},
        "hook": "http://h/geheim-2/x",
    }
    assert params_of(train, ("s3://me:geheim@3@host/runs",), given, {}) == {
        **NONE,
        "lr": "s3://me:***@host/runs",
        "db": "jdbc:postgresql://db/x?user=me&password=***",
        "model": "dict",
        "hook": "http://h/***/x",
    }


def test_secrets_are_masked_and_what_is_large_is_cut() -> None:
    given = {"api_key": "geheim-1", "url": "http://geheim-2@host", "text": "x" * 9999, "huge": 10**5000}
    found = params_of(train, (1,), given, {"MY_TOKEN": "geheim-2"})
    assert found == {**NONE, "lr": 1, "api_key": "***", "url": "http://***@host", "text": "x" * MAX_TEXT, "huge": "int"}


@pytest.mark.parametrize(
    ("words", "shown"),
    [
        (("--lr", 0.1, "--max_tokens", "4096"), "--lr 0.1 --max_tokens 4096"),
        (("--token", "geheim", "--auth-token=geheim-2"), "--token *** --auth-token=***"),
        (("--token", "geheim", "http://h/geheim"), "--token *** http://h/***"),
        (("--account-key", "Zm9v/YmFy==", "http://h/Zm9v/YmFy=="), "--account-key *** http://h/***"),
        (("--private-key", "-----BEGIN KEY-----\nYmFy="), "--private-key ***"),
        (("--use-auth-token", "--learning-rate", 0.1), "--use-auth-token --learning-rate 0.1"),
        (("--token=x==", "--pw", "db.password=geheim"), "--token=*** --pw db.password=***"),
        (("+lr=0.1", "day=1/part-0", "-Dfs.secret.key=geheim"), "+lr=0.1 day=1/part-0 -Dfs.secret.key=***"),
        (("--", "http://ann:geheim@h/x?token=geheim&n=1"), "-- http://ann:***@h/x?token=***"),
    ],
)  # fmt: skip
def test_a_command_line_shows_no_secrets(words: tuple[object, ...], shown: str) -> None:
    assert of_line(*words) == shown


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("jdbc:postgresql://h/db?user=ann&password=geheim&s=1", "jdbc:postgresql://h/db?user=ann&password=***&s=1"),
        ("jdbc:sqlserver://h:1433;user=ann;password=geheim", "jdbc:sqlserver://h:1433;user=ann;password=***"),
        ("https://a.blob.core.windows.net/c?sv=1&sig=geheim", "https://a.blob.core.windows.net/c?sv=1&sig=***"),
        ("http://h:8080/a@b?design=1", "http://h:8080/a@b?design=1"),
    ],
)
def test_urls_show_no_secrets(url: str, shown: str) -> None:
    assert params_of(train, (1,), {"url": url}, {}) == {**NONE, "lr": 1, "url": shown}
