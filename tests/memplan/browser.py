"""Pages as a browser shows them: headless Chromium, where it is installed."""

from __future__ import annotations

import base64
import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

_NAMES = ("chromium-headless-shell", "chromium", "chromium-browser", "google-chrome")

# What the steps return, or the error, takes the page's place: in base64, for it is read as text.
_PROBE = """<script>
const settle = () => new Promise(done => setTimeout(done, 100));
(async () => { STEPS })().then(seen => ({seen}), error => ({error: error.stack})).then(all => {
  const text = new TextEncoder().encode(JSON.stringify(all));
  document.body.textContent = `SEEN:${btoa(String.fromCharCode(...text))}:`;
});
</script></body>"""


def browse(page: str, folder: Path, steps: str, width: int = 1300) -> Any:
    """Opens a page, and returns what the script `steps` returns there.

    Args:
      page: its text. What its script declares is in sight.
      folder: where it can be written.
      steps: the body of an asynchronous function; ``await settle()`` lets events happen.
      width: of the window, in pixels.
    """
    program = next(filter(None, map(shutil.which, _NAMES)), None)
    if program is None:
        pytest.skip("Chromium is not installed")
    path = folder / "page.html"
    path.write_text(page.replace("</body>", _PROBE.replace("STEPS", steps)), encoding="utf-8")
    # Root, as in a container, has no sandbox to put the page in.
    options = ["--headless", "--no-sandbox", "--disable-gpu", f"--window-size={width},900"]
    shown = subprocess.run(
        [program, *options, "--virtual-time-budget=5000", "--dump-dom", path.as_uri()],
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    found = re.search(r"SEEN:([\w+/=]+):", shown.stdout)
    assert found, shown.stdout[:500] + shown.stderr[-500:]
    answer = json.loads(base64.b64decode(found[1]))
    assert "error" not in answer, answer["error"]
    return answer["seen"]
