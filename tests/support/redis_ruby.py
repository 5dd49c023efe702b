"""Ruby and its Sidekiq, as Debian has them: what really reads and writes the format."""

from __future__ import annotations

import base64
import json
import os
import shutil
import subprocess
from types import TracebackType
from typing import Any, Self

from support.servers import missing

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


def sidekiq(url: str, script: str, *words: str) -> Any:
    """Runs a Ruby script with Sidekiq's API against the server at ``url``; returns what it gave to ``answer(value)``.

    ``words`` are its ``ARGV``.
    """
    lead = (
        'require "json"; require "sidekiq"; require "sidekiq/api"; def answer(value) = puts("=" + JSON.generate(value))\n'
    )
    done = subprocess.run(
        [ruby_program(), "-W0", "-e", lead + script, *words],
        env={**os.environ, "REDIS_URL": url},
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    if "cannot load such file -- sidekiq" in done.stderr:
        missing("sidekiq", "ruby-sidekiq")
    assert done.returncode == 0, done.stderr[-3000:]
    answers = [line[1:] for line in done.stdout.splitlines() if line.startswith("=")]
    return json.loads(answers[-1]) if answers else None
