"""The report of a run: what it holds, and that nothing of a run becomes code in it."""

import json
import os
import re
import shutil
import subprocess
import urllib.error
import urllib.request
from collections.abc import Iterator
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from threading import Thread
from typing import Any

import pytest
from click.testing import CliRunner
from hypothesis import given
from hypothesis import strategies as st
from tests.conftest import until
from tests.runs import folder_of, job_file

from rankzero import InvalidJobError, Launcher, RunHandle, WorkerFailedError
from rankzero.cli import main
from rankzero.report import page, serve, summary
from rankzero.report.serve import ReportServer
from rankzero.report.summary import Summary
from rankzero.run.directory import EVENTS

TOKEN = "a-token-of-letters"
HOSTILE = "</script><script>alert(1)</script><!-- \u2028 {{SCRIPT}} &amp;"


def train(steps: int) -> dict[str, float]:
    import os
    import signal

    import torch

    import rankzero.train as rt

    context = rt.get_context()
    for step in range(steps):
        rt.report({"step": step, "loss": 1.0 / (step + 1), HOSTILE: float(step), "odd": float("nan")})
    rt.report({"step": steps}, checkpoint={"weight": torch.ones(8)})
    print(HOSTILE)
    # Reports that are on their way end with their rank.
    (events,), mine = (
        Path(str(context.storage_path)).glob(f"submissions/*/{EVENTS}"),
        f'"type": "metric", "rank": {context.rank},',
    )
    until(lambda: mine in events.read_text(), 60, "this rank's reports")
    rt.barrier()
    if context.attempt == 0 and context.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    rt.barrier()
    return {"loss": 0.5}


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two runs: one that was restarted and succeeded, one that failed."""
    found = tmp_path_factory.mktemp("report")
    launcher = Launcher(2, store=found, run_id="restarted", max_restarts=1, env={"API_TOKEN": "hunter2-secret"})
    launcher.run(train, 900)

    def fail() -> None:
        raise ValueError(HOSTILE)

    with pytest.raises(WorkerFailedError):
        Launcher(1, store=found, run_id="failed").run(fail)
    return found


@pytest.fixture(scope="module")
def collected(store: Path) -> dict[str, Any]:
    return page.collect(RunHandle.attach(store / "restarted"))


class Scripts(HTMLParser):
    """What a browser would take for scripts, and the attributes that could run one."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.found: list[tuple[dict[str, str | None], str]] = []
        self.handlers: list[str] = []
        self._is_inside = False
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.handlers += [name for name, _ in attrs if name.startswith("on")]
        self._is_inside = tag == "script"
        if self._is_inside:
            self.found.append((dict(attrs), ""))

    def handle_endtag(self, tag: str) -> None:
        self._is_inside = False

    def handle_data(self, data: str) -> None:
        if self._is_inside:
            self.found[-1] = (self.found[-1][0], self.found[-1][1] + data)


def data_of(text: str) -> Any:
    return json.loads(next(body for attributes, body in Scripts(text).found if attributes.get("id") == "data"))


def test_every_rank_and_attempt_is_on_the_timeline(collected: dict[str, Any]) -> None:
    ranks = {(one["attempt"], one["rank"]): one for one in collected["ranks"]}
    assert set(ranks) == {(0, 0), (0, 1), (1, 0), (1, 1)}
    for one in ranks.values():
        assert one["started"] <= one["imported"] <= one["entered"] <= one["reported"]
    assert ranks[0, 1]["outcome"] == "failed"
    assert "SIGKILL" in ranks[0, 1]["what"]
    assert [ranks[1, rank]["outcome"] for rank in (0, 1)] == ["returned", "returned"]
    assert [mark["type"] for mark in collected["marks"] if mark["type"] == "restart"] == ["restart"]


def test_the_curves_keep_their_ends_and_few_points(collected: dict[str, Any]) -> None:
    curve = next(curve for curve in collected["curves"] if curve["name"] == "loss")
    assert [one["rank"] for one in curve["ranks"]] == [0, 1]
    for one in curve["ranks"]:
        assert len(one["v"]) <= summary.MAX_POINTS
        assert (one["s"][0], one["v"][0]) == (0, 1.0)
        # The second attempt went through the same steps.
        assert (one["s"][-1], one["v"][-1]) == (899, pytest.approx(1 / 900, rel=1e-5))


