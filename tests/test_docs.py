"""README and the site: every block of code on a page is run, and prints what stands under it.

```python          run, a page in one namespace, its blocks below each other as example.py
```python file=x   written to the file x, for commands that read it
```sh              run by bash; what sets up or tests a checkout (make, pip install) is looked up
```yaml            a workflow: each step's `run`, with the page's files where it checks out
```text            what the block before it printed, `...` for what differs from run to run
```lang not-run: why
```                a drawing: no language, nothing is run
"""

import contextlib
import doctest
import io
import os
import re
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import pytest
import yaml

from memplan import load_machine, machine_names

ROOT = Path(__file__).parent.parent
SLOW = frozenset(
    """choosing-a-budget estimates every-shape fsdp fusion in-chunks intents loading-weights
    long-sequences offload-weights optimizer-state prefix-cache serving what-grew
    which-machine""".split()
)
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]

FENCE = re.compile(r"(?P<indent> *)(?P<marks>`{3,})(?P<info>.*)")
NOT_RUN = re.compile(r"\w+ not-run: \S")
FILE = re.compile(r"python file=(?P<name>\S+)")

# What stands in a page as a machine to compile for.
MACHINE = re.compile(r"""(?:machine=|topology\(|--machine )["']?([\w-]+)""")

LOOKED_UP = re.compile(r"(?:make|pip install|\.ci/|\.venv/bin/)\S*( .*)?")
MAKE_TARGETS = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
EXTRAS = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]


# The numbers on a page are those of one version of XLA.
IS_PINNED = f"jax=={jax.__version__}" in (ROOT / "constraints.txt").read_text().split()


@dataclass(frozen=True)
class Block:
    """What stands between two fences.

    Attributes:
      line: of its first fence, counted from 1.
      info: what stands behind that fence: ``"python"``.
    """

    page: Path
    line: int
    info: str
    text: str

    @property
    def language(self) -> str:
        return "" if self.info.startswith("{") else self.info.partition(" ")[0]

    def fail(self, why: str) -> None:
        pytest.fail(f"{self.page.relative_to(ROOT)}:{self.line}: {why}", pytrace=False)


def blocks_of(page: Path, text: str) -> Iterator[Block]:
    lines = enumerate(text.splitlines(), 1)
    for number, line in lines:
        if (opening := FENCE.fullmatch(line)) is None:
            continue
        indent, body = len(opening["indent"]), []
        for _, inner in lines:
            if inner.strip() == opening["marks"]:
                break
            body.append(inner[indent:] + "\n")
        yield Block(page, number, opening["info"].strip(), "".join(body))


