"""What is kept of an item: the input of its model, from which the worker builds it once for each attempt."""

from __future__ import annotations

import base64
import csv
import io
import json
from collections.abc import Callable
from dataclasses import dataclass
from datetime import date
from decimal import Decimal
from typing import Annotated, Any
from uuid import UUID, uuid4

import openpyxl
import pydantic.dataclasses
import pytest
from pydantic import (
    AfterValidator,
    AliasChoices,
    AliasPath,
    Base64Bytes,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    Json,
    RootModel,
    Secret,
    SecretBytes,
    SecretStr,
    field_validator,
    model_validator,
)
from support.charges import GIVEN, SHOWN, Charge, charge, check_events
from support.webshop import client_of
from support.world import World

from asynctask import AsyncTask, NormalException
from asynctask.errors import ConfigError, InputError
from asynctask.lists.items import ItemShape, Rejected, UnfitItem
from asynctask.lists.readers import RawRow
from asynctask.reports.files import iter_csv
from asynctask.testing import wait_for

pytestmark = pytest.mark.one_database(reason="what is kept of an item is the same on each database")


@pytest.fixture
def app(world: World) -> AsyncTask:
    app = world.app()
    app.worker(name="charge", retry=0, unique="note")(_annotated(charge, Charge))

    return app


def _annotated(function: Callable[[Any], Any], model: type[BaseModel]) -> Callable[[Any], Any]:
    def perform(item: Any) -> Any:
        return function(item)

    perform.__annotations__ = {"item": model}
    return perform


def performed(world: World, app: AsyncTask, worker: str, *given: Any, **options: Any) -> list[dict[str, Any]]:
    task = app.submit(worker, list(given), **options)
    with world.working(app):
        task.wait(timeout=60)
    found: list[dict[str, Any]] = task.events()
    return found


# -- lists and single jobs


def test_a_worker_gets_the_item_as_it_was_given_in_a_list_and_alone(world: World, app: AsyncTask) -> None:
    task = app.submit("charge", [GIVEN])
    lone = [app.workers["charge"].perform_async(GIVEN), app.perform("charge", GIVEN)]
    answer = client_of(app).post("/api/jobs", json={"worker": "charge", "item": GIVEN})
    assert answer.status_code == 202
    with world.working(app):
        task.wait(timeout=60)
        assert all(each["status"] == "finish" for each in map(_ended(app), [*lone, answer.json["job_id"]]))
    check_events(task.events())
    singles = [app.event(str(each)) for each in (*lone, answer.json["job_id"])]
    check_events([{**each, "params": each["params"][0]} for each in singles])


def _ended(app: AsyncTask) -> Callable[[Any], dict[str, Any]]:
    def event(job_id: Any) -> dict[str, Any]:
        wait_for(lambda: app.event(str(job_id))["status"] == "finish", "it ends")
        return app.event(str(job_id))

    return event


def test_every_attempt_builds_the_model_of_the_same_input(world: World) -> None:
    """Without the drawn values kept: another ``ref`` for each attempt."""
    app, seen = world.app(), list[tuple[int, UUID]]()

    @app.worker(name="third", retry=2, retry_in=lambda *_: 0.01)
    def shaky(item: Charge) -> None:
        seen.append((item.price, item.ref))
        if len(seen) < 3:
            raise ValueError("not yet")

    (event,) = performed(world, app, "third", GIVEN)
    assert (event["status"], len(seen), len(set(seen))) == ("finish", 3, 1)
    assert seen[0][0] == 1000


def test_items_of_a_slice_are_built_once_too(world: World, app: AsyncTask) -> None:
    app.worker(name="each", retry=0)(_annotated(charge, Charge))
    check_events(performed(world, app, "each", GIVEN, GIVEN, GIVEN, chunk_size=3))


def test_a_mixed_list_keeps_the_input_and_the_key_of_each_worker(world: World, app: AsyncTask) -> None:
    class Serial(BaseModel):
        serial: Annotated[str, AfterValidator(str.lower)]

    app.worker(name="keyed", key="serial", retry=0)(_annotated(lambda item: item.serial, Serial))
    task = app.submit_jobs([("charge", GIVEN), ("keyed", {"serial": "A-1"}), ("keyed", {"serial": " "})])
    with world.working(app):
        task.wait(timeout=60)
    first, second = task.events()
    check_events([first])
    assert (second["params"], second["result"]) == ({"serial": "A-1"}, "a-1")
    (refused,) = task.rejects()
    assert refused["errors"][0]["code"] == "missing"


