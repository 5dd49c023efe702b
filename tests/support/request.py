"""``python -m support.request URL [FILE NAME=VALUE...]``: prints an answer; with a file, of a form that uploads it."""

from __future__ import annotations

import sys
import urllib.request
from pathlib import Path

EDGE = "----asynctask"


def form(path: Path, fields: list[str]) -> bytes:
    """The body of a form with a file."""
    parts = []
    for field in fields:
        name, _, value = field.partition("=")
        parts.append(f'--{EDGE}\r\nContent-Disposition: form-data; name="{name}"\r\n\r\n{value}\r\n'.encode())
    head = f'--{EDGE}\r\nContent-Disposition: form-data; name="file"; filename="{path.name}"\r\n\r\n'.encode()
    return b"".join([*parts, head, path.read_bytes(), f"\r\n--{EDGE}--\r\n".encode()])


if __name__ == "__main__":
    url, *rest = sys.argv[1:]
    asked = urllib.request.Request(url)
    if rest:
        asked.data = form(Path(rest[0]), rest[1:])
        asked.add_header("Content-Type", f"multipart/form-data; boundary={EDGE}")
    with urllib.request.urlopen(asked, timeout=60) as answer:
        sys.stdout.buffer.write(answer.read())
