"""Arguments as people see them."""

from __future__ import annotations

from typing import Any

from rankzero.submit.training import MAX_PARAMS, MAX_TEXT, Program, params_of


def train(lr: float, *layers: int, model: dict[str, Any] | None = None, **more: Any) -> None: ...


def test_a_functions_arguments_by_name_with_defaults() -> None:
    found = params_of(train, (0.1, 8, 16), {"model": {"depth": 2, "head": {"kind": "mlp"}}, "seed": 1}, {})
    assert found == {"lr": 0.1, "layers.0": 8, "layers.1": 16, "model.depth": 2, "model.head": "dict", "seed": 1}
    assert params_of(train, (0.1,), {}, {}) == {"lr": 0.1, "model": None}
    assert params_of(train, (), {"lr": object(), "sizes": [1, 2]}, {}) == {
        "lr": "object",
        "model": None,
        "sizes": "[1, 2]",
    }
    assert params_of(print, ("a",), {}, {})["args.0"] == "a"


def test_short_numbers_are_no_secrets() -> None:
    counts = {"max_tokens": -1, "token_dim": 768, "num_tokens": 10**6, "token_dropout": 1e-05, "pad_token_id": 0}
    assert params_of(train, (1,), counts, {}) == {"lr": 1, "model": None, **counts}
    secrets = {"token": 84930218, "max_token": "geheim", "id_password": 84930218}
    assert params_of(train, (1,), secrets, {}) == {"lr": 1, "model": None, **dict.fromkeys(secrets, "***")}
    line = ("--max_tokens", "4096", "--url", "http://h/?token=geheim&max_tokens=4096")
    assert params_of(Program("script", __file__), line, {}, {}) == {
        "max_tokens": "4096", "url": "http://h/?token=***&max_tokens=4096",
    }  # fmt: skip


def test_no_password_of_an_address_and_no_secret_of_another_argument_is_shown() -> None:
    given = {
        "db": "jdbc:postgresql://db/x?user=me&password=geheim-1",
        "token": "geheim-2",
        "hook": "http://h/geheim-2/x",
    }
    found = params_of(train, ("s3://me:geheim@3@host/runs",), given, {})
    assert found == {
        "lr": "s3://me:***@host/runs", "model": None, "db": "jdbc:postgresql://db/x?user=me&password=***",
        "token": "***", "hook": "http://h/***/x",
    }  # fmt: skip


def test_a_command_line() -> None:
    line = ("--lr", 0.1, "--size=3", "--fast", "--out", "there", "more")
    assert params_of(Program("script", __file__), line, {}, {}) == {
        "lr": "0.1", "size": "3", "fast": True, "out": "there", "args.0": "more",
    }  # fmt: skip


def test_secrets_are_masked_and_what_is_large_is_cut() -> None:
    given = {"api_key": "geheim-1", "url": "http://geheim-2@host", "text": "x" * 9999}
    found = params_of(train, (1,), {**given, **{f"p{n}": n for n in range(999)}}, {"MY_TOKEN": "geheim-2"})
    assert found["api_key"] == "***"
    assert found["url"] == "http://***@host"
    assert len(found["text"]) == MAX_TEXT
    assert len(found) == MAX_PARAMS


def test_integers_of_more_digits_than_python_writes_are_named() -> None:
    huge = 10**5000
    assert params_of(max, (huge, [1, huge]), {}, {}) == {
        "#1": "an integer of 16610 bits",
        "#2": "[1, 'an integer of 16610 bits']",
    }


def test_a_command_line_as_hydra_has_it_and_urls_show_no_secrets() -> None:
    line = (
        "db.password=geheim",
        "+model.lr=0.1",
        "day=1/part-0",
        "-Dfs.secret.key=geheim",
        "--",
        "http://ann:geheim@h/x",
    )
    assert params_of(Program("script", __file__), line, {}, {}) == {
        "db.password": "***", "model.lr": "0.1", "day": "1/part-0", "Dfs.secret.key": "***",
        "args.0": "--", "args.1": "http://ann:***@h/x",
    }  # fmt: skip
    urls = {
        "jdbc:postgresql://h/db?user=ann&password=geheim&ssl=true": "jdbc:postgresql://h/db?user=ann&password=***&ssl=true",
        "jdbc:sqlserver://h:1433;user=ann;password=geheim": "jdbc:sqlserver://h:1433;user=ann;password=***",
        "https://a.blob.core.windows.net/c?sv=1&sig=geheim": "https://a.blob.core.windows.net/c?sv=1&sig=***",
        "http://h:8080/a@b?design=1": "http://h:8080/a@b?design=1",
    }
    for given, shown in urls.items():
        assert params_of(train, (1,), {"url": given, "urls": [given]}, {})["url"] == shown
        assert params_of(train, (1,), {"urls": [given]}, {})["urls"] == str([shown])