# -- instances


class Text(BaseModel):
    data: Json[dict[str, int]]
    blob: Base64Bytes
    secret: Secret[int]
    raw: SecretBytes
    tags: frozenset[str] = frozenset()
    money: Decimal = Decimal(0)


def test_an_instance_is_kept_by_what_builds_an_equal_one(world: World) -> None:
    app, got = world.app(), list[Text]()
    app.worker(name="take", retry=0)(_annotated(got.append, Text))
    given = Text(
        data='{"a": 1}',
        blob=base64.b64encode(b"hi"),
        secret=Secret[int](7),
        raw=SecretBytes(b"seven"),
        tags=frozenset({"x", "y"}),
        money=Decimal("1.10"),
    )
    (event,) = performed(world, app, "take", given)
    assert got == [given]
    assert event["params"]["secret"] == event["params"]["raw"] == SHOWN["password"]


def test_an_instance_that_its_validators_change_again_is_refused_by_its_field(app: AsyncTask) -> None:
    with pytest.raises(InputError, match="price: is an instance of Charge") as caught:
        app.workers["charge"].perform_async(Charge(**GIVEN))
    assert [problem.column for problem in caught.value.errors] == ["price"]
    assert GIVEN["password"] not in str(caught.value.errors)
    task = app.submit("charge", [Charge(**GIVEN), GIVEN])
    (refused,) = task.rejects()
    assert (refused["row"], refused["errors"][0]["column"]) == (1, "price")
    assert refused["cells"]["password"] == SHOWN["password"]


def test_an_instance_of_another_class_is_an_object_of_its_fields(world: World, app: AsyncTask) -> None:
    class Posted(BaseModel):
        price: int
        password: SecretStr
        day: str
        note: str = Field(exclude=True)
        unknown: str = "left out"

    check_events(performed(world, app, "charge", Posted(**GIVEN)))


def test_the_idempotency_key_tells_two_secrets_apart(app: AsyncTask) -> None:
    class Login(BaseModel):
        password: SecretStr

    app.worker(name="login")(_annotated(charge, Login))
    app.submit("login", [Login(password=SecretStr("a"))], idempotency_key="k")
    with pytest.raises(InputError, match="key"):
        app.submit("login", [Login(password=SecretStr("b"))], idempotency_key="k")


# -- validators and names


class Odd(BaseModel):
    model_config = ConfigDict(extra="allow")
    sku: str = Field(alias="Article No")
    count: int = Field(1, validation_alias=AliasChoices("n", "qty"))
    deep: int = Field(0, validation_alias=AliasPath("inner", "deep"))
    tags: Annotated[list[str], BeforeValidator(lambda said: said.split(";") if isinstance(said, str) else said)] = []

    @model_validator(mode="before")
    @classmethod
    def from_raw(cls, said: Any) -> Any:
        return {**said, "sku": said["raw"].upper()} if "raw" in said else said


@pytest.mark.parametrize(
    ("given", "built"),
    [
        ({"Article No": "a", "qty": 3}, {"sku": "a", "count": 3}),
        ({"raw": "a"}, {"sku": "A", "raw": "a"}),
        ({"sku": "a", "tags": "x;y", "more": {"b": 1}}, {"sku": "a", "tags": ["x", "y"], "more": {"b": 1}}),
        ({"sku": "a", "inner": {"deep": 4}}, {"sku": "a", "deep": 4}),
    ],
)
def test_the_keys_of_the_sender_are_kept(world: World, given: dict[str, Any], built: dict[str, Any]) -> None:
    app, got = world.app(), list[dict[str, Any]]()
    app.worker(name="take", retry=0)(_annotated(lambda item: got.append(item.model_dump()), Odd))
    (event,) = performed(world, app, "take", given)
    assert event["params"] == given
    assert got == [{"count": 1, "deep": 0, "tags": [], **built}]


