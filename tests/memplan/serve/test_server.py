"""``memplan serve`` as a process: how it begins, and how it ends."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest

from experiments.checkpoints import write_checkpoint
from memplan.cli import REFUSED, main
from memplan.serve.errors import ServeSettingError
from memplan.serve.server import ServeOptions


@dataclass
class Process:
    process: subprocess.Popen[str]
    url: str

    def complete(self, prompt: str, max_tokens: int = 8) -> str:
        body = {"prompt": prompt, "max_tokens": max_tokens, "temperature": 0}
        response = httpx.post(f"{self.url}/v1/completions", json=body, timeout=60)
        assert response.status_code == 200, response.text
        return response.json()["choices"][0]["text"]


@contextmanager
def serving(folder: Path, *options: str) -> Iterator[Process]:
    command = [sys.executable, "-m", "memplan", "serve", folder, "--port", "0", "--pages", "64"]
    command += ["--page-tokens", "4", "--max-batch", "2", "--chunk", "16", *options]
    environment = os.environ | {"JAX_PLATFORMS": "cpu"}
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=environment)
    assert process.stderr is not None
    rest = threading.Thread(target=process.stderr.read)  # Nobody is to wait for a full pipe.
    try:
        said = ""
        for line in process.stderr:
            said += line
            if line.startswith("Listening on "):
                break
        else:
            raise AssertionError(said)
        rest.start()
        yield Process(process, line.split()[-1])
    finally:
        process.kill()
        process.wait()
        if rest.ident is not None:
            rest.join()
        process.stderr.close()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("checkpoints") / "tiny")


@pytest.mark.slow
def test_sigterm_lets_those_end_who_are_there_and_nobody_in(folder: Path) -> None:
    with serving(folder) as server:
        body = {"prompt": "the cat", "max_tokens": 200, "temperature": 0, "stream": True}
        with httpx.stream(
            "POST", f"{server.url}/v1/completions", json=body, timeout=60
        ) as response:
            lines = response.iter_lines()
            next(lines)
            server.process.send_signal(signal.SIGTERM)
            time.sleep(0.3)
            with pytest.raises(httpx.ConnectError):
                httpx.get(f"{server.url}/health")
            events = [line for line in lines if line]
        assert events[-1] == "data: [DONE]"
        assert json.loads(events[-2][6:])["choices"][0]["finish_reason"] in ("length", "stop")
        assert server.process.wait(30) == -signal.SIGTERM


@pytest.mark.slow
def test_what_takes_longer_than_it_may_is_cancelled(folder: Path) -> None:
    with serving(folder, "--grace", "1", "--queue", "100") as server:
        ended: list[bool] = []

        def ask() -> None:
            try:
                for _ in range(1000):
                    server.complete("the cat", 200)
            except (httpx.HTTPError, AssertionError):
                ended.append(True)

        threads = [threading.Thread(target=ask) for _ in range(20)]
        for thread in threads:
            thread.start()
        time.sleep(2)
        begin = time.monotonic()
        server.process.send_signal(signal.SIGTERM)
        server.process.wait(30)
        assert time.monotonic() - begin < 10
        for thread in threads:
            thread.join()
        assert len(ended) == 20


@pytest.mark.slow
def test_one_that_is_killed_leaves_nothing_and_starts_again(folder: Path, tmp_path: Path) -> None:
    disk = [
        "--disk-pages",
        "64",
        "--disk-folder",
        str(tmp_path),
        "--pages",
        "16",
        "--max-len",
        "60",
    ]
    answers = []
    for _ in range(2):
        with serving(folder, *disk) as server:
            answers.append([server.complete(f"{k} the cat sat on the mat") for k in range(12)])
            assert 'memplan_pages{tier="disk"} 0' not in httpx.get(f"{server.url}/metrics").text
            server.process.kill()
            server.process.wait()
        assert not [*tmp_path.iterdir()]
    assert answers[0] == answers[1]


class TestWhatIsRefused:
    def test_a_folder_that_is_no_checkpoint(
        self, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        assert main(["serve", str(tmp_path), "--port", "0"]) == REFUSED
        expected = f"memplan: {tmp_path / 'config.json'}: is not there; a checkpoint has one.\n"
        assert capsys.readouterr().err == expected

    def test_pages_that_hold_nothing(
        self, folder: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        assert main(["serve", str(folder), "--port", "0", "--memory", "100"]) == REFUSED
        assert "memory=100: expected room for a page of 16 tokens" in capsys.readouterr().err
        assert (
            main(["serve", str(folder), "--port", "0", "--pages", "2", "--max-len", "90"])
            == REFUSED
        )
        assert "max_len=90: expected 2 to 32 tokens" in capsys.readouterr().err

    def test_an_address_that_is_taken(
        self, folder: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        import socket

        with socket.create_server(("127.0.0.1", 0)) as taken:
            port = taken.getsockname()[1]
            assert main(["serve", str(folder), "--port", str(port)]) == REFUSED
        expected = f"host, port='127.0.0.1:{port}': expected an address to listen at (Address alr"
        assert expected in capsys.readouterr().err

    @pytest.mark.parametrize(
        ("options", "message"),
        [
            ({"queue": 0}, "queue=0: expected at least 1"),
            ({"pages": 4, "memory": 1 << 20}, "pages=4: expected pages or memory, not both"),
            ({"disk_pages": 4}, "disk_pages=4: expected a folder for their file"),
        ],
    )
    def test_settings(self, tmp_path: Path, options: dict[str, Any], message: str) -> None:
        with pytest.raises(ServeSettingError, match=message):
            ServeOptions(folder=tmp_path, **options)

    @pytest.mark.parametrize("package", ["starlette", "uvicorn", "tokenizers", "jinja2"])
    def test_without_the_extra(self, tmp_path: Path, package: str) -> None:
        code = f"import sys; sys.modules[{package!r}] = None; from memplan.cli import main; "
        code += f"sys.exit(main(['serve', {str(tmp_path)!r}]))"
        run = subprocess.run(
            [sys.executable, "-c", code], capture_output=True, text=True, check=False
        )
        assert run.returncode == REFUSED
        assert run.stderr == (
            f"memplan: {package} is not installed, which serving needs: "
            "pip install 'memplan[serve]'.\n"
        )
