"""A headless browser on a page, driven through its debugging port; Debian's chromium."""

import asyncio
import base64
import shutil
import subprocess
import tempfile
import time
from pathlib import Path

import aiohttp

BROWSER = shutil.which("chromium")


def visit(address: str, until: str, seconds: float = 60, picture: Path | None = None) -> str:
    """The text of a page once the JavaScript expression `until` is true; a picture of it, if asked.

    Raises AssertionError where it is not within `seconds`.
    """
    with tempfile.TemporaryDirectory() as profile:
        options = ["--headless", "--no-sandbox", "--disable-gpu", "--window-size=1200,800"]
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
            port = port_file.read_text().split()[0]
            return asyncio.run(_read(port, until, ends, picture))
        finally:
            process.kill()
            process.wait()
            time.sleep(0.2)  # its helpers still write into the profile


async def _read(port: str, until: str, ends: float, picture: Path | None) -> str:
    async with aiohttp.ClientSession() as session:
        while True:
            async with session.get(f"http://127.0.0.1:{port}/json") as reply:
                pages = [p for p in await reply.json() if p["type"] == "page"]
            if pages:
                break
            await asyncio.sleep(0.1)
        async with session.ws_connect(pages[0]["webSocketDebuggerUrl"], max_msg_size=0) as socket:

            async def ask(method, **params):
                await socket.send_json({"id": 1, "method": method, "params": params})
                while (answer := await socket.receive_json()).get("id") != 1:
                    pass
                return answer["result"]

            async def value(expression):
                found = await ask("Runtime.evaluate", expression=expression)
                return found["result"].get("value")

            while not await value(until):
                assert time.monotonic() < ends, await value("document.body.innerText")
                await asyncio.sleep(0.2)
            if picture is not None:
                shot = await ask("Page.captureScreenshot")
                picture.write_bytes(base64.b64decode(shot["data"]))
            return await value("document.body.innerText")
