"""The example shop does what its texts say, and its untidy sheet is what its Expected says."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from datetime import date, datetime
from decimal import Decimal
from pathlib import Path
from typing import Any

import openpyxl
import pytest
import sqlalchemy as sa
from pydantic import ValidationError

from asynctask import NormalException
from asynctask.job import CurrentJob, reset_current_job, set_current_job
from examples import promotions, untidy_sheet

ROOT = Path(__file__).parents[2]


def perform(worker: Callable[[Any], Any], item: Any, job: CurrentJob | str, attempt: int = 1) -> Any:
    """Runs the worker's function as that job."""
    token = set_current_job(CurrentJob(job, attempt=attempt) if isinstance(job, str) else job)
    try:
        return worker(item)
    finally:
        reset_current_job(token)


def campaign(**changes: Any) -> promotions.Campaign:
    values: dict[str, Any] = {
        "code": "000417",
        "title": "Spring sale",
        "seller": "Café Müller",
        "starts_on": date(2026, 3, 5),
        "ends_on": date(2026, 3, 20),
        "budget": Decimal("1200.50"),
        "discount_percent": 15,
    }
    return promotions.Campaign.model_validate(values | changes)


def product(**changes: Any) -> promotions.Product:
    return promotions.Product.model_validate(promotions.products(1)[0] | changes)


