"""Which names of a Spark configuration count as secret."""

import pytest

from rankzero.masking import secrets_of


@pytest.mark.parametrize(
    "name",
    [
        "spark.ssl.keyPassword",
        "spark.hadoop.fs.s3a.secret.key",
        "spark.hadoop.fs.s3a.access.key",
        "spark.hadoop.fs.azure.account.key.store.dfs.core.windows.net",
        "spark.hadoop.fs.s3a.session.token",
        "spark.openlineage.transport.auth.apiKey",
        "spark.authenticate.secret",
        "spark.hadoop.javax.jdo.option.ConnectionPassword",
    ],
)
def test_secret_by_name(name: str) -> None:
    assert secrets_of({name: "geheim"}) == ["geheim"]


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("spark.executor.memory", "8g"),
        ("spark.io.encryption.keySizeBits", "256"),
        ("spark.security.credentials.hive.enabled", "false"),
        ("spark.authenticate.secretBitLength", "256"),
        ("spark.ssl.keyStore", "/etc/keys.jks"),
        ("spark.yarn.keytab", "/etc/rankzero.keytab"),
    ],
)
def test_what_logs_need_stays_readable(name: str, value: str) -> None:
    assert secrets_of({name: value}) == []
