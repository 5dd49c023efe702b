"""The charts of chart.js, which every page draws with."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path

import pytest
from playwright.sync_api import Page, expect
from support.browser import hand_in, sheet
from support.serving import Shop

from asynctask import AsyncTask
from asynctask.testing import wait_for

pytestmark = pytest.mark.needs_browser

DRAW = """async () => {
    const { chart, sparkline } = await import("/static/chart.js");
    const span = ["2026-01-05T10:00:00Z", "2026-01-05T10:06:00Z"];
    const marks = [{ at: "2026-01-05T10:03:00Z", text: "parallel was set to 8" }];
    const bad = [0, 0, 0, 80, 60, 0];
    const layers = [
        { name: "succeeded", values: [0, 40, 0, 0, 60, 10], color: "finish" },
        { name: "errors", values: bad, color: "error" },
    ];
    const slowest = [{ name: "95 of 100", values: [0.4, null, 1.5], color: "failed" }];
    document.querySelector("main").replaceChildren(
        sparkline([0, 40, null, 80, 120, 10], { label: "Ended per minute: 120 at most", bad, span, marks }),
        chart(layers, { label: "Ended per minute", bar: true, span }),
        chart(slowest, { label: "Run time", format: (seconds) => `${seconds} s` }),
        sparkline([], { label: "Nothing yet" }), sparkline([null, 7, null], { label: "One minute" }));
}"""


def test_a_chart_shows_values_gaps_and_marks_and_says_what_it_shows(page: Page, web_alone: str) -> None:
    page.goto(web_alone)
    page.evaluate(DRAW)
    spark = page.get_by_role("img", name="Ended per minute: 120 at most; parallel was set to 8")
    expect(spark).to_be_visible()
    expect(spark.locator(".area")).to_have_attribute(
        "d", "M0 100V99.0L0.5 99.0L1.5 67.0H2V100M3 100V35.0L3.5 35.0L4.5 3.0L5.5 91.0H6V100"
    )
    expect(spark.locator(".solid.error")).to_have_attribute("d", "M3.1 99.0V35.0h.8V99.0ZM4.1 99.0V51.0h.8V99.0Z")
    expect(spark.locator(".mark")).to_have_attribute("d", "M3 0V100")
    expect(spark.locator(".mark title")).to_have_text("parallel was set to 8")

    stacked, times = page.locator("figure").all()
    assert stacked.locator(".upright span").all_text_contents() == ["200", "100", "0"]
    assert len({each for each in stacked.locator(".along span").all_text_contents() if "2026" in each}) == 3
    assert stacked.locator(".tip title").all_text_contents()[4].splitlines()[1:] == ["succeeded: 60", "errors: 60"]
    expect(stacked.locator(".solid.error")).to_have_attribute("d", "M3.1 99.0V60.6h.8V99.0ZM4.1 70.2V41.4h.8V70.2Z")
    expect(stacked.locator("figcaption span")).to_have_text(["succeeded", "errors"])
    assert times.locator(".upright span").all_text_contents() == ["2 s", "1 s", "0 s"]
    assert times.locator(".tip title").all_text_contents() == ["\n95 of 100: 0.4 s", "\n95 of 100: –", "\n95 of 100: 1.5 s"]

    expect(page.get_by_role("img", name="One minute").locator(".area")).to_have_attribute("d", "M1 100V3.0L1.5 3.0H2V100")
    expect(page.get_by_role("img", name="Nothing yet")).to_be_visible()
    assert page.locator("main").evaluate("main => main.scrollWidth <= main.clientWidth")


def test_each_queue_shows_what_ended_in_the_last_hour(page: Page, open_shop: tuple[Shop, str], tmp_path: Path) -> None:
    shop, url = open_shop
    rows = [(f"{'NO' if n % 5 == 0 else 'OK'}-{n}", n, "red") for n in range(1, 11)]
    hand_in(page, url, sheet(tmp_path / "products.xlsx", *rows), "gated")
    shop.open_gate(9)
    ended = page.locator("#queues").get_by_role("img", name="9 rows have ended in the last hour")
    with closing(AsyncTask(environ=shop.environ)) as app:
        wait_for(lambda: sum(app.history()["series"][0]["total"][k] for k in ("finish", "failed")) >= 9, "it is written")
    page.goto(f"{url}/queues")
    expect(ended).to_be_visible()
    shop.open_gate(10)