@pytest.fixture
def shop(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    path = tmp_path / "shop.db"
    monkeypatch.setenv("PROMOTIONS_DATABASE_URL", f"sqlite:///{path}")
    promotions.shop.close()
    yield path
    promotions.shop.close()


class TestCampaigns:
    def test_a_campaign_is_stored_as_it_was_given(self, shop: Path) -> None:
        made = perform(promotions.create_campaign, campaign(note="ask Anna"), "job-1")
        with promotions.shop.engine().connect() as db:
            row = db.execute(sa.select(promotions.campaigns)).one()
        assert made == {"campaign_id": row.id}
        assert (row.code, row.seller, row.budget_cents, row.note) == ("000417", "Café Müller", 120_050, "ask Anna")
        assert (row.starts_on, row.ends_on, row.discount_percent) == (date(2026, 3, 5), date(2026, 3, 20), 15)

    @pytest.mark.parametrize(
        ("changes", "code", "message"),
        [
            ({"ends_on": date(2026, 3, 4)}, "ends_before_start", "ends before it starts"),
            ({"budget": Decimal("20000.01")}, "over_budget", "limit of 20000"),
            ({"title": "A Miracle for you"}, "banned_words", "promises"),
            ({"title": "全部免费"}, "banned_words", "promises"),
            ({"seller": "Cafe Muller"}, "unknown_seller", "no seller is called Cafe Muller"),
        ],
    )
    def test_the_shop_refuses(self, shop: Path, changes: dict[str, Any], code: str, message: str) -> None:
        with pytest.raises(NormalException, match=message) as refusal:
            perform(promotions.create_campaign, campaign(**changes), "job-1")
        assert refusal.value.code == code
        assert promotions.campaign_codes() == []

    def test_the_limits_themselves_are_allowed(self, shop: Path) -> None:
        perform(promotions.create_campaign, campaign(budget=Decimal(20_000), ends_on=date(2026, 3, 5)), "job-1")
        assert promotions.campaign_codes() == ["000417"]

    def test_the_same_job_run_again_succeeds_with_the_same_row(self, shop: Path) -> None:
        first = perform(promotions.create_campaign, campaign(), "job-1", attempt=1)
        assert perform(promotions.create_campaign, campaign(), "job-1", attempt=2) == first
        assert promotions.shop_counts()["campaigns"] == 1

    def test_another_job_with_the_same_code_is_refused_however_often_it_runs(self, shop: Path) -> None:
        perform(promotions.create_campaign, campaign(), "job-1")
        for attempt in (1, 2):
            with pytest.raises(NormalException, match=r"campaign code 000417 already exists \(row 1\)") as refusal:
                perform(promotions.create_campaign, campaign(title="Other"), "job-2", attempt)
            assert refusal.value.code == "duplicate_code"
        assert promotions.shop_counts()["campaigns"] == 1

    def test_a_duplicate_in_the_slice_of_one_job_is_refused_but_its_run_again_is_not(self, shop: Path) -> None:
        for attempt in (1, 2):
            job = CurrentJob("job-1", attempt=attempt)
            assert perform(promotions.create_campaign, campaign(), job) == {"campaign_id": 1}
            with pytest.raises(NormalException, match="already exists"):
                perform(promotions.create_campaign, campaign(), job)

    def test_codes_keep_their_zeros_and_differ_by_them(self, shop: Path) -> None:
        for job, code in enumerate(("007", "07", "7")):
            perform(promotions.create_campaign, campaign(code=code), f"job-{job}")
        assert promotions.campaign_codes() == ["007", "07", "7"]

    def test_a_seller_is_known_however_his_accents_and_spaces_were_typed(self, shop: Path) -> None:
        perform(promotions.create_campaign, campaign(seller="  Cafe\u0301 Mu\u0308ller\u3000"), "job-1")
        assert promotions.shop_counts()["campaigns"] == 1

    def test_chinese_headers_name_the_same_fields(self) -> None:
        values = {
            "活动编号": "1",
            "活动名称": "x",
            "商家": "东方百货",
            "开始日期": "2026-03-05",
            "结束日期": "2026-03-06",
        }
        item = promotions.Campaign.model_validate(values | {"预算": "12.50", "折扣": 10})
        assert (item.code, item.budget, item.note) == ("1", Decimal("12.50"), None)

    @pytest.mark.parametrize("changes", [{"code": " "}, {"discount_percent": 0}, {"discount_percent": 91}, {"budget": 0}])
    def test_what_no_shop_could_take_is_no_campaign(self, changes: dict[str, Any]) -> None:
        with pytest.raises(ValidationError):
            campaign(**changes)


class TestEnrolments:
    def test_a_product_is_enrolled_once_however_often_the_job_runs(self, shop: Path) -> None:
        for attempt in (2, 3):
            made = perform(promotions.enroll_product, product(), "job-1", attempt)
            assert made == {"promotion_id": 17, "sku": "SKU-00001"}
        assert promotions.enrolled_skus() == ["SKU-00001"]

    @pytest.mark.parametrize(
        ("changes", "code"),
        [
            ({"seller": "Bargain Basement"}, "unqualified_seller"),
            ({"seller": "Nobody"}, "unqualified_seller"),
            ({"category": "Tobacco"}, "banned_goods"),
            ({"sku": "SKU-00001-OLD"}, "sold_out"),
            ({"promotion_id": 18}, "unknown_promotion"),
        ],
    )
    def test_the_shop_refuses(self, shop: Path, changes: dict[str, Any], code: str) -> None:
        with pytest.raises(NormalException) as refusal:
            perform(promotions.enroll_product, product(**changes), "job-1", attempt=2)
        assert refusal.value.code == code
        assert str(refusal.value)
        assert promotions.enrolled_skus() == []

    def test_the_inventory_service_is_away_for_about_one_product_in_15_and_only_at_first(self) -> None:
        skus = [item["sku"] for item in promotions.products(1_500)]
        flaky = [sku for sku in skus if promotions.inventory.is_flaky(sku)]
        assert 60 <= len(flaky) <= 140
        with pytest.raises(ConnectionError):
            promotions.inventory.stock(flaky[0], 1)
        assert promotions.inventory.stock(flaky[0], 2) == promotions.inventory.stock(flaky[0], 3)

    def test_the_200_products_end_as_planned(self, shop: Path) -> None:
        items = promotions.products()
        refused: dict[str, str] = {}
        retried = 0
        for n, item in enumerate(map(promotions.Product.model_validate, items)):
            try:
                try:
                    perform(promotions.enroll_product, item, f"job-{n}", attempt=1)
                except ConnectionError:
                    retried += 1
                    perform(promotions.enroll_product, item, f"job-{n}", attempt=2)
            except NormalException as refusal:
                refused[item.sku] = refusal.code
        assert len({item["sku"] for item in items}) == len(items) == 200
        assert refused == promotions.planned_refusals()
        assert Counter(refused.values()) == {"unqualified_seller": 10, "sold_out": 10, "banned_goods": 10}
        assert promotions.enrolled_skus() == sorted({item["sku"] for item in items} - set(refused))
        assert retried > 5


class TestTheShopsDatabase:
    def test_importing_the_example_opens_nothing(self, tmp_path: Path) -> None:
        run(["-c", "import examples.promotions"], tmp_path, PROMOTIONS_DATABASE_URL="nonsense")
        assert list(tmp_path.iterdir()) == []

    def test_it_is_prepared_once_and_may_be_prepared_again(self, shop: Path) -> None:
        promotions.open_shop()
        promotions.prepare_shop(promotions.shop.engine())
        sellers = len(promotions.SELLERS)
        assert promotions.shop_counts() == {
            "campaigns": 0, "enrolments": 0, "price_list": 0, "promotions": 1, "sellers": sellers,
        }  # fmt: skip

    def test_threads_share_one_engine_even_if_all_ask_first(self, shop: Path) -> None:
        together = threading.Barrier(8)
        engines: list[sa.Engine] = []

        def ask() -> None:
            together.wait()
            engines.append(promotions.shop.engine())

        threads = [threading.Thread(target=ask) for _ in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert len(engines) == 8
        assert len({id(engine) for engine in engines}) == 1

    def test_after_close_the_next_use_opens_the_file_that_is_named_then(
        self, shop: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        perform(promotions.create_campaign, campaign(), "job-1")
        promotions.close_shop()
        monkeypatch.setenv("PROMOTIONS_DATABASE_URL", f"sqlite:///{tmp_path / 'other.db'}")
        assert promotions.campaign_codes() == []

    @pytest.mark.parametrize("url", ["sqlite://", "sqlite:///:memory:", "postgresql://localhost/shop"])
    def test_only_a_sqlite_file_will_do(self, url: str) -> None:
        with pytest.raises(ValueError, match=r"write sqlite:///promotions\.db"):
            promotions.make_engine(url)

    def test_several_processes_and_threads_at_once_make_one_row_per_code(self, shop: Path, tmp_path: Path) -> None:
        command = [sys.executable, "-W", "error", "-c", CROWD]
        crowd = [subprocess.Popen([*command, str(n)], cwd=tmp_path, stdout=subprocess.PIPE, text=True) for n in range(3)]
        made = [int(process.communicate(timeout=120)[0]) for process in crowd]
        assert [process.returncode for process in crowd] == [0, 0, 0]
        assert sum(made) == len(promotions.campaign_codes()) == 100


CROWD = """
import sys
from concurrent.futures import ThreadPoolExecutor
from datetime import date
from examples import promotions
from asynctask import NormalException
from asynctask.job import CurrentJob, set_current_job

def create(n):
    set_current_job(CurrentJob(f"job-{sys.argv[1]}-{n}"))
    try:
        promotions.create_campaign(promotions.Campaign(
            code=f"{n:03d}", title="Crowd", seller="Café Müller", starts_on=date(2026, 3, 5), ends_on=date(2026, 3, 6),
            budget=10, discount_percent=5))
    except NormalException:
        return 0
    return 1

with ThreadPoolExecutor(4) as threads:
    print(sum(threads.map(create, range(100))))
promotions.shop.close()
"""


def run(arguments: list[str], cwd: Path, **env: str) -> str:
    command = [sys.executable, "-W", "error", *arguments]
    done = subprocess.run(command, cwd=cwd, env=os.environ | env, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def big(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, untidy_sheet.Expected]:
    path = tmp_path_factory.mktemp("sheet") / "campaigns.xlsx"
    return path, untidy_sheet.write_sheet(path)


@pytest.fixture(scope="module")
def cells(big: tuple[Path, untidy_sheet.Expected]) -> list[tuple[Any, ...]]:
    """The sheet's rows as another library reads them; row 1 is at index 1."""
    book = openpyxl.load_workbook(big[0], read_only=True, data_only=True)
    try:
        return [(), *book["Campaigns"].iter_rows(values_only=True)]
    finally:
        book.close()


class TestTheSheet:
    def test_it_is_the_same_file_every_time(self, tmp_path: Path) -> None:
        one = untidy_sheet.write_sheet(tmp_path / "one.xlsx", 500)
        assert untidy_sheet.write_sheet(tmp_path / "two.xlsx", 500) == one
        assert (tmp_path / "one.xlsx").read_bytes() == (tmp_path / "two.xlsx").read_bytes()

    def test_it_is_the_same_file_in_another_process(self, tmp_path: Path) -> None:
        untidy_sheet.write_sheet(tmp_path / "one.xlsx", 300)
        said = run([str(ROOT / "examples" / "untidy_sheet.py"), "two.xlsx", "--rows", "300"], tmp_path, PYTHONHASHSEED="7")
        assert "300 rows" in said
        assert (tmp_path / "one.xlsx").read_bytes() == (tmp_path / "two.xlsx").read_bytes()

    def test_what_is_expected_adds_up(self, big: tuple[Path, untidy_sheet.Expected]) -> None:
        expected = big[1]
        assert (expected.rows, len(expected.rejected), len(expected.refused)) == (10_000, 150, 350)
        assert expected.accepted_rows == expected.rows - len(expected.rejected)
        assert len(expected.good_codes) == expected.accepted_rows - len(expected.refused)
        assert not set(expected.rejected) & set(expected.refused)
        assert set(expected.refused.values()) == set(untidy_sheet.REFUSALS)
        assert set(expected.duplicates) == {row for row, why in expected.refused.items() if why == "duplicate_code"}
        for row, first in expected.duplicates.items():
            assert first < row
            assert first not in expected.refused
            assert first not in expected.rejected

    def test_the_row_numbers_are_those_of_the_spreadsheet(
        self, big: tuple[Path, untidy_sheet.Expected], cells: list[tuple[Any, ...]]
    ) -> None:
        expected = big[1]
        filled = {n for n, row in enumerate(cells) if n > untidy_sheet.HEADER_ROW and not is_blank(row)}
        assert len(filled) == expected.rows
        assert set(expected.rejected) | set(expected.refused) <= filled
        codes = {n: str(cells[n][0] or "").strip() for n in filled}
        assert {codes[n] for n in filled - set(expected.rejected) - set(expected.refused)} == expected.good_codes
        for row, first in expected.duplicates.items():
            assert codes[row] == codes[first]
        for row, problems in expected.rejected.items():
            assert ("cell_error" in problems) == (cells[row][5] == "#N/A")
            assert (problems == ("missing",)) == (not codes[row])

    def test_it_is_untidy_in_every_way_it_promises(self, cells: list[tuple[Any, ...]]) -> None:
        assert cells[1][0].startswith("Campaigns spring 2026")
        assert is_blank(cells[2])
        assert cells[3] == untidy_sheet.HEADERS
        data = cells[4:]
        assert any(all(cell is None for cell in row) for row in data)
        assert any(is_blank(row) and any(row) for row in data), "a row of spaces only"
        texts = [cell for row in data for cell in row if isinstance(cell, str)]
        for sign in ("年", "/3/", "１", ",", "🔥", "さ", "é", "e\u0301", "\u3000", "\n", "=1+1"):
            assert any(sign in text for text in texts), sign
        assert any(text.startswith("00") for text in texts)
        assert max(map(len, texts)) > 2_000
        assert {type(row[3]) for row in data} == {str, datetime, type(None)}
        assert {type(row[0]) for row in data} == {str, int, type(None)}

    def test_formulas_carry_their_value_and_a_second_sheet_means_nothing(
        self, big: tuple[Path, untidy_sheet.Expected], cells: list[tuple[Any, ...]]
    ) -> None:
        book = openpyxl.load_workbook(big[0], read_only=True)
        try:
            assert len(book.sheetnames) == 2
            written = [row[5] for row in book["Campaigns"].iter_rows(values_only=True)]
        finally:
            book.close()
        formulas = [n for n, cell in enumerate(written, start=1) if str(cell).startswith("=ROUND")]
        assert len(formulas) > 500
        assert all(isinstance(cells[n][5], int | float) for n in formulas)

    @pytest.mark.parametrize("rows", [1, 2, 29, 60])
    def test_a_small_sheet_adds_up_too(self, tmp_path: Path, rows: int) -> None:
        expected = untidy_sheet.write_sheet(tmp_path / "small.xlsx", rows)
        assert expected.rows == rows
        assert len(expected.good_codes) == rows - len(expected.rejected) - len(expected.refused) >= 1

    @pytest.mark.parametrize("rows", [0, -1, 100_001])
    def test_an_absurd_number_of_rows_is_refused(self, tmp_path: Path, rows: int) -> None:
        with pytest.raises(ValueError, match="between 1 and 100000"):
            untidy_sheet.write_sheet(tmp_path / "none.xlsx", rows)


def is_blank(row: tuple[Any, ...]) -> bool:
    return all(cell is None or not str(cell).strip() for cell in row)


class TestSheetAndShopAgree:
    def test_about_the_rules(self) -> None:
        limits = {name: limit for name, qualified, limit in promotions.SELLERS if qualified}
        assert limits == untidy_sheet.SELLER_LIMITS

    def test_about_every_row_that_validation_lets_through(self, shop: Path) -> None:
        lines = [line for line in untidy_sheet.make_lines(2_000) if line.item is not None]
        outcomes = []
        for n, line in enumerate(lines):
            try:
                perform(promotions.create_campaign, promotions.Campaign.model_validate(line.item), f"job-{n}")
                outcomes.append("good")
            except NormalException as refusal:
                outcomes.append(refusal.code)
        assert outcomes == [line.kind for line in lines]
        assert Counter(outcomes) == {"good": 1_900} | dict.fromkeys(untidy_sheet.REFUSALS, 14)
        assert promotions.campaign_codes() == sorted(
            line.item["code"] for line in lines if line.item and line.kind == "good"
        )


class TestExpected:
    EXPECTED = untidy_sheet.Expected(
        rows=6,
        accepted_rows=5,
        rejected={9: ("missing",)},
        refused={5: "over_budget", 6: "duplicate_code", 7: "duplicate_code"},
        duplicates={6: 4, 7: 4},
        good_codes=frozenset({"a", "b"}),
    )

    @pytest.mark.parametrize("refused", [{5, 6, 7}, {5, 4, 7}, {5, 4, 6}])
    def test_any_one_of_the_rows_with_one_code_may_be_the_accepted_one(self, refused: set[int]) -> None:
        assert self.EXPECTED.disagreements(rejected=[9], refused=refused, codes=["a", "b"]) == []

    @pytest.mark.parametrize(
        ("outcome", "said"),
        [
            ({"rejected": []}, "rejected row 9: expected, but it is not there"),
            ({"rejected": [8, 9]}, "rejected row 8: not expected, but it is there"),
            ({"refused": [6, 7]}, "refused row 5: expected, but it is not there"),
            ({"refused": [5, 6, 7, 8]}, "refused row 8: not expected, but it is there"),
            ({"refused": [5, 6]}, "of rows [4, 6, 7], which share one code, 2 were accepted, not 1"),
            ({"refused": [4, 5, 6, 7]}, "of rows [4, 6, 7], which share one code, 0 were accepted, not 1"),
            ({"codes": ["a"]}, "campaign b: expected, but it is not there"),
            ({"codes": ["a", "b", "c"]}, "campaign c: not expected, but it is there"),
            ({"codes": ["a", "b", "b"]}, "campaign b exists 2 times"),
        ],
    )
    def test_whatever_differs_is_said(self, outcome: dict[str, Any], said: str) -> None:
        right: dict[str, Any] = {"rejected": [9], "refused": [5, 6, 7], "codes": ["a", "b"]}
        assert self.EXPECTED.disagreements(**right | outcome) == [said]


def test_the_price_list_is_exported_row_by_row(shop: Path) -> None:
    promotions.stock_price_list(5)
    promotions.stock_price_list(1_003)
    shards = promotions.price_list_shards(4)
    rows = [row for shard in shards for row in promotions.app.exports["export_price_list"](shard)]
    assert (len(shards), [row[0] for row in rows]) == (4, list(range(1, 1_004)))
    assert (len(rows), sum(row[-1] for row in rows)) == promotions.price_list_sum()
    assert {len(row) for row in rows} == {len(promotions.PRICE_COLUMNS)}