class PageRun:
    """One page, block by block, in the folder that is the working directory."""

    def __init__(self) -> None:
        self.names: dict[str, Any] = {"__name__": "example"}
        self.lines = 0
        self.printed: tuple[Block, str] | None = None

    def run(self, block: Block) -> None:
        if NOT_RUN.match(block.info):
            return
        if block.language == "text":
            self.compare(block)
            return
        self.check_shown()
        if found := FILE.fullmatch(block.info):
            Path(found["name"]).write_text(block.text)
        elif block.info == "python":
            self.printed = block, self.python(block)
        elif block.info == "sh":
            self.printed = block, self.shell(block, block.text)
        elif block.info == "yaml":
            self.workflow(block)
        elif block.language:
            block.fail(f"nobody knows how to run {block.info!r}: mark it `not-run: why`")

    def python(self, block: Block) -> str:
        source = "\n" * self.lines + block.text
        self.lines += block.text.count("\n")
        printed = io.StringIO()
        try:
            with contextlib.redirect_stdout(printed):
                exec(compile(source, "example.py", "exec"), self.names)
        except Exception as error:
            error.add_note(f"at {block.page.relative_to(ROOT)}:{block.line}")
            raise
        return printed.getvalue()

    def shell(self, block: Block, text: str, folder: str = ".", **environment: str) -> str:
        lines = text.replace("\\\n", "").splitlines()
        script = [line for line in lines if not self.looked_up(block, line)]
        path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
        run = subprocess.run(
            ["bash", "-euo", "pipefail", "-c", "\n".join(script)],
            cwd=folder,
            env=os.environ | {"PATH": path, "COLUMNS": "80", "PYTHONPATH": "."} | environment,
            capture_output=True,
            text=True,
            check=False,
        )
        if run.returncode != 0:
            block.fail(f"exit status {run.returncode}\n{run.stdout}{run.stderr}")
        return run.stdout

    def looked_up(self, block: Block, line: str) -> bool:
        words = line.partition(" #")[0].strip()
        if LOOKED_UP.fullmatch(words) is None:
            return False
        if words.startswith("make ") and not set(words.split()[1:]) <= MAKE_TARGETS:
            block.fail(f"no such target: {words}")
        for extras in re.findall(r"\[([\w,]+)\]", words):
            if not set(extras.split(",")) <= EXTRAS.keys():
                block.fail(f"no such extra: {words}")
        if words.startswith(".ci/") and not (ROOT / words).is_file():
            block.fail(f"no such script: {words}")
        return True

    def workflow(self, block: Block) -> None:
        (job,) = yaml.safe_load(block.text)["jobs"].values()
        files = [path for path in Path().iterdir() if path.is_file()]
        for step in job["steps"]:
            if step.get("uses", "").startswith("actions/checkout@"):
                checkout = Path(step["with"]["path"])
                checkout.mkdir()
                for file in files:
                    shutil.copy(file, checkout)
            elif "run" in step:
                environment = step.get("env", {})
                self.shell(block, step["run"], step.get("working-directory", "."), **environment)

    def compare(self, block: Block) -> None:
        if self.printed is None:
            block.fail("nothing before it prints; a drawing has a fence without a language")
            return
        found, self.printed = self.printed[1], None
        if IS_PINNED and not is_as_shown(block.text, found):
            raise OtherOutput(block, plain(found))

    def check_shown(self) -> None:
        if self.printed is not None and self.printed[1].strip():
            block, printed = self.printed
            block.fail(f"a ```text block after it has to show what it prints:\n{printed}")
        self.printed = None


class OtherOutput(Exception):
    """A block printed something else than the page shows."""

    def __init__(self, block: Block, found: str) -> None:
        where = f"{block.page.relative_to(ROOT)}:{block.line}"
        super().__init__(
            f"{where}: the block before it prints what follows; if that is right, "
            f"--update-golden\n{found}"
        )
        self.block, self.found = block, found


def plain(text: str) -> str:
    return "".join(f"{line.rstrip()}\n" for line in text.strip("\n").splitlines())


def is_as_shown(shown: str, found: str) -> bool:
    return doctest.OutputChecker().check_output(plain(shown), plain(found), doctest.ELLIPSIS)


def run_page(page: Path) -> None:
    run = PageRun()
    for block in blocks_of(page, page.read_text()):
        run.run(block)
    run.check_shown()


def rewritten(page: Path, other: OtherOutput) -> None:
    lines = page.read_text().splitlines(keepends=True)
    begin = other.block.line
    lines[begin : begin + other.block.text.count("\n")] = other.found
    page.write_text("".join(lines))


def parameter(page: Path) -> Any:
    names = set(MACHINE.findall(page.read_text())) & {"v5e", "v6e", "tpu7x", *machine_names()}
    platforms = {load_machine(name).platform for name in names}
    marks = [getattr(pytest.mark, platform) for platform in platforms if platform != "cpu"]
    marks += [pytest.mark.slow] if page.stem in SLOW else []
    return pytest.param(page, marks=marks, id=page.relative_to(ROOT).as_posix())


@pytest.mark.parametrize("page", [parameter(page) for page in PAGES])
def test_the_code_on_a_page_runs_as_shown(
    page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, pytestconfig: pytest.Config
):
    monkeypatch.chdir(tmp_path)
    while True:  # With --update-golden each round rewrites one block.
        try:
            run_page(page)
            return
        except OtherOutput as other:
            if not pytestconfig.getoption("--update-golden"):
                pytest.fail(str(other), pytrace=False)
            rewritten(page, other)
