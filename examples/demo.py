"""What ``asynctask demo`` does with the shop of ``promotions.py``: it hands lists in over HTTP, follows them as a frontend
does, and audits the outcome against the shop's own data. It uses the HTTP API alone, and no reader that it audits."""

from __future__ import annotations

import csv
import hashlib
import http.client
import json
import posixpath
import re
import secrets
import threading
import time
import zipfile
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from decimal import Decimal
from pathlib import Path
from typing import Any, Final
from urllib.parse import urlsplit
from xml.etree import ElementTree

from asynctask.errors import AsyncTaskError, InputError, Unavailable

_PRODUCTS: Final = 200
_STALLED_S: Final = 120.0


@dataclass(frozen=True)
class Followed:
    """A Task that was followed over HTTP to its end: its last progress, and the seconds since it was sent."""

    progress: dict[str, Any]
    seconds: float

    @property
    def rows(self) -> int:
        """Of a list, or of the file of an export."""
        if (result := self.progress["result"]) is not None:
            return int(result["rows"])
        return int(self.progress["counts"]["total"] + self.progress["split"]["rejected"])


class Demo:
    """One run: :meth:`send`, :meth:`follow`, :meth:`audit`, in this order.

    Arguments: ``url`` of the web server; ``folder`` for the files; the modules ``shop`` (``promotions.py``) and ``sheets``
    (``untidy_sheet.py``); ``rows`` of the sheet; ``prices``, rows of the price list, and the ``shards`` of its export.
    Errors are those of :class:`Api`.
    """

    def __init__(self, url: str, folder: Path, shop: Any, sheets: Any, *, rows: int, prices: int, shards: int) -> None:
        self._api, self._url, self._folder = Api(url), url, folder
        self._shop, self._sheets = shop, sheets
        self._rows, self._prices, self._shards = rows, prices, shards
        self._sheet, self._report, self._exported = (
            folder / name for name in ("campaigns.xlsx", "report.xlsx", "price-list.csv")
        )
        self._products: Sequence[Mapping[str, Any]] = []
        self._expected: Any = None

    def send(self, say: Callable[[str], None]) -> dict[int, float]:
        """Hands in both lists and the export; ``say`` gets a line before each. Returns when each Task was sent, by id."""
        say(f"Writing a sheet of {self._rows:,} rows, as untidy as people's are: {self._sheet}")
        self._expected = self._sheets.write_sheet(self._sheet, self._rows)
        self._products = self._shop.products(_PRODUCTS)
        say(f"Sending {len(self._products):,} products as JSON and the sheet as a form, to {self._url}\n")
        sent: dict[int, float] = {}
        body = {"worker": "enroll_product", "items": self._products, "title": "Products"}
        self._note(sent, self._api.post_json("/api/tasks", body))
        fields = {"worker": "create_campaign", "title": self._sheet.name}
        self._note(sent, self._api.post_file("/api/tasks", self._sheet, fields))
        self._shop.stock_price_list(self._prices)
        say(f"Exporting the price list, {self._prices:,} rows in {self._shards} shards\n")
        shards = self._shop.price_list_shards(self._shards)
        body = {"worker": "export_price_list", "shards": shards, "title": "Price list"}
        self._note(sent, self._api.post_json("/api/exports", body))
        return sent

    def _note(self, sent: dict[int, float], answer: Answer) -> None:
        sent[int(answer.json()["task_id"])] = time.monotonic()

    def follow(self, sent: Mapping[int, float], show: Callable[[dict[str, Any]], None]) -> list[Followed]:
        """Polls the Tasks until all are done, as a frontend does: with the ETag of the last answer. ``show`` gets each
        progress object. Raises :class:`Unavailable` if nothing moves for 120 s."""
        tags: dict[int, str] = {}
        seen: dict[int, dict[str, Any]] = {}
        done: dict[int, Followed] = {}
        pause, until = threading.Event(), time.monotonic() + _STALLED_S
        while len(done) < len(sent):
            for task_id in sent.keys() - done.keys():
                answer = self._api.get(f"/api/tasks/{task_id}", If_None_Match=tags.get(task_id, ""))
                if answer.status != 304:
                    tags[task_id], seen[task_id] = answer.headers.get("etag", ""), answer.json()
                    until = time.monotonic() + _STALLED_S
                show(seen[task_id])
                if seen[task_id]["done"]:
                    done[task_id] = Followed(seen[task_id], time.monotonic() - sent[task_id])
            if time.monotonic() > until:
                raise Unavailable(f"nothing has moved for {_STALLED_S:g} s; {self._folder}/services.log may say why")
            pause.wait(0.1)
        return [done[task_id] for task_id in sorted(done)]

    def audit(self, followed: Sequence[Followed]) -> dict[str, Any]:
        """Fetches the report and the exported file, and audits everything. Returns the command's document."""
        shop = self._shop
        enrolled, created, exported = (each.progress for each in followed)
        report = self._fetch_report(created["task_id"])
        self._exported.write_bytes(self._api.get(f"/api/tasks/{exported['task_id']}/result").body)
        findings = [
            *audit_products(enrolled, self._products, shop.planned_refusals(_PRODUCTS), shop.enrolled_skus()),
            *audit_campaigns(
                created,
                sheet_codes(self._sheet, self._sheets.HEADER_ROW),
                report,
                shop.campaign_codes(),
                self._expected,
            ),
            *audit_export(exported, self._exported, *shop.price_list_sum()),
        ]
        shop.shop.close()
        rejections = [{"message": error, "status": "rejected", "count": n} for error, n in report.rejections.items()]
        return {
            "ok": all(each.holds for each in findings),
            "tasks": [
                self._described(each, rejections if each.progress["task_id"] == created["task_id"] else [])
                for each in followed
            ],
            "retried": self._retried(enrolled["task_id"]),
            "audit": [{"claim": f.claim, "holds": f.holds, "contradictions": list(f.contradictions)} for f in findings],
            "report": str(self._report),
            "exported": str(self._exported),
        }

    def _described(self, each: Followed, rejections: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        task_id = each.progress["task_id"]
        return {
            "task_id": task_id,
            "title": each.progress["title"],
            "rows": each.rows,
            "seconds": round(each.seconds, 3),
            "rows_per_s": round(each.rows / each.seconds, 1),
            "errors": [*self._api.get(f"/api/tasks/{task_id}/errors").json()["errors"], *rejections],
            "progress": each.progress,
        }

    def _fetch_report(self, task_id: int) -> ReportRows:
        """The report of all rows that did not succeed, rejected ones included."""
        self._report.write_bytes(self._api.get(f"/api/tasks/{task_id}/report.xlsx?rows=failed").body)
        return read_report(self._report)

    def _retried(self, task_id: int) -> int:
        """The number of rows with more than one attempt."""
        events = self._api.get(f"/api/tasks/{task_id}/events?limit={_PRODUCTS}").json()["events"]
        return sum(event["attempt"] > 1 for event in events)


# -- audit: the ledger against the shop's data and the expectations of the sheet's author


@dataclass(frozen=True, slots=True)
class Finding:
    """One audited claim and its contradictions (none if it holds)."""

    claim: str
    contradictions: tuple[str, ...] = ()

    @property
    def holds(self) -> bool:
        return not self.contradictions


@dataclass(frozen=True, slots=True)
class ReportRows:
    """A downloaded report: row number -> status, row number -> text of the first column, rows that occur more than once,
    and the number of each error among the rejected rows."""

    statuses: Mapping[int, str]
    codes: Mapping[int, str]
    repeated: tuple[int, ...]
    rejections: Mapping[str, int] = field(default_factory=dict)


_MAIN: Final = "{http://schemas.openxmlformats.org/spreadsheetml/2006/main}"
_ID: Final = "{http://schemas.openxmlformats.org/officeDocument/2006/relationships}id"


def _sheets(path: Path) -> Iterator[dict[int, dict[str, str]]]:
    """The sheets of a workbook that this demo has written, each as row number -> column letters -> text. Uses the standard
    library only, not the audited readers."""
    with zipfile.ZipFile(path) as book:

        def part(name: str) -> ElementTree.Element:
            return ElementTree.fromstring(book.read(name))  # noqa: S314 - written by this program

        has_texts = "xl/sharedStrings.xml" in book.namelist()
        texts = ["".join(each.itertext()) for each in part("xl/sharedStrings.xml")] if has_texts else []
        targets = {each.get("Id"): each.get("Target", "") for each in part("xl/_rels/workbook.xml.rels")}
        for sheet in part("xl/workbook.xml").iter(f"{_MAIN}sheet"):
            rows: dict[int, dict[str, str]] = {}
            for row in part(posixpath.join("xl", targets[sheet.get(_ID)])).iter(f"{_MAIN}row"):
                found = {re.sub("[0-9]", "", cell.get("r", "")): _text(cell, texts) for cell in row}
                rows[int(row.get("r", "0"))] = {letters: text for letters, text in found.items() if text}
            yield rows


def _text(cell: ElementTree.Element, texts: Sequence[str]) -> str:
    """A cell as the shop reads a code: stripped, a whole number without a decimal point."""
    kind, value = cell.get("t"), cell.findtext(f"{_MAIN}v", "")
    if kind == "inlineStr":
        return "".join(cell.itertext()).strip()
    if kind == "s":
        return texts[int(value)].strip()
    if kind is None and value and float(value).is_integer():
        return str(int(float(value)))
    return value.strip()


def sheet_codes(path: Path, header_row: int) -> dict[int, str]:
    """Row number -> campaign code, of the sheet's non-blank rows; independent of the audited readers."""
    rows = next(_sheets(path))
    return {number: cells.get("A", "") for number, cells in rows.items() if number > header_row and cells}


def read_report(path: Path) -> ReportRows:
    """Reads a report. Its first column is the sheet's first."""
    statuses: dict[int, str] = {}
    codes: dict[int, str] = {}
    repeated: list[int] = []
    rejections: Counter[str] = Counter()
    for sheet in _sheets(path):
        head, *rows = sheet.values() or [{}]
        at = {header: column for column, header in head.items()}
        for row in rows:
            number = int(row[at["row"]])
            if number in statuses:
                repeated.append(number)
            statuses[number], codes[number] = row.get(at["status"], ""), row.get("A", "")
            if statuses[number] == "rejected":
                rejections[row.get(at["error"], "")] += 1
    return ReportRows(statuses, codes, tuple(repeated), rejections)


def _equal(what: str, found: Any, wanted: Any) -> list[str]:
    return [] if found == wanted else [f"{what}: {found}, not {wanted}"]


def _shortened(sentences: Iterable[str]) -> tuple[str, ...]:
    found = list(sentences)
    return (*found[:10], f"... and {len(found) - 10} more") if len(found) > 10 else tuple(found)


def audit_products(
    progress: Mapping[str, Any], products: Sequence[Mapping[str, Any]], planned: Collection[str], enrolled: Sequence[str]
) -> list[Finding]:
    """Arguments: the Task's progress; what was sent; the skus that the shop should refuse; the shop's enrolments."""
    counts = progress["counts"]
    wanted = {product["sku"] for product in products} - set(planned)
    wrong = [f"{sku} is enrolled though it was refused" for sku in sorted(set(enrolled) - wanted)]
    wrong += [f"{sku} is not enrolled" for sku in sorted(wanted - set(enrolled))]
    return [
        Finding(
            f"`finish` of the products, {counts['finish']:,}, is what the shop has enrolled",
            _shortened(_equal("enrolments", len(enrolled), counts["finish"])),
        ),
        Finding(
            f"every product is accounted for; the {counts['failed']:,} that were refused have no enrolment",
            _shortened(
                [
                    *_equal("finish + failed", counts["finish"] + counts["failed"], len(products)),
                    *_equal("failed", counts["failed"], len(planned)),
                    *wrong,
                ]
            ),
        ),
    ]


def audit_campaigns(
    progress: Mapping[str, Any], sheet: Mapping[int, str], report: ReportRows, codes: Sequence[str], expected: Any
) -> list[Finding]:
    """Arguments: the Task's progress; the codes by row of the sheet; the report of what did not succeed; the shop's
    campaigns; what the sheet's author expects (``Expected`` of the example)."""
    counts, rejected = progress["counts"], progress["split"]["rejected"]
    missing = Counter(sheet.values()) - Counter(codes)
    reported = Counter(sheet.get(row, "") for row in report.statuses)
    by_status = Counter(report.statuses.values())
    disagreements = expected.disagreements(
        rejected=[row for row, status in report.statuses.items() if status == "rejected"],
        refused=[row for row, status in report.statuses.items() if status != "rejected"],
        codes=codes,
    )
    return [
        Finding(
            f"`finish` of the campaigns, {counts['finish']:,}, is what the shop has created",
            _shortened(_equal("campaigns", len(codes), counts["finish"])),
        ),
        Finding(
            f"every row of the sheet, {expected.rows:,}, is accounted for",
            _shortened(
                [
                    *_equal("rows of the sheet", len(sheet), expected.rows),
                    *_equal("total + rejected", counts["total"] + rejected, expected.rows),
                    *_equal("finish + failed", counts["finish"] + counts["failed"], counts["total"]),
                ]
            ),
        ),
        Finding(
            f"the report, {len(report.statuses):,} rows, is the sheet less what the shop has",
            _shortened(
                [
                    *(f"row {row} stands in the report twice" for row in report.repeated),
                    *_differences(reported, missing),
                    *_equal("failed rows of the report", by_status["failed"], counts["failed"]),
                    *_equal("rejected rows of the report", by_status["rejected"], rejected),
                    *(
                        f"row {row} of the report has code {code!r}, the sheet {sheet.get(row)!r}"
                        for row, code in report.codes.items()
                        if code != sheet.get(row)
                    ),
                ]
            ),
        ),
        Finding("all of it is as the sheet's author expected, row by row", _shortened(disagreements)),
    ]


def audit_export(progress: Mapping[str, Any], path: Path, rows: int, total: Decimal) -> list[Finding]:
    """Arguments: the Task's progress; the downloaded file; the rows of the shop's table and the sum of its prices."""
    result = progress["result"] or {}
    with path.open("rb") as body:
        digest = hashlib.file_digest(body, "sha256").hexdigest()
    with path.open(encoding="utf-8-sig", newline="") as text:
        found = [(int(row["id"]), Decimal(row["price"])) for row in csv.DictReader(text)]
    return [
        Finding(
            f"the exported file has all {rows:,} rows of the price list, each once, and the same sum",
            _shortened(
                [
                    *_equal("rows", len(found), rows),
                    *_equal("different rows", len({key for key, _ in found}), rows),
                    *_equal("sum of the prices", sum((price for _, price in found), Decimal(0)), total),
                ]
            ),
        ),
        Finding(
            "the ledger says how many rows the file has, and its digest",
            _shortened([*_equal("rows", result.get("rows"), len(found)), *_equal("digest", result.get("sha256"), digest)]),
        ),
    ]


def _differences(reported: Counter[str], missing: Counter[str]) -> list[str]:
    sentences = [
        f"code {code!r} is not in the shop, and {n} row(s) of it not in the report"
        for code, n in (missing - reported).items()
    ]
    return sentences + [f"code {code!r} is in the report {n} time(s) too often" for code, n in (reported - missing).items()]


# -- HTTP client


@dataclass(frozen=True, slots=True)
class Answer:
    """A response: ``status``, ``headers`` (names in lower case) and the ``body`` as bytes."""

    status: int
    headers: Mapping[str, str]
    body: bytes

    def json(self) -> Any:
        return json.loads(self.body)


class Api:
    """Calls to one server, each on its own connection.

    Arguments: ``base``, e.g. ``http://127.0.0.1:8000/``; ``timeout`` in seconds. Raises :class:`Unavailable` if the server
    does not answer or answers 500 or more, :class:`InputError` with the detail for 400 or more. Ignores proxies of the
    environment: the server is local.
    """

    def __init__(self, base: str, *, timeout: float = 60.0) -> None:
        parts = urlsplit(base)
        self._host, self._port = parts.hostname or "127.0.0.1", parts.port or 80
        self._timeout = timeout

    def get(self, path: str, **headers: str) -> Answer:
        """GET; headers are keyword arguments with _ for -."""
        return self._call("GET", path, None, {name.replace("_", "-"): value for name, value in headers.items()})

    def post_json(self, path: str, value: Any) -> Answer:
        return self._call("POST", path, json.dumps(value).encode(), {"Content-Type": "application/json"})

    def post_file(self, path: str, file: Path, fields: Mapping[str, str]) -> Answer:
        """POST a file with form fields, as a browser's form does. The file is held in memory."""
        boundary = secrets.token_hex(16)
        parts = [_part(boundary, f'name="{name}"', value.encode()) for name, value in fields.items()]
        parts.append(_part(boundary, f'name="file"; filename="{file.name}"', file.read_bytes()))
        body = b"".join(parts) + f"--{boundary}--\r\n".encode()
        return self._call("POST", path, body, {"Content-Type": f"multipart/form-data; boundary={boundary}"})

    def _call(self, method: str, path: str, body: bytes | None, headers: Mapping[str, str]) -> Answer:
        connection = http.client.HTTPConnection(self._host, self._port, timeout=self._timeout)
        try:
            connection.request(method, path, body, dict(headers))
            response = connection.getresponse()
            answer = Answer(response.status, {k.lower(): v for k, v in response.getheaders()}, response.read())
        except (OSError, http.client.HTTPException) as error:
            raise Unavailable(f"http://{self._host}:{self._port} does not answer: {error}") from error
        finally:
            connection.close()
        if answer.status >= 400:
            raise _refusal(method, path, answer)
        return answer


def _part(boundary: str, disposition: str, content: bytes) -> bytes:
    return f"--{boundary}\r\nContent-Disposition: form-data; {disposition}\r\n\r\n".encode() + content + b"\r\n"


def _refusal(method: str, path: str, answer: Answer) -> AsyncTaskError:
    try:
        problem = answer.json()
        detail = str(problem.get("detail") or problem.get("title"))
    except (ValueError, AttributeError):
        detail = answer.body[:200].decode("utf-8", "replace")
    kind = Unavailable if answer.status >= 500 else InputError
    return kind(f"{method} {path}: {answer.status}: {detail}")