def test_what_a_model_ignores_is_not_kept(world: World, app: AsyncTask) -> None:
    (event,) = performed(world, app, "charge", {**GIVEN, "comment": "x" * 100})
    assert "comment" not in event["params"]


def test_equal_values_are_those_of_the_model(app: AsyncTask) -> None:
    class Mail(BaseModel):
        address: Annotated[str, AfterValidator(str.lower)] = Field(alias="E-Mail")

    app.worker(name="mail", unique="address")(_annotated(charge, Mail))
    task = app.submit("mail", [{"E-Mail": "A@b"}, {"address": "a@B"}])
    assert [(each["row"], each["errors"][0]["code"]) for each in task.rejects()] == [(2, "duplicate_in_upload")]


def test_a_number_that_json_lacks_refuses_its_row(app: AsyncTask) -> None:
    """Without the check orjson writes null, and the worker gets None."""

    class Loose(BaseModel):
        value: Any

    @dataclass
    class Part:
        size: float

    app.worker(name="loose")(_annotated(charge, Loose))
    for given in (float("nan"), [1, {"a": float("inf")}], Part(float("nan"))):
        found = app.workers["loose"].shape.validate(RawRow(1, {"value": given}), None)  # type: ignore[union-attr]
        assert isinstance(found, Rejected)
        assert found.problems[0].column == "value"
        with pytest.raises(InputError):
            app.workers["loose"].perform_async({"value": given})
    with pytest.raises(InputError, match="item 1"):
        app.submit_items("loose", [{"value": float("nan")}])


# -- models whose input cannot be kept


class Handle:
    pass


def test_a_model_that_no_json_builds_is_refused_at_declaration(app: AsyncTask) -> None:
    class Held(BaseModel):
        model_config = ConfigDict(arbitrary_types_allowed=True)
        handle: Handle

    class ReadyJobs(BaseModel):
        lines: list[Held]

    class Call(BaseModel):
        call: Callable[[], int]

    class Made(BaseModel):
        model_config = ConfigDict(arbitrary_types_allowed=True)
        handle: Annotated[Handle, BeforeValidator(lambda _: Handle())]
        spare: Handle | None = None

    for model, field in ((Held, "handle"), (ReadyJobs, "lines.handle"), (Call, "call")):
        with pytest.raises(ConfigError, match=f"field {field}, which is required"):
            app.worker(name=model.__name__)(_annotated(charge, model))
    app.worker(name="made")(_annotated(charge, Made))


# -- secrets


class Login(BaseModel):
    user: str
    password: SecretStr = Field(alias="Pass word", min_length=4)
    keys: list[SecretStr] = []

    @field_validator("user")
    @classmethod
    def known(cls, user: str) -> str:
        if user == "nobody":
            raise ValueError("no such user")
        return user


SHEET = "User;Pass word\na;hunter2-a\nnobody;hunter2-b\nc;hun\nd;**********\n"


def test_secrets_are_masked_wherever_people_look(world: World) -> None:
    app = world.app()

    @app.worker(name="login", retry=0)
    def login(item: Login) -> None:
        raise NormalException(f"{item.user} of {len(item.password.get_secret_value())}")

    client = client_of(app)
    dry = client.post(
        "/api/tasks", data={"file": (io.BytesIO(SHEET.encode()), "a.csv"), "worker": "login", "dry_run": "true"}
    )
    made = client.post("/api/tasks", data={"file": (io.BytesIO(SHEET.encode()), "a.csv"), "worker": "login"})
    task_id = made.json["task_id"]
    lists = client.post(
        "/api/tasks", json={"worker": "login", "items": [{"user": "e", "password": "hunter2-e", "keys": ["hunter2"]}]}
    )
    with world.working(app):
        app.task(task_id).wait(timeout=60)
        app.task(lists.json["task_id"]).wait(timeout=60)
    (event,) = app.task(task_id).events()
    assert event["added_messages"][-1]["message"] == "Failed: a of 9"
    answers = [dry, made, lists]
    for task in (task_id, lists.json["task_id"]):
        answers += [client.get(f"/api/tasks/{task}/{path}") for path in ("events", "errors", "rejected", "log")]
        answers += [client.get(f"/api/tasks/{task}/report.csv?rows=all"), client.get(f"/api/jobs/{event['job_id']}")]
        book = openpyxl.load_workbook(io.BytesIO(client.get(f"/api/tasks/{task}/report.xlsx?rows=all").data))
        answers.append(json.dumps([list(map(str, row)) for sheet in book for row in sheet.iter_rows(values_only=True)]))
    for each in answers:
        said = each if isinstance(each, str) else each.get_data(as_text=True)
        assert "hunter2" not in said
        assert '"hun"' not in said
    codes = {each["row"]: each["errors"][0]["code"] for each in app.task(task_id).rejects()}
    assert codes == {3: "invalid", 4: "too_short", 5: "masked_secret"}
    assert "$secret" not in json.dumps([each.get_data(as_text=True) for each in answers if not isinstance(each, str)])


