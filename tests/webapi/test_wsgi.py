"""The entry for a WSGI server of somebody else."""

from __future__ import annotations

from pathlib import Path

import pytest

from asynctask.errors import ConfigError
from webapi.wsgi import load


def test_it_serves_the_application_that_the_environment_names(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("ASYNCTASK_DATABASE_URL", f"sqlite:///{tmp_path / 'ledger.db'}")
    monkeypatch.setenv("ASYNCTASK_DATA_DIR", str(tmp_path))
    (tmp_path / "served_shop.py").write_text("from asynctask import AsyncTask\n\napp = AsyncTask()\nother = 3\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    flask_app = load({"ASYNCTASK_APP": "served_shop:app"})
    app = flask_app.extensions["asynctask"]
    try:
        assert flask_app.test_client().get("/readyz").status_code == 200
        assert [p["kind"] for p in app.processes()] == ["web"]
    finally:
        app.close()
    with pytest.raises(ConfigError, match="no AsyncTask"):
        load({"ASYNCTASK_APP": "served_shop:other"})


@pytest.mark.parametrize("target", ["", "shop", ":app", "shop:"])
def test_a_target_that_is_none_is_refused_with_an_example(target: str) -> None:
    with pytest.raises(ConfigError, match="module:attribute"):
        load({"ASYNCTASK_APP": target})
