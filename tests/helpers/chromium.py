"""A headless Chromium driven over the DevTools protocol: just what the test of the live page needs."""

from __future__ import annotations

import base64
import json
import shutil
import subprocess
import tempfile
import time
import urllib.request
from pathlib import Path

PROGRAM = (
    shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
)

_FLAGS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--hide-scrollbars",
    "--disable-dev-shm-usage",
    "--remote-debugging-port=0",
    "--no-proxy-server",
)


class Chromium:
    """One page; a context manager. `errors` are messages of its console, `requests` the addresses that it requested.

    first: JavaScript that each document runs before its scripts.
    """

    def __init__(
        self, url: str, size: tuple[int, int] = (1600, 1200), dark: bool = False, *, first: str = ""
    ) -> None:
        from websockets.sync.client import connect

        self.errors: list[str] = []
        self.requests: list[str] = []
        self._number = 0
        self._profile = tempfile.mkdtemp(prefix="posttrain-chromium-")
        command = [
            PROGRAM,
            *_FLAGS,
            f"--user-data-dir={self._profile}",
            f"--window-size={size[0]},{size[1]}",
        ]
        self._process = subprocess.Popen(
            [*command, "about:blank"], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        self._socket = connect(self._list_records(), max_size=None, proxy=None, ping_interval=None)
        for domain in ("Page", "Runtime", "Network", "Log"):
            self.call(f"{domain}.enable")
        self.call(
            "Emulation.setDeviceMetricsOverride",
            width=size[0],
            height=size[1],
            deviceScaleFactor=1,
            mobile=False,
        )
        if dark:
            scheme = [{"name": "prefers-color-scheme", "value": "dark"}]
            self.call("Emulation.setEmulatedMedia", features=scheme)
        if first:
            self.call("Page.addScriptToEvaluateOnNewDocument", source=first)
        self.call("Page.navigate", url=url)

    def _list_records(self) -> str:
        port_file = Path(self._profile, "DevToolsActivePort")
        deadline = time.monotonic() + 60
        opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        while time.monotonic() < deadline:
            try:
                port = int(port_file.read_text().splitlines()[0])
                with opener.open(f"http://127.0.0.1:{port}/json/list", timeout=5) as answer:
                    pages = [page for page in json.load(answer) if page["type"] == "page"]
                return pages[0]["webSocketDebuggerUrl"]
            except (OSError, ValueError, IndexError):
                time.sleep(0.1)
        raise TimeoutError("Chromium did not start")

    def call(self, method: str, **parameters):
        """Call one command of the protocol; return its result."""
        self._number += 1
        self._socket.send(json.dumps({"id": self._number, "method": method, "params": parameters}))
        while True:
            message = json.loads(self._socket.recv(timeout=60))
            if message.get("id") == self._number:
                assert "error" not in message, message
                return message["result"]
            self._note(message)

    def _note(self, message) -> None:
        method, values = message.get("method"), message.get("params", {})
        if method == "Runtime.exceptionThrown":
            details = values["exceptionDetails"]
            self.errors.append(details.get("exception", {}).get("description") or details["text"])
        elif method == "Runtime.consoleAPICalled" and values["type"] == "error":
            self.errors.append(
                " ".join(str(part.get("value", part.get("description"))) for part in values["args"])
            )
        elif method == "Log.entryAdded" and values["entry"]["level"] == "error":
            self.errors.append(f"{values['entry']['text']} {values['entry'].get('url', '')}")
        elif method == "Network.requestWillBeSent":
            self.requests.append(values["request"]["url"])

    def run(self, script: str):
        """Evaluate a JavaScript expression and return its value."""
        reply = self.call(
            "Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True
        )
        assert "exceptionDetails" not in reply, reply["exceptionDetails"]
        return reply["result"].get("value")

    def wait(self, script: str, seconds: float = 60.0):
        """Wait until the expression is true; return its value."""
        deadline = time.monotonic() + seconds
        while not (value := self.run(script)):
            if time.monotonic() > deadline:
                text = self.run("document.body.innerText.slice(0, 800)")
                raise TimeoutError(
                    f"never true: {script}; errors: {self.errors[:5]}; the page says: {text}"
                )
            time.sleep(0.1)
        return value

    def drag(self, selector: str, start: float, end: float) -> None:
        """Drag with the mouse over an element, from one share of its width to another."""
        box = self.run(
            f"(() => {{ const e = document.querySelector({selector!r}); e.scrollIntoView({{block: 'center'}}); "
            "const b = e.getBoundingClientRect(); return [b.left, b.top, b.width, b.height]; })()"
        )
        y = box[1] + box[3] / 2
        middle = (start + end) / 2
        for kind, share in (
            ("mousePressed", start),
            ("mouseMoved", middle),
            ("mouseMoved", end),
            ("mouseReleased", end),
        ):
            self.call(
                "Input.dispatchMouseEvent",
                type=kind,
                x=box[0] + share * box[2],
                y=y,
                button="left",
                buttons=1,
                clickCount=1,
            )

    def picture(self, path: Path, *, whole: bool = False) -> None:
        """Save a screenshot as PNG."""
        clip = {}
        if whole:
            size = self.call("Page.getLayoutMetrics")["cssContentSize"]
            clip = {
                "clip": {
                    "x": 0,
                    "y": 0,
                    "width": size["width"],
                    "height": size["height"],
                    "scale": 1,
                }
            }
        data = self.call(
            "Page.captureScreenshot", format="png", captureBeyondViewport=whole, **clip
        )["data"]
        Path(path).write_bytes(base64.b64decode(data))

    def close(self) -> None:
        """End it."""
        self._socket.close()
        self._process.terminate()
        try:
            self._process.wait(10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        shutil.rmtree(self._profile, ignore_errors=True)

    def __enter__(self) -> Chromium:
        return self

    def __exit__(self, *_) -> None:
        self.close()