def test_a_report_that_comes_back_unchanged_asks_for_its_secrets(world: World) -> None:
    app = world.app()

    @app.worker(name="login", retry=0)
    def login(item: Login) -> None:
        raise NormalException("no")

    stored = app.uploads.store(io.BytesIO(SHEET.encode()), "a.csv")
    made = app.submit_file("login", stored)
    with world.working(app):
        made.wait(timeout=60)
    report = made.report(rows="failed")
    rows = list(csv.reader(io.StringIO(b"".join(iter_csv(report.headers, report.rows)).decode("utf-8-sig"))))
    assert rows[1][:2] == ["a", SHOWN["password"]]
    again = app.uploads.store(io.BytesIO("\n".join(";".join(row[:2]) for row in rows).encode()), "again.csv")
    with pytest.raises(InputError) as caught:
        app.submit_file("login", again)
    masked = [problem for problem in caught.value.errors if problem.code == "masked_secret"]
    assert [(problem.row, problem.column) for problem in masked] == [(row, "Pass word") for row in range(2, 6)]


def test_a_secret_is_no_key_and_stands_in_no_other_field(app: AsyncTask) -> None:
    with pytest.raises(ConfigError, match="holds a secret"):
        app.worker(name="keyed", key="password")(_annotated(charge, Charge))

    class Loose(BaseModel):
        value: Any

    app.worker(name="loose")(_annotated(charge, Loose))
    with pytest.raises(InputError, match="declared as one"):
        app.workers["loose"].perform_async({"value": SecretStr("hunter2")})
    with pytest.raises(InputError) as caught:
        app.submit("loose", [{"value": SecretStr("hunter2")}], strict=True)
    assert "declared as one" in caught.value.errors[0].message


def test_nested_secrets_hide_their_whole_field() -> None:
    class Account(BaseModel):
        host: str
        login: Login | None

    class Site(BaseModel):
        name: str
        accounts: list[Account]

    shape = ItemShape(Site)
    assert shape.secrets == {"accounts"}
    given = {"name": "a", "accounts": [{"host": "h", "login": {"user": "u", "Pass word": "hunter2"}}]}
    found = shape.validate(RawRow(1, given), None)
    assert not isinstance(found, Rejected)
    assert found.values == {"name": "a", "accounts": {"$secret": given["accounts"]}}
    assert shape.revive(found.values).accounts[0].login.password.get_secret_value() == "hunter2"


# -- what is no list


@pytest.mark.parametrize("given", [{"sku": 1}, "abc", b"abc", Login(**{"user": "a", "Pass word": "hunter2"})])
def test_one_item_is_no_list_of_items(app: AsyncTask, given: Any) -> None:
    for submit in (app.submit, app.submit_items, app.submit_export):
        with pytest.raises(InputError, match=r"put a single one in a list: \[item\]") as caught:
            submit("charge", given)
        assert "hunter2" not in str(caught.value)
    with pytest.raises(InputError, match="in a list"):
        app.submit_jobs(given)
    with pytest.raises(InputError, match="in a list"):
        app.workers["charge"].perform_bulk(given)
    assert app.tasks() == []


def test_one_name_is_one_field(app: AsyncTask) -> None:
    assert app.workers["charge"].unique == ("note",)
    task = app.submit("charge", [GIVEN, GIVEN])
    assert [each["row"] for each in task.rejects()] == [2]
    worker = app.worker(name="one", failed_on=KeyError, checks=lambda *_: None)(_annotated(charge, Charge))
    assert (worker.failed_on, len(worker.checks)) == ((KeyError,), 1)


