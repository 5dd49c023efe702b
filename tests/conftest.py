"""What every test can use. That this file is here puts its folder on ``sys.path``: ``from support.x import y``."""

import gc
import os
import signal
import zlib
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import structlog
from hypothesis import settings
from support.databases import KINDS, Databases, Store
from support.rabbit import shared_rabbit
from support.redis_ruby import Desk, RubyDesk
from support.routes import compile_late
from support.servers import REDIS_RELEASES, RedisServer
from support.statements import share_statements
from support.world import World

# A test of correctness has no limit of time: a machine that is busy would fail it.
settings.register_profile("untimed", deadline=None)
settings.load_profile("untimed")

share_statements()
compile_late()


@pytest.fixture(scope="session")
def databases() -> Iterator[Databases]:
    """The database servers of the whole run, each started when it is first needed."""
    found = Databases()
    yield found
    found.close()


@pytest.fixture(scope="session")
def fragile() -> Iterator[Databases]:
    """Servers of their own for tests that stop, kill and strangle them."""
    found = Databases()
    yield found
    found.close()


@pytest.fixture
def store(databases: Databases, database_kind: str, tmp_path: Path) -> Iterator[Store]:
    """A database of the test's own: a test that asks for it runs once on each kind."""
    found = databases.fresh(database_kind, tmp_path)
    yield found
    found.close()


