"""Fields that do not exist are refused by name, wherever a configuration is written."""

import re
from collections.abc import Callable
from pathlib import Path

import dagster as dg
import pytest
from pydantic import ValidationError
from tests.dagster.dagster_events import value_of

import rankzero.train as rt
from dagster_rankzero import (
    RankZeroIOManager,
    TorchDistributorResource,
    torch_asset,
    torch_distributor_op,
    torch_multi_asset,
)


def train() -> dict[str, object]:
    import os

    return {"size": rt.get_context().world_size, "greeting": os.environ.get("GREETING")}


@pytest.mark.parametrize(
    "configure",
    [
        lambda: TorchDistributorResource(mastr="spark://host:7077", num_proceses=8),
        lambda: torch_asset(options={"mastr": "local[2]", "num_proceses": 2})(train),
        lambda: torch_multi_asset(outs={"a": dg.AssetOut()}, options={"mastr": "x", "num_proceses": 1})(train),
        lambda: torch_distributor_op("train.py", options={"mastr": "local[2]", "num_proceses": 2}),
    ],
)
def test_a_misspelt_field_of_the_resource_is_refused_when_defined(configure: Callable[[], object]) -> None:
    with pytest.raises(dg.DagsterInvalidDefinitionError) as raised:
        configure()
    message = str(raised.value)
    assert "TorchDistributorResource has no field 'mastr' (did you mean 'master'?)" in message
    assert "store" in message


def test_a_misspelt_field_of_the_io_manager_is_refused_when_defined() -> None:
    with pytest.raises(dg.DagsterInvalidDefinitionError, match="no field 'basepath' \\(did you mean 'base_path'"):
        RankZeroIOManager(basepath="s3://bucket/assets")


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"num_processes": 0}, "num_processes is 0; it must be a positive integer"),
        ({"timeout": -1.0}, "timeout is -1.0"),
        ({"backend": "mpi"}, "backend is 'mpi'; choose one of"),
        ({"master": "foo"}, "master is 'foo'; use local"),
    ],
)
def test_a_wrong_value_is_refused_when_definitions_load(options: dict[str, object], words: str) -> None:
    with pytest.raises(dg.DagsterInvalidDefinitionError, match=re.escape(words)):
        torch_asset(options=options)(train)
    with pytest.raises(ValidationError, match=re.escape(words)):
        TorchDistributorResource(**options)


def test_a_token_within_a_wrong_master_is_not_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    words = "master is 'sc//head:15002/;...'; use local"
    monkeypatch.setenv("SPARK_MASTER", "sc//head:15002/;token=geheim1234")

    @dg.asset
    def model(torch_distributor: TorchDistributorResource) -> None: ...

    resource = TorchDistributorResource(master=dg.EnvVar("SPARK_MASTER"))
    result = dg.materialize([model], resources={"torch_distributor": resource}, raise_on_error=False)
    events = str(result.all_events)
    assert words in events
    assert "geheim" not in events
    with pytest.raises(dg.Failure, match=re.escape(words)) as raised:
        TorchDistributorResource().options(master=dg.EnvVar("SPARK_MASTER"))
    assert "geheim" not in f"{raised.value}{raised.value.__cause__}"


def test_the_master_decides_the_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    from rankzero import LocalEngine, SparkConnectEngine, SparkEngine

    assert TorchDistributorResource(master="sc://head:15002")._engine() == SparkConnectEngine("sc://head:15002")
    assert TorchDistributorResource(master="yarn")._engine() == SparkEngine(master="yarn")
    # Without pyspark the embedded engine is this machine.
    assert TorchDistributorResource()._engine() == SparkEngine()
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert TorchDistributorResource()._engine() == LocalEngine()


@pytest.mark.parametrize(
    ("name", "text", "value"),
    [
        ("engine", "local", "local"),
        ("deploy_mode", "cluster", "cluster"),
        ("use_gpu", "true", True),
        ("encrypt", "false", False),
        ("by_reference", "true", True),
        ("num_processes", "3", 3),
    ],
)
def test_a_choice_a_flag_or_a_number_may_be_an_environment_variable(
    monkeypatch: pytest.MonkeyPatch, name: str, text: str, value: object
) -> None:
    monkeypatch.setenv("GIVEN", text)

    @dg.asset
    def read(torch_distributor: TorchDistributorResource) -> str:
        return repr(getattr(torch_distributor, name))

    resource = TorchDistributorResource(**{name: dg.EnvVar("GIVEN")})
    result = dg.materialize([read], resources={"torch_distributor": resource})
    assert value_of(result, "read") == repr(value)
    assert getattr(TorchDistributorResource().options(**{name: dg.EnvVar("GIVEN")}), name) == value