# -- instances within items, and of subclasses


class Line(BaseModel):
    price: Annotated[int, AfterValidator(lambda said: said * 100)] = 1
    note: str = ""


class Order(BaseModel):
    line: Line
    lines: list[Line] = []
    by_name: dict[str, Line] = {}


class LongLine(Line):
    more: int = 2


@pydantic.dataclasses.dataclass
class Part:
    price: Annotated[int, AfterValidator(lambda said: said * 100)]


class Machine(BaseModel):
    part: Part


@pytest.mark.parametrize(
    ("model", "given", "column"),
    [
        (Line, LongLine(price=3), "price"),
        (Order, {"line": Line(price=3)}, "line"),
        (Order, {"line": LongLine(price=3)}, "line"),
        (Order, {"line": {"price": 3}, "lines": [{"price": 3}, Line(price=3)]}, "lines"),
        (Order, {"line": {"price": 3}, "by_name": {"a": Line(price=3)}}, "by_name"),
        (Machine, {"part": Part(price=3)}, "part"),
    ],
)
def test_an_instance_within_an_item_or_of_a_subclass_is_not_validated_twice(
    model: type[BaseModel], given: Any, column: str
) -> None:
    """Without the comparison of what is built: 30000 in the worker."""
    found = ItemShape(model).validate(RawRow(1, given), None)
    assert isinstance(found, Rejected)
    assert [(each.column, each.text) for each in found.problems] == [(column, "instance")]


def test_an_instance_within_an_item_that_is_built_equal_is_kept() -> None:
    class Plain(BaseModel):
        day: date
        password: SecretStr

    class Outer(BaseModel):
        plain: Plain
        count: int = 0

        @model_validator(mode="after")
        def later(self) -> Outer:
            self.plain.day = date(2026, 3, 6)
            return self

    Outer.model_rebuild(_types_namespace=locals())
    shape = ItemShape(Outer)
    found = shape.validate(RawRow(1, {"plain": Plain(day=date(2026, 3, 5), password=SecretStr("hunter2"))}), None)
    assert not isinstance(found, Rejected)
    assert shape.revive(found.values).plain == Plain(day=date(2026, 3, 6), password=SecretStr("hunter2"))

    class Longer(Plain):
        more: int = 1

    kept = ItemShape(Plain).validate(RawRow(1, Longer(day=date(2026, 3, 5), password=SecretStr("x"))), None)
    assert not isinstance(kept, Rejected)
    assert kept.values == {"day": "2026-03-05", "password": {"$secret": "x"}}


# -- what a model makes of an input need not be JSON


class Made(BaseModel):
    model_config = ConfigDict(arbitrary_types_allowed=True)
    blob: Base64Bytes = b""
    rate: Annotated[float, AfterValidator(lambda said: float("inf") if said else 0.0)] = 0.0
    handle: Annotated[object, BeforeValidator(lambda _: object())] = None


@pytest.mark.parametrize(("field", "value"), [("blob", base64.b64encode(b"\xff").decode()), ("rate", 1), ("handle", 1)])
def test_a_value_that_cannot_be_compared_refuses_its_row_only(app: AsyncTask, field: str, value: Any) -> None:
    """Without it the submission raises TypeError."""
    app.worker(name="made")(_annotated(charge, Made))
    task = app.submit("made", [{field: value}, {}], unique=field)
    (refused,) = task.rejects()
    assert (refused["row"], refused["errors"][0]["column"], refused["errors"][0]["code"]) == (1, field, "invalid")


def test_a_validator_that_forgets_to_return_the_model_is_no_crash_of_the_list(app: AsyncTask) -> None:
    class Forgetful(BaseModel):
        ref: UUID = Field(default_factory=uuid4)

        @model_validator(mode="after")
        def check(self) -> Any:
            pass

    shape = ItemShape(Forgetful)
    found = shape.validate(RawRow(1, {}), None)
    assert not isinstance(found, Rejected)
    assert shape.revive(found.values) is None


# -- masks that come back, and secrets under other names