@pytest.fixture(scope="session")
def redis_server(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Iterator[RedisServer]:
    """A private redis-server for the whole run; who uses it empties it, or takes a namespace of its own."""
    server = RedisServer(tmp_path_factory.mktemp("redis"), getattr(request, "param", "redis7"))
    server.start()
    yield server
    server.stop()


@pytest.fixture(scope="session")
def rabbit_url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The address of a private RabbitMQ, one for all processes of the run; who uses it takes queues of its own."""
    folder = tmp_path_factory.getbasetemp()
    with shared_rabbit(folder.parent if "PYTEST_XDIST_WORKER" in os.environ else folder) as url:
        yield url


@pytest.fixture(scope="session")
def ruby_desk(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RubyDesk]:
    """Ruby's own Sidekiq for the whole run."""
    with RubyDesk(tmp_path_factory.mktemp("desk")) as made:
        yield made


@pytest.fixture
def desk(ruby_desk: RubyDesk, redis_server: RedisServer) -> Desk:
    """Ruby's own Sidekiq at the server of the test."""
    return partial(ruby_desk, redis_server.url)


@pytest.fixture
def redis_release() -> str:
    """Which Redis a test starts that starts its own; another where its module is marked ``redis_releases``."""
    return "redis7"


@pytest.fixture
def broker_kind() -> str:
    """Where the jobs of a world wait: ``sql``, or ``redis`` for a test that is parametrized so."""
    return "sql"


@pytest.fixture
def world(tmp_path: Path, store: Store, broker_kind: str, request: pytest.FixtureRequest) -> Iterator[World]:
    """A folder with a ledger of its own; its processes end with the test."""
    broker_url = ""
    if broker_kind == "redis":
        server: RedisServer = request.getfixturevalue("redis_server")
        with server.client() as client:
            client.flushall()
        broker_url = server.url
    found = World(tmp_path, store, broker_url)
    yield found
    found.close()


@pytest.fixture(autouse=True)
def logging_as_before() -> Iterator[None]:
    """A command of the program that a test calls in this process sends the log to a stream that ends with the call."""
    yield
    structlog.reset_defaults()


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """A test with a database runs on each kind, or on those that its marker ``databases`` names; one that is marked
    ``redis_releases`` on each of them, or with ``one_redis`` on one, see below."""
    if any(map(metafunc.definition.get_closest_marker, ("redis_releases", "one_redis"))):
        if "redis_server" in metafunc.fixturenames:
            metafunc.parametrize("redis_server", REDIS_RELEASES, indirect=True, scope="session")
        elif "redis_release" in metafunc.fixturenames:
            metafunc.parametrize("redis_release", REDIS_RELEASES)
    if "database_kind" in metafunc.fixturenames:
        marker = metafunc.definition.get_closest_marker("databases")
        metafunc.parametrize("database_kind", marker.args if marker else KINDS)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Of what is marked ``one_database`` each test, with each of its parameters, stays on one kind, drawn by its name, but
    for a test marked ``each_database``; of what is marked ``one_redis`` on one release; none marked ``full``, and of a
    class marked ``chosen`` those that it names; of what is marked ``one_of`` one value of a parameter. What is left of a
    test with parameters on several kinds is spread."""
    if config.getoption("sqlite_alone"):
        items[:] = [item for item in items if _is_of_sqlite_alone(item)]
    elif not config.getoption("every_database"):
        items[:] = _spread(_one_of([item for item in items if _is_drawn(item)]))


SERVED = {"databases", "fragile", "rabbit_url", "redis_server", "redis_release", "ruby_desk", "ruby", "browser"}
"""Fixtures that start a server or another program."""


def _is_of_sqlite_alone(item: pytest.Item) -> bool:
    """Whether it starts no server: its database, if it has one, is a file, and its jobs do not wait in Redis."""
    params = getattr(getattr(item, "callspec", None), "params", {})
    if params.get("database_kind", "sqlite") != "sqlite" or params.get("broker_kind") == "redis":
        return False
    # A store of SQLite needs what starts servers and has none started.
    served = SERVED - {"databases"} if "store" in getattr(item, "fixturenames", ()) else SERVED
    return served.isdisjoint(getattr(item, "fixturenames", ()))


def _is_drawn(item: pytest.Item) -> bool:
    chosen = [*item.iter_markers("chosen")][-1:]  # of a class's and those of its bases, which come first, its own
    if item.get_closest_marker("full") is not None or any(getattr(item, "originalname", "") not in c.args for c in chosen):
        return False
    called = getattr(item, "callspec", None)
    if called is None:
        return True
    among: dict[str, tuple[str, ...]] = {}
    # A test with Redis and without it runs on each database without it only: beside Redis the ledger does the same.
    one = item.get_closest_marker("one_database") is not None and item.get_closest_marker("each_database") is None
    if called.params.get("broker_kind") == "redis" or one:
        marker = item.get_closest_marker("databases")
        among["database_kind"] = marker.args if marker else KINDS
    if item.get_closest_marker("one_redis") is not None:
        among |= dict.fromkeys(("redis_server", "redis_release"), REDIS_RELEASES)
    return all(_is_its(item, called, called.params[name], of) for name, of in among.items() if name in called.params)


def _is_its(item: pytest.Item, called: Any, value: str, among: tuple[str, ...]) -> bool:
    """Whether this one of several is drawn by the name of the test, the same one in each run. Of the databases a third of
    what falls to a server goes to the file, which costs half of what a server does."""
    words = f"{getattr(item, 'originalname', item.name)} {called.id.replace(value, '')}"
    turn, at = divmod(zlib.crc32(words.encode()), len(among))
    drawn = "sqlite" if "sqlite" in among and turn % 3 == 0 else among[at]
    return bool(drawn == value)


def _one_of(items: list[pytest.Item]) -> list[pytest.Item]:
    """Of what is marked ``one_of`` each test, with each of its other parameters, with one value of those that are named:
    the first by the name of the test, the next ones in turn."""
    tests: dict[str, dict[str, list[pytest.Item]]] = {}
    for item in items:
        marker = item.get_closest_marker("one_of")
        params = getattr(getattr(item, "callspec", None), "params", {})
        names = {"database_kind", *(marker.args if marker else ())}
        if marker and not names.isdisjoint({*params} - {"database_kind"}):
            others = sorted((key, repr(value)) for key, value in params.items() if key not in names)
            tests.setdefault(item.nodeid.partition("[")[0], {}).setdefault(str(others), []).append(item)
    left_out = set[pytest.Item]()
    for words, groups in tests.items():
        for turn, group in enumerate(groups.values(), zlib.crc32(words.encode())):
            left_out |= {*group} - {group[turn % len(group)]}
    return [item for item in items if item not in left_out]


def _spread(items: list[pytest.Item]) -> list[pytest.Item]:
    """Without most pairs of a kind of database and other parameters, where a test has all of them: each kind comes at least
    once, and so does each of the other parameters."""
    tests: dict[str, list[tuple[pytest.Item, str, str]]] = {}
    for item in items:
        called = getattr(item, "callspec", None)
        kind = str(called.params.get("database_kind", "")) if called else ""
        test, _, parameters = item.nodeid.partition("[")
        others = "-".join(word for word in parameters.removesuffix("]").split("-") if word != kind)
        tests.setdefault(test, []).append((item, kind, others))
    left_out = set[pytest.Item]()
    for pairs in tests.values():
        kinds, rest = [*dict.fromkeys(kind for _, kind, _ in pairs)], [*dict.fromkeys(other for _, _, other in pairs)]
        if len(kinds) > 1 and len(pairs) == len(kinds) * len(rest):
            at = [(item, kinds.index(kind), rest.index(other)) for item, kind, other in pairs]
            left_out |= {item for item, k, o in at if k % len(rest) != o % len(kinds)}
    return [item for item in items if item not in left_out]


def pytest_addoption(parser: pytest.Parser) -> None:
    """``--every-database`` for the tests that stand on the ledger too; ``--sqlite-alone`` for those without a server."""
    parser.addoption("--every-database", action="store_true", help="run every test with a database on each kind")
    parser.addoption("--sqlite-alone", action="store_true", help="run what needs no server, and on SQLite what needs one")


def pytest_configure() -> None:
    """A suite that a script started in the background ignores SIGINT, and so would every process that a test starts.
    Collecting makes next to no garbage, and looking for it took a third of the time."""
    gc.disable()
    if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_collection_finish(session: pytest.Session) -> None:
    """What thousands of collected tests are made of stays to the end: no look for garbage need go through it each time."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(20_000, 10, 10)
    gc.enable()
