"""Ruby and its Sidekiq, as Debian has them: what really reads and writes the format.

A desk that answers questions with its API and its pages, a worker process of it, and its JSON.
"""

from __future__ import annotations

import base64
import json
import os
import re
import shutil
import subprocess
from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType, TracebackType
from typing import Any, Self

import redis
from support.servers import RedisServer, missing

from asynctask.testing import wait_for

RUBY = Path(__file__).parent / "ruby"
PACKAGES = "ruby-sidekiq ruby-activejob"

Desk = Callable[..., Any]
"""``desk(script, *words)``: what a Ruby script comes to at the test's server, see :class:`RubyDesk`."""

# Each line: base64 of a text. Answered with base64 of what Ruby writes after reading it, or with "!" and the error's class.
_ECHO = """
require "json"
STDOUT.sync = true
while (line = STDIN.gets)
  begin
    text = line.unpack1("m").force_encoding("UTF-8")
    puts [JSON.generate(JSON.parse(text))].pack("m0")
  rescue JSON::ParserError, JSON::GeneratorError => error
    puts "!" + error.class.name
  end
end
"""


def ruby_program() -> str:
    """The path of ruby, with sidekiq installed beside it; a test without it is skipped at home."""
    program = shutil.which("ruby")
    if program is None:
        missing("ruby", "ruby-sidekiq")
    return str(program)


class RubyJson:
    """One Ruby process that reads JSON and writes it again."""

    def __enter__(self) -> Self:
        self._process = subprocess.Popen(
            [ruby_program(), "-e", _ECHO], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.close()
        self._process.wait()
        self._process.stdout.close()

    def echo(self, text: str | bytes) -> str | None:
        """What Ruby writes after it has read ``text``; None if it refuses."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        raw = text.encode("utf-8", "surrogatepass") if isinstance(text, str) else text
        self._process.stdin.write(base64.b64encode(raw).decode() + "\n")
        self._process.stdin.flush()
        answer = self._process.stdout.readline().strip()
        return None if answer.startswith("!") else base64.b64decode(answer).decode()


class RubyDesk:
    """One Ruby process for many scripts and servers, see ``ruby/desk.rb``; starting one for each would cost a second."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def __enter__(self) -> Self:
        program = ruby_program()
        self._log = (self._folder / "desk.log").open("wb")
        self._process = subprocess.Popen(
            [program, "-W0", str(RUBY / "desk.rb")],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            text=True,
            cwd=self._folder,
        )
        try:
            first = self._line()
            if first.startswith("?"):
                missing(f"a part of Ruby ({first[1:]})", PACKAGES)
            assert first == "=true", first
        except BaseException:
            self.__exit__(None, None, None)
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.close()
        self._process.wait()
        self._process.stdout.close()
        self._log.close()

    def _line(self) -> str:
        assert self._process.stdout is not None
        line = self._process.stdout.readline().rstrip("\n")
        assert line, (self._folder / "desk.log").read_text(errors="replace")[-3000:]
        return line

    def __call__(self, url: str, script: str, *words: Any) -> Any:
        """What a Ruby script at the server ``url`` comes to, or gives to ``answer(value)``, as JSON; ``words`` are its
        ``words``, and its ``ARGV`` as texts."""
        assert self._process.stdin is not None
        order = json.dumps([url, script, words]).encode()
        self._process.stdin.write(base64.b64encode(order).decode() + "\n")
        self._process.stdin.flush()
        line = self._line()
        (answer,) = json.loads(line[1:])
        assert line.startswith("="), answer
        return answer


class RubyWorker:
    """A process of Ruby's Sidekiq that works queues, with the jobs of ``ruby/jobs.rb`` or another ``program`` there, and
    ``environ`` beside the environment.

    ``threads``: of several, one that is idle when the process is stopped may be killed with a job that another one gave
    back in its hands.
    """

    def __init__(
        self,
        server: RedisServer,
        folder: Path,
        *queues: str,
        threads: int = 2,
        program: str = "jobs.rb",
        environ: Mapping[str, str] = MappingProxyType({}),
    ) -> None:
        self._server = server
        self._threads = threads
        self._program = RUBY / program
        self._environ = environ
        self._folder = folder
        self._queues = queues

    def __enter__(self) -> Self:
        program = shutil.which("sidekiq") or missing("sidekiq", PACKAGES)
        words = [word for queue in self._queues for word in ("-q", queue)]
        with (self._folder / "sidekiq.log").open("wb") as log:
            self.process = subprocess.Popen(
                [str(program), "-r", str(self._program), "-c", str(self._threads), "-t", "1", *words],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                cwd=self._folder,
                env={**os.environ, "REDIS_URL": self._server.url, **self._environ},
            )
        try:
            wait_for(lambda: self.identity or self._ended(), "the Ruby process is seen")
        except BaseException:
            self.__exit__(None, None, None)
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.process.kill()
        self.process.wait()

    def _ended(self) -> bool:
        said = (self._folder / "sidekiq.log").read_text(errors="replace")
        if self.process.poll() is not None and "cannot load such file" in said:
            missing("activejob", PACKAGES)
        assert self.process.poll() is None, said[-3000:]
        return False

    @property
    def identity(self) -> str:
        """What it calls itself in Redis; empty while it is not seen."""
        with self._server.client() as client:
            names = [name.decode() for name in client.smembers("processes")]
        mine = [name for name in names if re.search(f":{self.process.pid}:", name)]
        return mine[0] if mine else ""


def noted(raw: redis.Redis, count: int = 1) -> list[dict[str, Any]]:
    """What Ruby's workers noted, once there is so much."""
    wait_for(lambda: raw.llen("test:ruby") >= count, f"{count} jobs are performed in Ruby")
    return [json.loads(text) for text in raw.lrange("test:ruby", 0, -1)]
