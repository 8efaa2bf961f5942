"""A headless Chromium, driven over its debugging pipe: real keys and clicks, what it asks the network for, pictures.

Nothing beyond the browser itself is needed. Tests that use it are skipped where there is none (``needs_browser``).
"""

from __future__ import annotations

import base64
import json
import os
import select
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

_NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")
PROGRAM = next((found for name in _NAMES if (found := shutil.which(name))), None)
needs_browser = pytest.mark.skipif(PROGRAM is None, reason="no Chromium is installed")
# Far beyond what any of this takes; it only ends a test that would wait forever.
_DEADLINE_SECONDS = 120.0
# The browser reads its commands from descriptor 3 and answers on 4; both are first moved out of the way of that.
_START = """
import fcntl, os, sys
commands, answers = (fcntl.fcntl(int(one), fcntl.F_DUPFD, 10) for one in sys.argv[1:3])
os.dup2(commands, 3)
os.dup2(answers, 4)
os.execv(sys.argv[3], sys.argv[3:])
"""
_KEYS = {"ArrowDown": 40, "ArrowUp": 38, "Home": 36, "End": 35, "Escape": 27, "PageDown": 34, "PageUp": 33}


class Browser:
    """One page of one browser. ``complaints``: errors in its console."""

    def __init__(self, into: int, out_of: int):
        self._into, self._out_of = into, out_of
        self._buffer, self._number = b"", 0
        self._session: str | None = None
        self._requests: dict[str, str] = {}
        self.complaints: list[str] = []
        target = self._call("Target.createTarget", url="about:blank")
        self._session = self._call("Target.attachToTarget", targetId=target["targetId"], flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Network", "Log"):
            self._call(f"{domain}.enable")

    @property
    def requests(self) -> list[str]:
        """Addresses requested since the last page was opened, without those that were blocked before."""
        return list(self._requests.values())

    def open(self, path: Path) -> None:
        """Open a file and wait until its questions can be looked at."""
        self._requests.clear()
        self.complaints.clear()
        self._call("Page.navigate", url=path.resolve().as_uri())
        self.wait("document.readyState === 'complete' && document.querySelector('#browser[data-ready]') !== null")
        # A click must find what it aims at where that was a moment ago.
        self.read("document.documentElement.style.scrollBehavior = 'auto'")

    def read(self, expression: str) -> Any:
        """The value of a JavaScript expression in the page."""
        answer = self._call("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in answer, answer["exceptionDetails"]
        return answer["result"].get("value")

    def wait(self, condition: str) -> None:
        """Until a JavaScript expression is true."""
        deadline = time.monotonic() + _DEADLINE_SECONDS
        while not self.read(f"Boolean({condition})"):
            assert time.monotonic() < deadline, f"{condition} is still not true; the page says {self.complaints}"
            time.sleep(0.02)

    def click(self, selector: str) -> None:
        """Click in the middle of the first element that a selector finds."""
        found = json.dumps(selector)
        self.read(f"document.querySelector({found}).scrollIntoView({{block: 'nearest', behavior: 'instant'}})")
        x, y = self.read(
            f"(() => {{ const r = document.querySelector({found}).getBoundingClientRect();"
            " return [r.x + r.width / 2, r.y + r.height / 2]; })()"
        )
        for kind in ("mousePressed", "mouseReleased"):
            self._call("Input.dispatchMouseEvent", type=kind, x=x, y=y, button="left", clickCount=1)

    def press(self, key: str) -> None:
        """Press and release one key, "j" or "ArrowDown"."""
        named = {"windowsVirtualKeyCode": _KEYS[key]} if key in _KEYS else {"text": key}
        self._call("Input.dispatchKeyEvent", type="keyDown", key=key, **named)
        self._call("Input.dispatchKeyEvent", type="keyUp", key=key)

    def write(self, text: str) -> None:
        """Type a text into what has the focus."""
        self._call("Input.insertText", text=text)

    def picture(self, path: Path, width: int = 1280, height: int = 900, dark: bool = False) -> None:
        """What a window of this size shows, as PNG."""
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self._call("Emulation.setEmulatedMedia", features=[scheme])
        self._call("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False)
        path.write_bytes(base64.b64decode(self._call("Page.captureScreenshot", format="png")["data"]))

    def _call(self, method: str, **parameters: Any) -> dict[str, Any]:
        self._number += 1
        number = self._number
        message = {"id": number, "method": method, "params": parameters}
        if self._session is not None:
            message["sessionId"] = self._session
        data = json.dumps(message).encode() + b"\0"
        while data:
            data = data[os.write(self._into, data) :]
        while True:
            answer = self._receive()
            if answer.get("id") == number:
                assert "error" not in answer, f"{method}: {answer['error']}"
                result: dict[str, Any] = answer["result"]
                return result
            self._note(answer)

    def _receive(self) -> dict[str, Any]:
        while b"\0" not in self._buffer:
            ready, _, _ = select.select([self._out_of], [], [], _DEADLINE_SECONDS)
            assert ready, "the browser does not answer"
            data = os.read(self._out_of, 1 << 20)
            assert data, "the browser has ended"
            self._buffer += data
        line, _, self._buffer = self._buffer.partition(b"\0")
        message: dict[str, Any] = json.loads(line)
        return message

    def _note(self, event: dict[str, Any]) -> None:
        parameters = event.get("params", {})
        if event.get("method") == "Network.requestWillBeSent":
            self._requests[parameters["requestId"]] = parameters["request"]["url"]
        elif event.get("method") == "Network.loadingFailed" and "blockedReason" in parameters:
            self._requests.pop(parameters["requestId"], None)
        elif event.get("method") == "Runtime.exceptionThrown":
            self.complaints.append(str(parameters["exceptionDetails"]))
        elif event.get("method") == "Log.entryAdded" and parameters["entry"]["level"] == "error":
            self.complaints.append(parameters["entry"]["text"])


@contextmanager
def browser(home: Path) -> Iterator[Browser]:
    """A browser with an empty profile in ``home``, and without any network but what a page may ask for."""
    assert PROGRAM is not None
    to_browser, from_us = os.pipe()
    from_browser, to_us = os.pipe()
    command = [
        sys.executable, "-c", _START, str(to_browser), str(to_us), PROGRAM,
        "--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run",
        "--disable-background-networking", "--disable-component-update", "--hide-scrollbars",
        f"--user-data-dir={home}", "--remote-debugging-pipe", "about:blank",
    ]  # fmt: skip
    process = subprocess.Popen(
        command,
        pass_fds=(to_browser, to_us),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    os.close(to_browser)
    os.close(to_us)
    try:
        yield Browser(from_us, from_browser)
    finally:
        os.close(from_us)  # which ends it
        os.close(from_browser)
        try:
            process.wait(10)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, 9)
            process.wait()
