"""asynctask.js as it is served to pages of other origins, and laid out for npm."""

from __future__ import annotations

import gzip
import json
import re
from collections.abc import Callable

from support.webshop import Client, client_of, said

from asynctask import AsyncTask, __version__
from webapi.pages import CLIENT

MAJOR = int(__version__.partition(".")[0])
PATH = f"/client/{__version__}/asynctask.js"
SHOP = "https://shop.example"


def test_the_module_is_small_public_kept_for_a_year_and_loaded_from_any_origin(make_app: Callable[..., AsyncTask]) -> None:
    client = client_of(make_app(tokens="ann=ann-has-a-secret-of-her-own", allowed_origins=SHOP))
    for origin, named in ((SHOP, SHOP), ("https://other.example", "*")):
        answer = client.get(PATH, headers={"Origin": origin})
        assert (answer.status_code, answer.mimetype) == (200, "text/javascript")
        assert answer.data == CLIENT.read_bytes()
        assert answer.headers["Access-Control-Allow-Origin"] == named
        assert answer.headers["Cross-Origin-Resource-Policy"] == "cross-origin"
        assert answer.headers["Cache-Control"] == "public, max-age=31536000, immutable"
    sent = client.get(PATH, headers={"Accept-Encoding": "br, gzip"})
    assert (sent.headers["Content-Encoding"], gzip.decompress(sent.data)) == ("gzip", CLIENT.read_bytes())
    assert len(sent.data) < 8_000, "with the elements and their languages"
    assert "Accept-Encoding" in sent.headers["Vary"]
    assert said(client.get("/api/tasks")) == (401, "unauthorized")


def test_a_page_that_names_an_earlier_version_goes_on_and_one_of_another_interface_is_told(
    client: Client, make_app: Callable[..., AsyncTask]
) -> None:
    for server, root in ((client, ""), (client_of(make_app(base_path="/bulk")), "/bulk")):
        for version in (f"{MAJOR}", f"{MAJOR}.0.0"):
            led = server.get(f"{root}/client/{version}/asynctask.js")
            assert (led.status_code, led.headers["Location"]) == (302, f"{root}{PATH}")
            assert led.headers["Access-Control-Allow-Origin"] == "*", "a browser asks for it at each step"
        refused = server.get(f"{root}/client/{MAJOR + 1}.0/asynctask.js")
        assert said(refused) == (404, "not_found")
        assert f"load {root}{PATH}" in refused.json["detail"]


def test_the_package_of_npm_has_the_version_its_files_and_a_type_for_each_name() -> None:
    package = json.loads((CLIENT.parent / "package.json").read_text())
    assert package["version"] == __version__
    assert {*package["files"], "package.json"} == {path.name for path in CLIENT.parent.iterdir()}
    exported = set(re.findall(r"^export (?:async )?(?:function|class) (\w+)", CLIENT.read_text(), re.MULTILINE))
    typed = set(
        re.findall(r"^export (?:function|class) (\w+)", (CLIENT.parent / "asynctask.d.ts").read_text(), re.MULTILINE)
    )
    assert exported - {"request", "backoff", "post", "sleep"} == typed, "the four are for the pages of the server itself"
    assert "import" not in {word for line in CLIENT.read_text().splitlines() for word in line.split()[:1]}, (
        "it needs nothing"
    )