@pytest.mark.parametrize("name", ["engine", "deploy_mode"])
def test_a_choice_that_does_not_exist_is_refused(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    with pytest.raises(ValidationError, match="choose .* or .*, not 'kluster'"):
        TorchDistributorResource(**{name: "kluster"})
    monkeypatch.setenv("GIVEN", "kluster")
    with pytest.raises(dg.Failure, match="choose .* or .*, not 'kluster'"):
        TorchDistributorResource().options(**{name: dg.EnvVar("GIVEN")})


@pytest.mark.parametrize("name", ["env", "spark_conf"])
def test_options_add_to_the_mappings_of_the_resource(name: str) -> None:
    resource = TorchDistributorResource(**{name: {"base": "1", "removed": "2", "changed": "3"}})
    changed = resource.options(**{name: {"changed": "4", "removed": None, "more": "5"}})
    assert getattr(changed, name) == {"base": "1", "changed": "4", "more": "5"}
    # Also where the decorator checks them.
    torch_asset(options={name: {"removed": None}})(train)


def test_numbers_and_flags_of_templates_and_of_the_environment_become_text_in_mappings(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("PARTITIONS", "8")
    variable = dg.EnvVar.int("PARTITIONS")
    # Dagster renders the template of a YAML file whose text has the form of a number as a number.
    given = {"DB_PASSWORD": 84930218, "scale": 0.5, "flag": True, "text": "007"}
    texts = {"DB_PASSWORD": "84930218", "scale": "0.5", "flag": "true", "text": "007"}
    resource = TorchDistributorResource(env=given, spark_conf=given)  # type: ignore[arg-type]
    assert (resource.env, resource.spark_conf) == (texts, texts)
    given["n"] = variable

    @dg.asset
    def read(torch_distributor: TorchDistributorResource) -> str:
        more = {"more": 5, "most": variable}
        changed = torch_distributor.options(env=more, spark_conf=more)
        return repr((changed.env, changed.spark_conf))

    resource = TorchDistributorResource(env=given, spark_conf=given)  # type: ignore[arg-type]
    result = dg.materialize([read], resources={"torch_distributor": resource})
    assert value_of(result, "read") == repr(({**texts, "n": "8", "more": "5", "most": "8"},) * 2)
    torch_asset(options={"env": given, "spark_conf": given})(train)


def test_a_value_that_has_no_text_is_refused_without_being_shown() -> None:
    wrong = {"DB_PASSWORD": ["geheim1234"]}
    with pytest.raises(dg.DagsterInvalidDefinitionError, match=r"env\['DB_PASSWORD'\]") as defined:
        torch_asset(options={"env": wrong})(train)
    with pytest.raises(dg.Failure, match=r"env\['DB_PASSWORD'\]") as chosen:
        TorchDistributorResource().options(env=wrong)
    assert "geheim" not in f"{defined.value}{chosen.value}"


def test_a_relative_store_is_refused_before_the_training() -> None:
    torch_distributor = TorchDistributorResource(engine="local", store="runs")
    with pytest.raises(dg.Failure, match="store is 'runs', a relative path") as raised:
        dg.materialize([torch_asset(train)], resources={"torch_distributor": torch_distributor})
    assert not raised.value.allow_retries


def test_environment_variables_and_the_launchpad_configure_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STORE", str(tmp_path / "runs"))
    monkeypatch.setenv("RANKS", "2")
    monkeypatch.setenv("GREETING_NOW", "hello")
    at_launch = TorchDistributorResource.configure_at_launch(engine="local", store=dg.EnvVar("STORE"))
    manager = RankZeroIOManager.configure_at_launch()
    run_config = {
        "resources": {
            "torch_distributor": {"config": {"num_processes": {"env": "RANKS"}}},
            "io_manager": {"config": {"base_path": str(tmp_path / "assets")}},
        }
    }
    variables = {"env": {"GREETING": dg.EnvVar("GREETING_NOW")}}
    model = torch_asset(options=variables)(train)
    given = {"torch_distributor": at_launch, "io_manager": manager}
    result = dg.materialize([model], resources=given, run_config=run_config)
    assert value_of(result, "train") == {"size": 2, "greeting": "hello"}
    assert list((tmp_path / "runs").iterdir())
    wrong = {"resources": {"torch_distributor": {"config": {"num_proceses": 2}}}}
    with pytest.raises(dg.DagsterInvalidConfigError, match="num_proceses"):
        dg.materialize([model], resources=given, run_config=wrong)


def test_a_variable_that_is_not_set_is_named_and_not_retried(
    torch_distributor: TorchDistributorResource, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("SPARK_MASTER", raising=False)
    with pytest.raises(dg.Failure, match="SPARK_MASTER") as raised:
        torch_distributor.options(master=dg.EnvVar("SPARK_MASTER"))
    assert raised.value.allow_retries is False
