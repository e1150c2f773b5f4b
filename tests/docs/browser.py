"""A headless Chromium, driven through two pipes by the DevTools protocol; a driver such as Selenium would be a package more."""

import base64
import json
import os
import shutil
import subprocess
import tempfile
from pathlib import Path
from typing import Any

NAMES = ("chromium", "chromium-browser", "google-chrome", "chrome")


def found() -> str | None:
    """Return the path of a browser, or None where none is on the PATH."""
    return next(filter(None, map(shutil.which, NAMES)), None)


class Browser:
    """``with Browser(path) as browser:`` starts a process with one page, and ends it."""

    def __init__(self, path: str) -> None:
        self.profile = tempfile.TemporaryDirectory(ignore_cleanup_errors=True)
        to_browser, self.to_browser = os.pipe()
        self.from_browser, from_browser = os.pipe()
        # The browser reads from descriptor 3 and writes to 4; those numbers may be taken here, so a shell gives them.
        options = "--headless --no-sandbox --disable-gpu --no-first-run --disable-background-networking --disable-sync"
        options += " --disable-component-update --hide-scrollbars --disable-dev-shm-usage --remote-debugging-pipe"
        command = f'exec "$0" "$@" 3<&{to_browser} 4>&{from_browser}'
        self.process = subprocess.Popen(
            ["bash", "-c", command, path, *options.split(), f"--user-data-dir={self.profile.name}", "about:blank"],
            pass_fds=(to_browser, from_browser),
            stderr=subprocess.DEVNULL,
        )
        os.close(to_browser)
        os.close(from_browser)
        self.sent, self.rest, self.session = 0, b"", None
        page = next(target for target in self.call("Target.getTargets")["targetInfos"] if target["type"] == "page")
        self.session = self.call("Target.attachToTarget", targetId=page["targetId"], flatten=True)["sessionId"]
        self.call("Page.enable")
        # A page of the site keeps the theme that it was first shown in.
        self.call("Page.addScriptToEvaluateOnNewDocument", source="localStorage.clear()")

    def __enter__(self) -> "Browser":
        return self

    def __exit__(self, *_: object) -> None:
        self.process.terminate()
        self.process.wait(20)
        os.close(self.to_browser)
        os.close(self.from_browser)
        self.profile.cleanup()

    def read(self) -> dict[str, Any]:
        while b"\0" not in self.rest:
            piece = os.read(self.from_browser, 1 << 20)
            if not piece:
                raise EOFError("the browser ended")
            self.rest += piece
        message, _, self.rest = self.rest.partition(b"\0")
        return json.loads(message)

    def call(self, method: str, **params: Any) -> dict[str, Any]:
        self.sent += 1
        message = {"id": self.sent, "method": method, "params": params}
        if self.session:
            message["sessionId"] = self.session
        os.write(self.to_browser, json.dumps(message).encode() + b"\0")
        while (answer := self.read()).get("id") != self.sent:
            pass
        if "error" in answer:
            raise RuntimeError(f"{method}: {answer['error']}")
        return answer["result"]

    def show(self, width: int, dark: bool, height: int = 900) -> None:
        """Set the width of the page, and the theme that the reader's system would ask for."""
        size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": False}
        self.call("Emulation.setDeviceMetricsOverride", **size)
        theme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.call("Emulation.setEmulatedMedia", features=[theme])

    def open(self, url: str) -> None:
        self.call("Page.navigate", url=url)
        while self.read().get("method") != "Page.loadEventFired":
            pass

    def evaluate(self, script: str) -> Any:
        result = self.call("Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True)
        if "exceptionDetails" in result:
            raise RuntimeError(result["exceptionDetails"])
        return result["result"].get("value")

    def picture(self, path: Path) -> None:
        """Write the whole page, whatever its height, as PNG."""
        size = self.call("Page.getLayoutMetrics")["cssContentSize"]
        clip = {"x": 0, "y": 0, "width": size["width"], "height": min(size["height"], 12_000), "scale": 1}
        picture = self.call("Page.captureScreenshot", captureBeyondViewport=True, clip=clip)
        path.write_bytes(base64.b64decode(picture["data"]))
