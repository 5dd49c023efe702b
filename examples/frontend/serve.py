"""A frontend on an origin of its own: ``python serve.py http://127.0.0.1:8000 5173 SECRET`` serves it at http://127.0.0.1:5173.

AsyncTask needs the settings ``allowed_origins=http://127.0.0.1:5173`` and ``tokens=shop:read,submit@acme=SECRET``. A real
frontend has a login, and puts in the token of its visitor's company.
"""

from __future__ import annotations

import sys
from html import escape
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from string import Template


class Frontend(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        page = Template((Path(__file__).parent / "index.html").read_text())
        self.send_response(200)
        self.send_header("Content-Type", "text/html; charset=utf-8")
        self.end_headers()
        self.wfile.write(page.substitute(api=escape(sys.argv[1].rstrip("/")), token=escape(sys.argv[3])).encode())


if __name__ == "__main__":
    ThreadingHTTPServer(("127.0.0.1", int(sys.argv[2])), Frontend).serve_forever()
