"""Drive headless Chromium by its DevTools protocol, over two pipes."""

import base64
import json
import os
import shutil
import signal
import subprocess
import tempfile
import time
from contextlib import suppress
from pathlib import Path
from select import select
from types import TracebackType
from typing import Any, Self

EXECUTABLE = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")

_FLAGS = (
    "--headless=new --no-sandbox --disable-gpu --disable-dev-shm-usage --no-first-run --disable-background-networking "
    "--disable-component-update --disable-sync --disable-extensions --hide-scrollbars --remote-debugging-pipe"
)


class Chromium:
    """Open pages in one browser process, which ends with the context."""

    def __init__(self) -> None:
        assert EXECUTABLE is not None
        self._profile = tempfile.mkdtemp(prefix="chromium-")
        in_child, self._to_child = os.pipe()
        self._from_child, out_of_child = os.pipe()
        # Chromium reads commands from file descriptor 3 and writes answers to 4.
        command = f'exec "$0" {_FLAGS} --user-data-dir="$1" about:blank 3<&{in_child} 4>&{out_of_child}'
        self._process = subprocess.Popen(
            ["bash", "-c", command, EXECUTABLE, self._profile],
            pass_fds=(in_child, out_of_child),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        os.close(in_child)
        os.close(out_of_child)
        self._received = b""
        self._last_id = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        os.close(self._to_child)
        os.close(self._from_child)
        shutil.rmtree(self._profile, ignore_errors=True)

    def open(self, url: str, width: int = 1440, height: int = 900, is_dark: bool = False) -> "Page":
        """Open a page in a new tab."""
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        page = Page(self, session)
        page.call("Page.enable")
        page.call("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if is_dark else "light"}
        page.call("Emulation.setEmulatedMedia", features=[scheme])
        page.call("Page.navigate", url=url)
        return page

    def call(self, method: str, session: str | None = None, timeout: float = 30, **params: Any) -> dict[str, Any]:
        """Call a method of the protocol, and return its result."""
        self._last_id += 1
        message = {"id": self._last_id, "method": method, "params": params}
        message |= {} if session is None else {"sessionId": session}
        os.write(self._to_child, json.dumps(message).encode() + b"\0")
        deadline = time.monotonic() + timeout
        while True:
            answer = self._receive(deadline, method)
            if answer.get("id") == self._last_id:
                if "error" in answer:
                    raise RuntimeError(f"{method}: {answer['error']}")
                result: dict[str, Any] = answer["result"]
                return result

    def _receive(self, deadline: float, method: str) -> dict[str, Any]:
        while b"\0" not in self._received:
            if not select([self._from_child], [], [], max(0.0, deadline - time.monotonic()))[0]:
                raise TimeoutError(f"Chromium has not answered {method}.")
            data = os.read(self._from_child, 1 << 16)
            if not data:
                raise RuntimeError(f"Chromium has ended before it answered {method}.")
            self._received += data
        message, _, self._received = self._received.partition(b"\0")
        answer: dict[str, Any] = json.loads(message)
        return answer


class Page:
    """Read and photograph a page that is open."""

    def __init__(self, browser: Chromium, session: str) -> None:
        self._browser, self._session = browser, session

    def call(self, method: str, **params: Any) -> dict[str, Any]:
        """Call a method of the protocol for this page."""
        return self._browser.call(method, self._session, **params)

    def evaluate(self, script: str) -> Any:
        """Return the value of a JavaScript expression."""
        answer = self.call("Runtime.evaluate", expression=script, returnByValue=True)
        if "exceptionDetails" in answer:
            raise RuntimeError(f"{script}: {answer['exceptionDetails']}")
        return answer["result"].get("value")

    def wait_for_text(self, *parts: str, timeout: float = 60) -> str:
        """Wait until the page shows all of these texts, and return the text of the page."""
        deadline = time.monotonic() + timeout
        while True:
            text = str(self.evaluate("document.body ? document.body.innerText : ''"))
            missing = [part for part in parts if part not in text]
            if not missing:
                return text
            if time.monotonic() > deadline:
                raise AssertionError(f"The page does not show {missing}, but:\n{text}")
            time.sleep(0.1)

    def screenshot(self, path: Path) -> None:
        """Write what the window shows as a PNG."""
        path.write_bytes(base64.b64decode(self.call("Page.captureScreenshot", format="png")["data"]))
