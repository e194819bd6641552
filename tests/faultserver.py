"""A file server on the loopback that understands ranges and fails as it is told.

A process of its own: GDAL holds Python's lock while it looks for the files beside a raster, and a
server in the same process could not answer.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import socket
import struct
import subprocess
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import parse_qs, urlsplit

LASTS = 1.0


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def log_message(self, *_):
        pass

    def do_HEAD(self):
        self.answer(body=False)

    def do_GET(self):
        self.answer(body=True)

    def answer(self, body):
        address = urlsplit(self.path)
        path = self.server.folder / address.path.lstrip("/")
        self.server.note(f"{self.command} {address.path}")
        if not path.is_file() or not (path.suffix == ".tif" or self.server.beside):
            return self.refuse(404)
        fault = self.server.fault()
        if fault == "reset":
            self.close_connection = True
            linger = struct.pack("ii", 1, 0)
            self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
            return self.connection.shutdown(socket.SHUT_RDWR)
        if fault:
            return self.refuse(int(fault))
        if self.server.signed:
            until = parse_qs(address.query).get("until", ["0"])[0]
            if float(until) < time.time():
                return self.refuse(403)
        return self.send(path, body)

    def refuse(self, code):
        self.send_response(code)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def send(self, path, body):
        size = path.stat().st_size
        start, end = 0, size - 1
        asked = re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range", ""))
        if asked:
            start, end = int(asked[1]), min(int(asked[2] or end), end)
        self.send_response(206 if asked else 200)
        if asked:
            self.send_header("Content-Range", f"bytes {start}-{end}/{size}")
        self.send_header("Accept-Ranges", "bytes")
        self.send_header("Content-Length", str(end - start + 1))
        self.end_headers()
        if body:
            with path.open("rb") as file:
                file.seek(start)
                self.wfile.write(file.read(end - start + 1))


class Server(ThreadingHTTPServer):
    """Every n-th request fails with `code`, `most` at most, while there is a file "broken".

    Only rasters are served; `beside`: the files beside them too.
    """

    daemon_threads = True

    def __init__(self, folder, code="", every=1, most=10**9, signed=False, beside=False):
        super().__init__(("127.0.0.1", 0), Handler)
        self.folder, self.signed, self.beside = Path(folder), signed, beside
        self.code, self.every, self.most = code, every, most
        self.lock = threading.Lock()
        self.count = self.failed = 0

    def note(self, request):
        """Tell what was asked for; all of it, in the file "requests"."""
        with self.lock, (self.folder / "requests").open("a") as file:
            file.write(f"{request}\n")

    def fault(self):
        """The code with which a request is to fail; none if it is to be answered."""
        with self.lock:
            self.count += 1
            broken = self.failed < self.most and (self.folder / "broken").exists()
            if self.count % self.every or not broken:
                return ""
            self.failed += 1
            (self.folder / "faults").write_text(str(self.failed))
            return self.code


@contextlib.contextmanager
def faulty(folder, **options):
    """Serve a folder from another process; yields the start of its addresses."""
    told = json.dumps({"folder": str(folder), **options})
    command = [sys.executable, __file__, told]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            yield f"http://127.0.0.1:{int(process.stdout.readline())}"
        finally:
            process.kill()


def sign(url):
    """The address of a file, good for a second; each call is noted beside the file."""
    log = os.environ["SIGNED_LOG"]
    with open(log, "a") as file:
        file.write(f"{os.getpid()}\n")
    return f"{url}?until={time.time() + LASTS}"


if __name__ == "__main__":
    server = Server(**json.loads(sys.argv[1]))
    print(server.server_address[1], flush=True)
    server.serve_forever()
