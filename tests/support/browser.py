"""A headless browser on a page, driven through its debugging port; Debian's chromium."""

import asyncio
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import aiohttp

BROWSER = shutil.which("chromium")
SCHEMES = "dark", "light"  # as chromium counts them


class Page:
    """A page that is open in a browser.

    Args:
        port: The browser's debugging port.
        ends: When waiting ends, on the monotonic clock.
    """

    def __init__(self, port: str, ends: float):
        self._port, self._ends = port, ends

    def ask(self, method: str, **params) -> dict:
        """The result of a command of the DevTools protocol."""
        return asyncio.run(self._asked({"id": 1, "method": method, "params": params}))

    async def _asked(self, command: dict) -> dict:
        async with aiohttp.ClientSession() as session:
            while True:
                async with session.get(f"http://127.0.0.1:{self._port}/json") as reply:
                    pages = [p for p in await reply.json() if p["type"] == "page"]
                if pages:
                    break
                assert time.monotonic() < self._ends, "the browser opens no page"
                await asyncio.sleep(0.1)
            address = pages[0]["webSocketDebuggerUrl"]
            async with session.ws_connect(address, max_msg_size=0) as socket:
                await socket.send_json(command)
                while (answer := await socket.receive_json()).get("id") != command["id"]:
                    pass
                return answer["result"]

    def value(self, expression: str):
        """The value of a JavaScript expression, as JSON has it."""
        found = self.ask("Runtime.evaluate", expression=expression, returnByValue=True)
        return found["result"].get("value")

    def until(self, expression: str) -> None:
        """Wait until a JavaScript expression is true; AssertionError where it takes too long."""
        while not self.value(expression):
            assert time.monotonic() < self._ends, self.value("document.body.innerText")
            time.sleep(0.1)

    def enter(self, text: str) -> None:
        """Type a text where the focus is, and press Enter."""
        self.ask("Input.insertText", text=text)
        self.press("Enter", text="\r")

    def press(self, key: str, **more) -> None:
        """Press a key, such as Tab."""
        for kind in ("keyDown", "keyUp"):
            self.ask("Input.dispatchKeyEvent", type=kind, key=key, **more)


@contextmanager
def opened(address: str, scheme: str = "light", seconds: float = 60) -> Iterator[Page]:
    """A page in a browser of its own that prefers a scheme, for so many seconds at the most."""
    with tempfile.TemporaryDirectory() as profile:
        options = ["--headless", "--no-sandbox", "--disable-gpu", "--window-size=1280,800"]
        options += [f"--blink-settings=preferredColorScheme={SCHEMES.index(scheme)}"]
        process = subprocess.Popen(
            [BROWSER, *options, f"--user-data-dir={profile}", "--remote-debugging-port=0", address],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        try:
            port_file, ends = Path(profile) / "DevToolsActivePort", time.monotonic() + seconds
            while not (port_file.exists() and port_file.read_text().count("\n")):
                assert time.monotonic() < ends, "the browser does not start"
                time.sleep(0.1)
            yield Page(port_file.read_text().split()[0], ends)
        finally:
            process.kill()
            process.wait()
            time.sleep(0.2)  # its helpers still write into the profile
