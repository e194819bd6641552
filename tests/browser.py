"""A page in headless Chromium, driven through its DevTools protocol."""

from __future__ import annotations

import asyncio
import base64
import json
import re
import shutil
import subprocess
import tempfile
import urllib.request
from contextlib import contextmanager
from itertools import count

from tornado.websocket import websocket_connect

CHROMIUM = next(
    filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None
)
_DEADLINE = 60  # seconds for a page to show something; a bound, nothing is timed

# Bokeh puts what it draws into shadow roots, which `document.body.innerText` leaves out.
_TEXT = """
    const text = node => {
        if (node.nodeType === Node.TEXT_NODE) return node.textContent;
        if (["SCRIPT", "STYLE", "TEMPLATE"].includes(node.nodeName)) return "";
        const inner = [...(node.shadowRoot ? node.shadowRoot.childNodes : []), ...node.childNodes];
        const block = ["DIV", "TD", "TR", "TABLE", "LI"].includes(node.nodeName);
        return inner.map(text).join("") + (block ? "\\n" : "");
    };
"""


class Page:
    """One tab."""

    def __init__(self, address):
        self._address = address
        self._numbers = count(1)

    def text_with(self, pattern):
        """All text of the page, as soon as the pattern (a regular expression) is in it."""
        return self._evaluate(
            f"""new Promise(done => {{ {_TEXT}
                const look = () => {{
                    const all = document.body ? text(document.body) : "";
                    if (new RegExp({json.dumps(pattern)}).test(all)) done(all);
                    else setTimeout(look, 100);
                }};
                look();
            }})"""
        )

    def title(self):
        return self._evaluate("document.title")

    def screenshot(self, path):
        # What has changed is drawn by the frame after next.
        self._evaluate("new Promise(r => requestAnimationFrame(() => requestAnimationFrame(r)))")
        answer = self._call("Page.captureScreenshot", format="png")
        with open(path, "wb") as file:
            file.write(base64.b64decode(answer["data"]))

    def _evaluate(self, code):
        asked = {"expression": code, "awaitPromise": True, "returnByValue": True}
        answer = self._call("Runtime.evaluate", **asked)
        while re.search("navigated|destroyed", str(answer.get("message"))):
            # The empty page that a tab begins with took the question along.
            answer = self._call("Runtime.evaluate", **asked)
        assert "exceptionDetails" not in answer, answer
        assert "result" in answer, answer
        return answer["result"].get("value")

    def _call(self, method, **parameters):
        return asyncio.run(asyncio.wait_for(self._ask(method, parameters), _DEADLINE))

    async def _ask(self, method, parameters):
        socket = await websocket_connect(self._address, max_message_size=1 << 26)
        try:
            number = next(self._numbers)
            await socket.write_message(
                json.dumps({"id": number, "method": method, "params": parameters})
            )
            while True:
                answer = json.loads(await socket.read_message())
                if answer.get("id") == number:
                    return answer.get("result") or answer["error"]
        finally:
            socket.close()
            while await socket.read_message() is not None:
                pass


@contextmanager
def opened(url, *, width=1300, height=900):
    """A page, and a browser around it that ends with it."""
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        # A sandbox needs rights that containers lack, and shared memory is small there.
        command = [
            CHROMIUM, "--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage",
            "--hide-scrollbars", "--no-first-run", f"--user-data-dir={folder}",
            f"--window-size={width},{height}", "--remote-debugging-port=0",
            "--remote-allow-origins=*", "about:blank",
        ]  # fmt: skip
        browser = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
        try:
            for line in browser.stderr:
                if found := re.search(r"DevTools listening on ws://([^/]+)/", line):
                    break
            else:
                raise RuntimeError("the browser did not start")
            request = urllib.request.Request(f"http://{found[1]}/json/new?{url}", method="PUT")
            with urllib.request.urlopen(request, timeout=_DEADLINE) as answer:
                yield Page(json.load(answer)["webSocketDebuggerUrl"])
        finally:
            browser.kill()
            browser.wait()
            browser.stderr.close()