@pytest.mark.parametrize(
    ("given", "column"),
    [
        (Login(**{"user": "a", "Pass word": "**********"}), "password"),
        ({"user": "a", "Pass word": SecretStr("**********")}, "Pass word"),
        ({"user": "a", "Pass word": b"**********"}, "Pass word"),
        ({"user": "a", "Pass word": " **********\n"}, "Pass word"),
        ({"user": "a", "Pass word": "hunter2", "keys": ["hunter2", "**********"]}, "keys"),
        ({"user": "a", "Pass word": "hunter2", "keys": [SecretStr("**********")]}, "keys"),
    ],
)
def test_a_mask_is_no_secret_in_any_form(given: Any, column: str) -> None:
    found = ItemShape(Login).validate(RawRow(1, given), None)
    assert isinstance(found, Rejected)
    assert [(each.column, each.code) for each in found.problems] == [(column, "masked_secret")]
    assert "hunter2" not in str(found)


class Strict(Login):
    model_config = ConfigDict(extra="forbid")


@pytest.mark.parametrize("model", [Login, Strict])
@pytest.mark.parametrize("name", ["PASS WORD", "Pass  Word", "Password"])
def test_a_secret_under_a_name_in_another_spelling_is_masked(model: type[BaseModel], name: str) -> None:
    found = ItemShape(model).validate(RawRow(1, {"user": "a", name: "hunter2"}), None)
    assert isinstance(found, Rejected)
    assert "hunter2" not in str(found)


def test_a_column_of_secrets_that_another_one_replaces_is_masked() -> None:
    shape = ItemShape(Login, {"PW": "password"})
    cells = {"user": "a", "PW": "x", "Pass word": "hunter2"}
    found = shape.validate(RawRow(2, cells), shape.bind(list(cells)))
    assert isinstance(found, Rejected)
    assert "hunter2" not in str(found)


def test_a_model_with_secrets_under_any_name_is_refused_at_declaration(app: AsyncTask) -> None:
    class Rest(BaseModel):
        model_config = ConfigDict(extra="allow")
        __pydantic_extra__: dict[str, SecretStr]

    for model in (Rest, RootModel[dict[str, SecretStr]]):
        with pytest.raises(ConfigError, match="under names that no field has"):
            app.worker(name="rest")(_annotated(charge, model))


class Told(BaseModel):
    secret: Annotated[SecretStr, BeforeValidator(lambda said: _too_short(said))] = SecretStr("")
    pins: list[Secret[Annotated[int, BeforeValidator(lambda said: _too_short(said))]]] = []
    note: str = ""

    @model_validator(mode="before")
    @classmethod
    def whole(cls, said: Any) -> Any:
        return _too_short(said["secret"]) if said.get("note") else said


def _too_short(said: Any) -> Any:
    raise ValueError(f"{said!r} is too short")


@pytest.mark.parametrize(
    "given",
    [
        {"secret": "hunter2"},
        {"secret": b"hunter2"},
        {"pins": [770077, "hunter2"]},
        {"secret": "hunter2", "note": "x"},
        {"SECRET": "hunter2", "secret": "hunter2+", "pins": [770077]},
    ],
)
def test_a_validator_that_says_the_secret_does_not_tell_it(given: dict[str, Any]) -> None:
    found = ItemShape(Told).validate(RawRow(1, given), None)
    assert isinstance(found, Rejected)
    assert "too short" in found.problems[0].message
    assert not any(secret in str(found) for secret in ("hunter2", "770077"))
    with pytest.raises(UnfitItem, match="too short") as caught:
        ItemShape(Told).revive({key: {"$secret": _json(each)} for key, each in given.items() if key != "note"})
    assert not any(secret in str(caught.value) for secret in ("hunter2", "770077"))


def _json(said: Any) -> Any:
    return said.decode() if isinstance(said, bytes) else said


def test_an_instance_with_bytes_that_are_no_text_is_refused_by_its_field() -> None:
    """Without it the whole list fails with UnicodeDecodeError."""

    class Raw(BaseModel):
        raw: bytes
        count: int = 0

    found = ItemShape(Raw).validate(RawRow(1, Raw(raw=b"\xff")), None)
    assert isinstance(found, Rejected)
    assert found.problems[0].text == "instance"
