"""A file server on the loopback that understands ranges and keeps count of what is asked of it."""

from __future__ import annotations

import contextlib
import re
import threading
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path


@dataclass
class Served:
    """What a server was asked for.

    `url` is the address of a file; the first part of the path is ignored, so that each number
    gives a name that no cache knows.
    """

    folder: Path
    port: int = 0
    sizes: list[int] = field(default_factory=list)

    def url(self, name, number=0):
        return f"http://127.0.0.1:{self.port}/{number}/{name}"

    def take(self):
        """GETs and bytes since the last time."""
        sizes, self.sizes = self.sizes, []
        return len(sizes), sum(sizes)


def handler(served):
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, *_):
            pass

        def do_HEAD(self):
            self.answer(body=False)

        def do_GET(self):
            self.answer(body=True)

        def answer(self, body):
            path = served.folder / self.path.split("/", 2)[2]
            if not path.is_file():
                self.send_response(404)
                self.send_header("Content-Length", "0")
                self.end_headers()
                return
            size = path.stat().st_size
            tag = f'"{size}-{path.stat().st_mtime_ns}"'
            start, end = 0, size - 1
            asked = re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range", ""))
            if asked:
                start = int(asked[1])
                end = min(int(asked[2] or end), end)
            self.send_response(206 if asked else 200)
            if asked:
                self.send_header("Content-Range", f"bytes {start}-{end}/{size}")
            self.send_header("Accept-Ranges", "bytes")
            self.send_header("ETag", tag)
            self.send_header("Content-Length", str(end - start + 1))
            self.end_headers()
            if body:
                served.sizes.append(end - start + 1)
                with path.open("rb") as file:
                    file.seek(start)
                    self.wfile.write(file.read(end - start + 1))

    return Handler


@contextlib.contextmanager
def serve(folder):
    """Serve a folder until the end of the block."""
    served = Served(Path(folder))
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler(served))
    server.daemon_threads = True
    served.port = server.server_address[1]
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield served
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
