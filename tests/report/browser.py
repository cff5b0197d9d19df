"""Headless Chromium, driven over its DevTools pipe: no driver, no package, no network.

Commands and events are JSON, each ended by a zero byte, on the file descriptors 3 and 4 of the browser.
"""

from __future__ import annotations

import base64
import json
import os
import select
import shutil
import subprocess
import tempfile
import time
from pathlib import Path
from typing import Any

CHROMIUM = shutil.which("chromium")
FLAGS = (
    *("--headless", "--no-sandbox", "--disable-gpu", "--disable-background-networking", "--no-first-run"),
    *("--disable-component-update", "--disable-sync", "--remote-debugging-pipe"),
)
SECONDS = 60.0

#: What a page may complain with.
COMPLAINTS = (
    "Runtime.exceptionThrown",
    "Runtime.consoleAPICalled",
    "Log.entryAdded",
    "Network.requestWillBeSent",
)


class Browser:
    """One page in one browser. Use as a context manager."""

    def __init__(self) -> None:
        self.profile = tempfile.mkdtemp(prefix="twofour-browser-")
        into, self.commands = os.pipe()
        self.answers, out = os.pipe()
        start = f'exec "$0" "$@" 3<&{into} 4>&{out}'
        flags = [*FLAGS, f"--user-data-dir={self.profile}"]
        self.process = subprocess.Popen(
            ["/bin/bash", "-c", start, str(CHROMIUM), *flags],
            pass_fds=(into, out),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        os.close(into)
        os.close(out)
        self.buffer = b""
        self.sent = 0
        self.session: str | None = None
        self.events: list[dict[str, Any]] = []
        try:
            target = self("Target.createTarget", url="about:blank")["targetId"]
            self.session = self("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
            for domain in ("Page", "Runtime", "Log", "Network"):
                self(f"{domain}.enable")
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> Browser:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        self.process.terminate()
        try:
            self.process.wait(10)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        os.close(self.commands)
        os.close(self.answers)
        shutil.rmtree(self.profile, ignore_errors=True)

    def __call__(self, method: str, **parameters: Any) -> dict[str, Any]:
        self.sent += 1
        message = {"id": self.sent, "method": method, "params": parameters}
        if self.session:
            message["sessionId"] = self.session
        os.write(self.commands, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._next()
            if answer.get("id") == self.sent:
                if "error" in answer:
                    raise RuntimeError(f"{method}: {answer['error']}")
                return answer["result"]
            self.events.append(answer)

    def _next(self) -> dict[str, Any]:
        end = time.monotonic() + SECONDS
        while b"\0" not in self.buffer:
            ready, _, _ = select.select([self.answers], [], [], max(0.0, end - time.monotonic()))
            more = os.read(self.answers, 1 << 16) if ready else b""
            if not more:
                raise TimeoutError("the browser does not answer")
            self.buffer += more
        first, _, self.buffer = self.buffer.partition(b"\0")
        return json.loads(first)

    def open(self, path: Path, *, width: int = 1000, scheme: str = "light", media: str = "") -> None:
        """Show a file, and come back when it is loaded. What it complains about is in `complaints`."""
        self(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=844,
            deviceScaleFactor=1,
            mobile=width < 500,
        )
        self(
            "Emulation.setEmulatedMedia",
            media=media,
            features=[{"name": "prefers-color-scheme", "value": scheme}],
        )
        self.events.clear()
        self("Page.navigate", url=path.absolute().as_uri())
        while not any(event.get("method") == "Page.loadEventFired" for event in self.events):
            self.events.append(self._next())

    @property
    def complaints(self) -> list[str]:
        """Errors, console messages, and requests for anything but the page itself."""
        found = []
        for event in self.events:
            if event.get("method") not in COMPLAINTS:
                continue
            url = event["params"].get("request", {}).get("url", "")
            if not url.startswith("file:"):
                found.append(json.dumps(event["params"])[:400])
        return found

    def run(self, script: str) -> Any:
        """The value of an expression in the page."""
        answer = self("Runtime.evaluate", expression=script, returnByValue=True)
        if "exceptionDetails" in answer:
            raise RuntimeError(json.dumps(answer["exceptionDetails"])[:800])
        return answer["result"].get("value")

    def press(self, key: str) -> None:
        for kind in ("keyDown", "keyUp"):
            self(
                "Input.dispatchKeyEvent",
                type=kind,
                key=key,
                code=key,
                windowsVirtualKeyCode=9 if key == "Tab" else 13,
            )

    def pdf(self) -> bytes:
        return base64.b64decode(self("Page.printToPDF")["data"])
