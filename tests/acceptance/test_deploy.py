"""The files of examples/deploy: what can be tried of them on a machine without systemd, containers and Grafana."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from cli_process import Desk, read_document
from prometheus_client.parser import text_string_to_metric_families

from asynctask import AsyncTask
from asynctask.config import ENV_PREFIX, Config, load
from asynctask.testing import wait_for
from asynctask.testing.servers import free_port
from webapi import create_app

ROOT = Path(__file__).resolve().parents[2]
DEPLOY = ROOT / "examples/deploy"
BIN = Path(sys.executable).parent
UNITS = ["asynctask-web.service", "asynctask-worker.service"]
PAGES = [ROOT / "docs/how-to" / name for name in ("deploy.md", "scale.md")]


@pytest.fixture
def desk(tmp_path: Path) -> Iterator[Desk]:
    made = Desk(tmp_path)
    yield made
    assert made.processes() == {}


def test_the_page_has_the_files_as_they_are_and_names_each() -> None:
    text = "".join(page.read_text() for page in PAGES)
    blocks = re.findall(r"`examples/deploy/([\w.-]+)`:\n\n```\w*\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    assert len(blocks) >= 6
    for name, block in blocks:
        assert block == (DEPLOY / name).read_text(), f"the block of {name} on the page is another"
    assert set(re.findall(r"`examples/deploy/([\w.-]+)`", text)) == {path.name for path in DEPLOY.iterdir()}


def value(unit: str, name: str) -> str:
    """The one value of a setting of a unit."""
    (found,) = re.findall(rf"^{name}=(.*)$", (DEPLOY / unit).read_text(), re.MULTILINE)
    return str(found)


@pytest.mark.parametrize("unit", UNITS)
def test_systemd_takes_the_units_and_sees_what_they_are_denied(unit: str, tmp_path: Path) -> None:
    program = shutil.which("systemd-analyze")
    if program is None:
        pytest.skip("systemd-analyze is not installed")
    here = tmp_path / unit
    here.write_text((DEPLOY / unit).read_text().replace("/srv/shop/.venv/bin", str(BIN)))
    for words in (["verify", "--man=no"], ["security", "--offline=true", "--threshold=40", "--no-pager"]):
        done = subprocess.run([program, *words, str(here)], capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout + done.stderr
        assert "Unknown" not in done.stderr


def test_the_two_units_differ_in_what_they_start_alone() -> None:
    web, worker = ((DEPLOY / unit).read_text().splitlines() for unit in UNITS)
    differ = [(one, other) for one, other in zip(web, worker, strict=True) if one != other]
    assert {one.partition("=")[0] for one, _ in differ} == {"Description", "ExecStart"}


def test_services_get_longer_to_stop_than_their_supervisor_takes() -> None:
    longest_s = Config().shutdown_s + 15
    compose = yaml.safe_load((DEPLOY / "compose.yaml").read_text())
    graces = [int(value(unit, "TimeoutStopSec")) for unit in UNITS]
    graces.append(int(compose["services"]["worker"]["stop_grace_period"].removesuffix("s")))
    assert min(graces) > longest_s


def test_the_file_of_settings_is_read_as_it_is() -> None:
    script = 'set -a; . "$1"; exec "$2" -c "import json, os; print(json.dumps(dict(os.environ)))"'
    words = ["sh", "-c", script, "sh", str(DEPLOY / "asynctask.env"), sys.executable]
    found = json.loads(subprocess.run(words, capture_output=True, text=True, check=True).stdout)
    environ = {name: text for name, text in found.items() if name.startswith(ENV_PREFIX)}
    names = re.findall(r"^(\w+)=", (DEPLOY / "asynctask.env").read_text(), re.MULTILINE)
    assert set(names) <= environ.keys()
    secrets = {"SECRET": "s" * 16, "OTHER": "o" * 16}
    environ["ASYNCTASK_TOKENS"] = re.sub(r"SECRET|OTHER", lambda name: secrets[name[0]], environ["ASYNCTASK_TOKENS"])
    config, _ = load({}, environ)
    assert (config.app, [each.user.name for each in config.access()]) == ("shop:app", ["ann", "grafana"])


def instructions(name: str) -> list[str]:
    """The arguments of each instruction of this name in the Dockerfile."""
    lines = re.sub(r"\\\n\s*", "", (DEPLOY / "Dockerfile").read_text()).splitlines()
    return [line.removeprefix(f"{name} ") for line in lines if line.startswith(f"{name} ")]


def test_the_image_is_made_by_a_user_of_its_own_from_the_wheel() -> None:
    assert instructions("USER") == ["shop"]
    assert instructions("COPY")[0] == "dist/asynctask_ledger-*.whl /tmp/wheel/"
    (environ,) = instructions("ENV")
    for name, text in (word.split("=") for word in environ.split() if word.startswith(ENV_PREFIX)):
        assert load({}, {name: text})
    for run in instructions("RUN"):
        assert subprocess.run(["sh", "-n", "-c", run], check=False).returncode == 0


def commands() -> dict[str, list[str]]:
    """Every command of AsyncTask in the files, by where it stands."""
    services = yaml.safe_load((DEPLOY / "compose.yaml").read_text())["services"]
    found = {unit: value(unit, "ExecStart").split() for unit in UNITS}
    found["Dockerfile"] = json.loads(instructions("CMD")[0])
    found |= {f"compose {name}": its["command"] for name, its in services.items() if "command" in its}
    found["compose probe"] = services["worker"]["healthcheck"]["test"][1:]
    return {where: words[1:] for where, words in found.items() if words[0].endswith("asynctask")}


def test_the_services_come_up_with_the_commands_of_the_image_and_their_probes_say_so(desk: Desk) -> None:
    assert len(commands()) == 6
    port = free_port()
    probe = re.sub(r"\b8000\b", str(port), json.loads(instructions("HEALTHCHECK")[0].partition("CMD ")[2])[2])

    def lives() -> bool:
        return subprocess.run([sys.executable, "-c", probe], capture_output=True, check=False).returncode == 0

    assert not lives()
    desk.run(*commands()["compose schema"])
    desk.run(*commands()["compose probe"], code=1)
    with (
        desk.started(*commands()["Dockerfile"], "--port", port, "--json") as web,
        desk.started(*commands()["compose worker"], "--json") as worker,
    ):
        read_document(web)
        read_document(worker)
        assert lives()
        wait_for(lambda: desk.registered("worker") == 4, "every worker process has registered")
        desk.run(*commands()["compose probe"])
    assert not lives()
    desk.run(*commands()["compose probe"], code=1)
    for unit in UNITS:
        desk.run(*commands()[unit], "--help")


# -- what is monitored


def offered(tmp_path: Path) -> tuple[set[str], dict[str, set[str]]]:
    """The names of all samples that /metrics may have, and the labels of those that it has after some work."""
    app = AsyncTask(database_url=f"sqlite:///{tmp_path}/a.db", data_dir=str(tmp_path / "data"), environ={})

    @app.worker(retry=0)
    def enrol(item: dict[str, Any]) -> None:
        if item["n"]:
            raise ValueError("a bug")

    app.ensure_schema()
    launcher = app.launcher(concurrency=1, shutdown_s=5)
    launcher.start()
    try:
        app.submit("enrol", [{"n": 0}, {"n": 1}]).wait(120)
        app.submit("enrol", [{"n": 0}], queue="elsewhere")
        launcher.heartbeat.beat()
        text = create_app(app).test_client().get("/metrics").get_data(as_text=True)
    finally:
        launcher.stop()
        app.close()
    names, labels = set[str](), dict[str, set[str]]()
    for family in text_string_to_metric_families(text):
        ends = {"counter": ["_total"], "histogram": ["_bucket", "_sum", "_count"]}.get(family.type, [""])
        names |= {family.name + end for end in ends}
        for sample in family.samples:
            labels.setdefault(sample.name, set()).update(sample.labels)
    return names, labels


def expressions() -> dict[str, str]:
    """The queries of the alerts and of the board, by title."""
    rules = [rule for group in yaml.safe_load((DEPLOY / "alerts.yml").read_text())["groups"] for rule in group["rules"]]
    board = json.loads((DEPLOY / "grafana.json").read_text())
    found = {rule["alert"]: rule["expr"] for rule in rules}
    return found | {f"{each['title']} {t['refId']}": t["expr"] for each in board["panels"] for t in each["targets"]}


def test_alerts_and_board_ask_for_metrics_and_labels_that_there_are(tmp_path: Path) -> None:
    names, labels = offered(tmp_path)
    found = expressions()
    assert len(found) > 20
    for title, query in found.items():
        used = set(re.findall(r"\basynctask_\w+", query))
        assert used, title
        assert used <= names, f"{title}: there is no {used - names}"
        wanted = set(re.findall(r"(\w+)=~?\"", query))
        for those in re.findall(r"\bby \(([^)]+)\)", query):
            wanted |= set(re.split(r",\s*", those))
        for name in used & labels.keys():
            assert wanted <= labels[name], f"{title}: {name} has no label {wanted - labels[name]}"


def test_each_alert_is_in_the_table_of_the_page_and_says_what_is_the_case() -> None:
    rules = [rule for group in yaml.safe_load((DEPLOY / "alerts.yml").read_text())["groups"] for rule in group["rules"]]
    table = re.findall(r"^\| `(AsyncTask\w+)` \|", PAGES[1].read_text(), re.MULTILINE)
    assert [rule["alert"] for rule in rules] == table
    assert all(rule["annotations"]["summary"] and rule["labels"]["severity"] for rule in rules)


def test_the_board_is_drawn_without_overlaps() -> None:
    panels = json.loads((DEPLOY / "grafana.json").read_text())["panels"]
    places = [
        (each["gridPos"]["x"] + dx, each["gridPos"]["y"] + dy)
        for each in panels
        for dx in range(each["gridPos"]["w"])
        for dy in range(each["gridPos"]["h"])
    ]
    assert len(places) == len(set(places))
    assert max(x for x, _ in places) < 24
    assert len({each["id"] for each in panels}) == len(panels)