def test_checkpoints_result_logs_and_last_metrics_are_there(collected: dict[str, Any]) -> None:
    assert collected["state"] == "succeeded"
    assert collected["result"]["digest"]
    assert collected["last"]["step"] == 900
    assert collected["checkpoints"]
    assert collected["checkpoints"][-1]["size"] > 32
    assert {one["rank"] for one in collected["logs"]} == {0, 1}
    assert any(HOSTILE[:20] in line for one in collected["logs"] for line in one["lines"])


def test_lines_have_times_by_which_the_page_orders_them(collected: dict[str, Any]) -> None:
    for one in collected["logs"]:
        assert len(one["times"]) == len(one["lines"])
        assert one["times"] == sorted(one["times"])
        assert 0 <= one["times"][0] <= one["times"][-1] <= collected["ended"] - collected["created"] + 1


def test_the_rank_that_failed_is_among_those_whose_lines_are_held(store: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(page, "LOGGED_RANKS", 1)
    run = RunHandle.attach(store / "restarted")
    job, status = run.job, run.status()
    assert [one["rank"] for one in page._logs(run, job, status)] == [0]
    failed = replace(status, error={"type": "WorkerFailedError", "rank": 1})
    assert [one["rank"] for one in page._logs(run, job, failed)] == [1]


def test_progress_and_what_names_the_whole_work_are_no_results(tmp_path: Path) -> None:
    def train() -> None:
        import rankzero.train as rt

        for step in range(3):
            rt.report({"step": step, "total_steps": 10, "tokens": 1_234_567 + step, "loss": 0.5})

    Launcher(1, store=tmp_path, run_id="one").run(train)
    run = page.collect(RunHandle.attach(tmp_path / "one"))
    assert (run["progress"]["done"], run["progress"]["unit"], run["progress"]["total"]) == (1_234_569, "tokens", None)
    assert "total_steps" not in {*run["last"], *(curve["name"] for curve in run["curves"])}
    (tokens,) = (curve for curve in run["curves"] if curve["name"] == "tokens")
    assert tokens["ranks"][0]["v"] == [1_234_567, 1_234_568, 1_234_569]
    assert not {"submission", "nonce", "earlier", "identity_parts"}.intersection(run["config"])


def test_progress_of_a_run_that_lives_has_the_time_left() -> None:
    told = Summary()
    for number in range(5):
        metrics = {"step": number, "total_steps": 10}
        told.add({"type": "metric", "rank": 0, "time": 100.0 + 2 * number, "metrics": metrics})
    assert told.facts()["progress"] == {"done": 4, "total": 10, "unit": "steps", "seconds_left": pytest.approx(12.0)}


def test_a_run_writes_its_report_by_itself(store: Path) -> None:
    for name, state in (("restarted", "succeeded"), ("failed", "failed")):
        run = data_of((store / name / "report.html").read_text())
        assert (run["id"], run["state"]) == (name, state)


def test_the_first_cause_is_in_the_report_of_a_failed_run(store: Path) -> None:
    run = page.collect(RunHandle.attach(store / "failed"))
    assert run["error"]["type"] == "WorkerFailedError"
    assert f"ValueError: {HOSTILE.splitlines()[0]}" in run["error"]["message"]


def test_no_line_metric_or_error_becomes_code(store: Path) -> None:
    for name in ("restarted", "failed"):
        text = page.draw(RunHandle.attach(store / name))
        scripts = Scripts(text)
        # The page's own, whose checksum the policy names, and its data, which no browser runs.
        assert [attributes.get("type") for attributes, _ in scripts.found] == ["application/json", None]
        assert scripts.handlers == []
        assert "alert(1)" not in scripts.found[1][1]
        assert "alert(1)" in json.dumps(data_of(text))
        policy = re.search(r'Content-Security-Policy" content="([^"]+)"', text)
        assert policy
        assert policy[1].startswith("default-src 'none'")
        assert "script-src 'sha256-" in policy[1]


def test_the_page_needs_no_network(store: Path) -> None:
    text = (store / "restarted" / "report.html").read_text()
    outside = text.replace("http://www.w3.org/2000/svg", "")
    assert not re.search(r"""(src|href)\s*=\s*["']?(https?:)?//""", outside)
    assert "@import" not in outside
    assert "url(" not in outside


def test_no_secret_of_the_environment_is_in_the_report(store: Path) -> None:
    assert "hunter2" not in (store / "restarted" / "report.html").read_text()


FILES = ("job.json", "status.json", "events.jsonl")


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize(
    "content", [b"", b"{", b"[]", b'"text"', b"\xff\xfe\x00", b'{"metrics": 3}', b'{"type": "metric", "time": 1e99}']
)
def test_a_directory_that_is_no_run_any_more_gives_a_sentence(
    store: Path, tmp_path: Path, name: str, content: bytes
) -> None:
    run = tmp_path / "run"
    shutil.copytree(store / "restarted", run)
    path = job_file(run) if name == "job.json" else folder_of(run) / name
    path.write_bytes(content)
    done = CliRunner().invoke(main, ["report", str(run), "-o", str(tmp_path / "page.html")])
    if done.exit_code:
        assert isinstance(done.exception, SystemExit), done.exception
        assert done.stderr.startswith("Error: ")
        assert done.stderr.count("\n") == 1
    else:
        assert (tmp_path / "page.html").stat().st_size > 0
    assert CliRunner().invoke(main, ["runs", str(tmp_path)]).exit_code == 0


def test_a_value_that_is_not_finite_is_a_gap_of_its_curve() -> None:
    told = Summary()
    for step in range(5000):
        loss = float("nan") if 2000 <= step < 3000 or step == 4999 else 1.0 / (step + 1)
        told.add({"type": "metric", "rank": 0, "time": float(step), "metrics": {"step": step, "loss": loss}})
    ((drawn,),) = (curve["ranks"] for curve in told.facts()["curves"])
    gaps = [index for index, value in enumerate(drawn["v"]) if value is None]
    assert drawn["s"][gaps[-1]] == 4999
    # The curve ends just before the gap, and starts again just behind it.
    assert 1900 < drawn["s"][gaps[0] - 1] < 2000
    assert 3000 <= drawn["s"][gaps[-2] + 1] < 3100
    assert len(gaps) < 300


def test_a_gpu_that_does_not_answer_leaves_the_others_in_the_report() -> None:
    told = Summary()
    gpus = [
        [{"use": 0.5, "memory": 1, "memory_total": 8}, {"use": 0.6, "memory": 2, "memory_total": 8}],
        [None, {"use": 0.7, "memory": 3, "memory_total": 8}],
        [],
    ]
    for number, found in enumerate(gpus):
        told.add({"type": "usage", "time": float(number), "host": "a", "cpu": 1.0, "gpus": found})
    (host,) = told.facts()["hosts"]
    assert host["columns"]["gpu 0 use"]["v"] == [0.5]
    assert host["columns"]["gpu 1 use"]["v"] == [0.6, 0.7]
    assert host["gpu_memory_total"] == 8


def test_a_long_history_takes_little_memory() -> None:
    told = Summary()
    for number in range(50_000):
        metrics = {"loss": float(number % 97), "lr": 0.1}
        told.add({"type": "metric", "rank": number % 8, "time": float(number), "metrics": metrics})
        told.add({"type": "checkpoint", "time": float(number), "id": str(number)})
        told.add({"type": "usage", "time": float(number), "host": "a", "cpu": 1.0})
    facts = told.facts()
    assert len(json.dumps(facts)) < 600_000
    loss = facts["curves"][0]["ranks"]
    assert [one["rank"] for one in loss] == list(range(8))
    assert max(loss[0]["v"]) == 96.0
    assert (loss[7]["t"][0], loss[7]["t"][-1]) == (7.0, 49_999.0)


def test_only_the_last_lines_of_a_long_log_are_read(tmp_path: Path) -> None:
    def chatter() -> None:
        for number in range(20_000):
            print(f"line {number} " + "x" * 200)

    Launcher(1, store=tmp_path, run_id="chatter").run(chatter)
    (log,) = page.collect(RunHandle.attach(tmp_path / "chatter"))["logs"]
    assert log["cut"] is True
    assert log["lines"][-1].startswith("line 19999 ")
    assert sum(map(len, log["lines"])) <= page.LOG_CHARACTERS


Points = st.lists(st.tuples(st.floats(0, 1e9), st.floats(0, 1e6), st.floats(-1e9, 1e9)), min_size=1, max_size=500)


@given(Points, st.integers(4, 50))
def test_thinning_keeps_ends_extremes_and_the_order(points: list[summary.Point], limit: int) -> None:
    numbered = [(float(index), 0.0, point[2]) for index, point in enumerate(points)]
    thin = summary.thin(numbered, limit)
    assert len(thin) <= limit
    assert (thin[0], thin[-1]) == (numbered[0], numbered[-1])
    assert set(thin) <= set(numbered)
    assert thin == sorted(thin)
    for chosen in (min, max):
        assert chosen(point[2] for point in thin) == chosen(point[2] for point in numbered)


@pytest.fixture(scope="module")
def served(store: Path) -> Iterator[str]:
    with ReportServer(str(store), 0, TOKEN) as server:
        thread = Thread(target=server.serve_forever, daemon=True)
        thread.start()
        yield server.url
        server.shutdown()
        thread.join()


def get(url: str, **headers: str) -> tuple[int, str]:
    try:
        with urllib.request.urlopen(urllib.request.Request(url, headers=headers), timeout=30) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()


def test_serve_shows_the_store_and_each_run(served: str) -> None:
    code, text = get(served)
    assert (code, re.findall(r'href="runs/([^"]+)"', text)) == (200, ["failed", "restarted"])
    assert data_of(get(f"{served}runs/restarted")[1])["id"] == "restarted"


def test_the_list_of_a_store_has_its_newest_runs(store: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(serve, "MAX_RUNS", 1)
    text = serve.index(str(store))
    assert re.findall(r'href="runs/([^"]+)"', text) == ["failed"]


def test_nothing_of_a_run_is_markup_in_the_list_of_its_store(store: Path, tmp_path: Path) -> None:
    shutil.copytree(store / "restarted", tmp_path / "one")
    path = folder_of(tmp_path / "one") / "status.json"
    status = json.loads(path.read_text())
    path.write_text(json.dumps({**status, "state": HOSTILE, "metrics": {HOSTILE: 1.0}}))
    assert "<script" not in serve.index(str(tmp_path))


@pytest.mark.skipif(shutil.which("node") is None, reason="no node")
@pytest.mark.parametrize(
    ("value", "text"),
    [("1234567", "1234567"), ("-20000001", "-20000001"), ("0.123456", "0.12346"), ("1e300", "1.00e+300")],
)
def test_whole_numbers_are_shown_exactly(value: str, text: str) -> None:
    source = (Path(page.__file__).parent / "page.js").read_text()
    (function,) = re.findall(r"^  (const number = .*?^  };)$", source, re.M | re.S)
    command = ["node", "-e", f"{function} process.stdout.write(number({value}))"]
    assert subprocess.run(command, capture_output=True, text=True, check=True).stdout == text


@pytest.mark.skipif(shutil.which("node") is None, reason="no node")
def test_colors_of_a_terminal_are_classes_and_its_other_sequences_are_left_out() -> None:
    source = (Path(page.__file__).parent / "page.js").read_text()
    (code,) = re.findall(r"^(  const ESCAPE = .*?^  })$", source, re.M | re.S)
    line = "a \x1b[1;31mred\x1b[0m \x1b]8;;http://x\x1b\\link\x1b]8;;\x1b\\ \x1b[38;5;32mx\x1b[94mblue\x1b[2K\x1b[39m."
    command = ["node", "-e", f"{code} process.stdout.write(JSON.stringify([...colored({json.dumps(line)})]))"]
    parts = json.loads(subprocess.run(command, capture_output=True, text=True, check=True).stdout)
    assert [(style, text) for style, text in parts if style] == [("ansi1 bold", "red"), ("ansi4", "blue")]
    assert "".join(text for _, text in parts) == "a red link xblue."


DRAWS = """
const made = [];
class Element {
  value = ""; attributes = {};
  constructor(tag) { made.push([tag, this.attributes]); }
  setAttribute(name, value) { this.attributes[name] = String(value); }
  getAttribute(name) { return this.attributes[name]; }
  appendChild() {} append() {} replaceChildren() {} addEventListener() {} toggleAttribute() {}
}
const [data, code] = JSON.parse(require("fs").readFileSync(0));
const page = new Element("main"), facts = { textContent: data };
globalThis.location = { protocol: "file:" };
globalThis.document = {
  getElementById: (id) => (id === "data" ? facts : page),
  createElement: (tag) => new Element(tag), createElementNS: (_, tag) => new Element(tag),
};
(0, eval)(code);
process.stdout.write(JSON.stringify(made));
"""


@pytest.mark.skipif(shutil.which("node") is None, reason="no node")
@pytest.mark.parametrize(
    ("steps", "values"),
    [
        ([2**60, 2**60 + 256], [0.5, 0.25]),
        ([2**60], [0.5]),
        ([1, 2], [float(2**54), float(2**54 + 4)]),
    ],
    ids=["steps", "one step", "values"],
)
def test_steps_and_values_beyond_exact_numbers_are_drawn(
    collected: dict[str, Any], steps: list[int], values: list[float]
) -> None:
    curve = {"name": "loss", "ranks": [{"rank": 0, "t": [1.0, 2.0][: len(steps)], "s": steps, "v": values}]}
    scripts = Scripts(page.render({**collected, "curves": [curve], "hosts": []}))
    # The heap's limit, in MiB, ends an axis that does not end.
    command = ["node", "--max-old-space-size=64", "-e", DRAWS]
    given = json.dumps([body for _, body in scripts.found])
    done = subprocess.run(command, input=given, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    made = json.loads(done.stdout)
    assert not [attributes for _, attributes in made if "NaN" in "".join(map(str, attributes.values()))]
    (point,) = [item for item in made if item[1].get("class") == "curve" or item[0] == "circle"]
    numbers = [point[1]["cx"]] if point[0] == "circle" else re.findall(r"[ML]([0-9.]+) ", point[1]["d"])
    assert len(numbers) == len(steps)
    assert all(0 <= float(number) <= 400 for number in numbers)


def test_facts_are_json_for_browsers_too(store: Path, tmp_path: Path) -> None:
    shutil.copytree(store / "restarted", tmp_path / "one")
    path = job_file(tmp_path / "one")
    job = json.loads(path.read_text())
    path.write_text(json.dumps({**job, "params": {"clip": float("inf"), "lr": float("nan")}}))
    text = CliRunner().invoke(main, ["report", str(tmp_path / "one"), "--json"]).stdout
    found = json.loads(text, parse_constant=lambda name: pytest.fail(f"{name} is no JSON"))
    assert found["config"]["params"] == {"clip": "inf", "lr": "nan"}


@pytest.mark.parametrize(
    "path", ["runs/none", "runs/..%2f..%2fetc", "runs/", "runs/.hidden", "etc/passwd", "compare", "/runs/failed"]
)
def test_serve_gives_nothing_but_runs(served: str, path: str) -> None:
    code, text = get(served + path)
    assert code == 404
    assert "Traceback" not in text


def test_serve_answers_nobody_without_the_token(served: str) -> None:
    top = served.removesuffix(f"{TOKEN}/")
    for path in ("", "runs/failed", "guessed/", f"{TOKEN}.json", TOKEN, f"?token={TOKEN}"):
        assert get(top + path)[0] == 403


def test_a_token_is_made_up_and_a_taken_port_is_named(store: Path) -> None:
    with ReportServer(str(store), 0) as server:
        assert len(server.token) > 20
        with pytest.raises(InvalidJobError, match="16 or more"):
            ReportServer(str(store), 0, "short")
        with pytest.raises(OSError, match=r"cannot listen on 127\.0\.0\.1:\d+ \(Address already in use\)"):
            ReportServer(str(store), server.server_address[1])


def test_serve_listens_on_this_machine_alone(served: str) -> None:
    assert served.startswith("http://127.0.0.1:")


def test_a_report_file_that_cannot_be_written_costs_nothing(tmp_path: Path) -> None:
    store = tmp_path / "store"
    (store / "run").mkdir(parents=True)
    (store / "run" / "report.html").mkdir()
    assert Launcher(store=store, run_id="run").run(os.getpid) > 0
