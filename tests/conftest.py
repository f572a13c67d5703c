"""What every test stands on: the platform, golden files, compilers that may be absent."""

import os

# Before jax is imported.
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import difflib
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import hypothesis
import jax
import pytest
from jax.experimental import topologies

from tests.hlo_files import HloFile, is_test

# A shared machine makes any one example slow now and then; pytest-timeout bounds the test. The
# examples are the same ones everywhere: what fails in one place fails in all.
hypothesis.settings.register_profile("memplan", deadline=None, derandomize=True)
hypothesis.settings.load_profile("memplan")

# The compiler that a marker stands for: (package, the extra that installs it).
COMPILERS = {"tpu": ("libtpu", "tpu"), "gpu": ("jax_cuda13_plugin", "cuda")}

# What lets libtpu compile on a machine without a TPU, in several processes at once.
TPU_ENVIRONMENT = {
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
    "TPU_ACCELERATOR_TYPE": "v5litepod-4",
    "TPU_SKIP_MDS_QUERY": "1",
    "TPU_WORKER_HOSTNAMES": "localhost",
}


# Tests run on the CPU, seen as four devices. Their programs are small, and take longer to optimize
# than to run.
CPU_FLAGS = "--xla_force_host_platform_device_count=4 --xla_backend_optimization_level=0"


@dataclass(frozen=True)
class Golden:
    """Compares a text with the file of that name in `folder`, or rewrites the file."""

    folder: Path
    update: bool

    def __call__(self, name: str, text: str) -> None:
        path = self.folder / name
        if self.update:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text, encoding="utf-8")
            return
        if not path.exists():
            pytest.fail(f"{path} does not exist: write it with --update-golden")
        expected = path.read_text(encoding="utf-8")
        if text == expected:
            return
        lines = difflib.unified_diff(
            expected.splitlines(), text.splitlines(), f"golden/{name}", "found", lineterm=""
        )
        diff = "\n".join(lines) or "(only the end of the last line differs)"
        pytest.fail(f"{path} differs; if the new text is right, --update-golden\n{diff}")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--update-golden", action="store_true", help="rewrite the golden files")


def pytest_configure(config: pytest.Config) -> None:
    """Before XLA has started: all tests but those of `-m hardware` run on the CPU."""
    if config.option.markexpr == "hardware":
        return
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    os.environ["XLA_FLAGS"] = f"{CPU_FLAGS} {os.environ.get('XLA_FLAGS', '')}".strip()
    jax.config.update("jax_platforms", os.environ["JAX_PLATFORMS"])


def pytest_collect_file(file_path: Path, parent: pytest.Collector) -> HloFile | None:
    if file_path.suffix != ".hlo" or not is_test(file_path):
        return None
    return HloFile.from_parent(parent, path=file_path)


def pytest_collection_modifyitems(items: Iterable[pytest.Item]) -> None:
    for item in items:
        for since in item.iter_markers("since"):
            version, reason = since.args
            if jax.__version_info__ < tuple(map(int, version.split("."))):
                item.add_marker(pytest.mark.skip(reason=f"jax {jax.__version__}: {reason}"))
        if "accelerator" in getattr(item, "fixturenames", ()):
            item.add_marker("hardware")
        for mark, (package, extra) in COMPILERS.items():
            if f"{mark}_compiler" in getattr(item, "fixturenames", ()):
                item.add_marker(mark)
            if item.get_closest_marker(mark) and find_spec(package) is None:
                reason = f"{package} is not installed: pip install 'memplan[{extra}]'"
                item.add_marker(pytest.mark.skip(reason=reason))


@pytest.fixture
def golden(request: pytest.FixtureRequest) -> Golden:
    """`golden(name, text)`: `text` is what `golden/name` beside the test holds."""
    update = bool(request.config.getoption("--update-golden"))
    return Golden(request.path.parent / "golden", update)


@pytest.fixture(scope="session")
def accelerator() -> Any:
    """The GPU or TPU that `make test-hardware` runs on; skips where jax has none."""
    device = jax.devices()[0]
    if device.platform == "cpu":
        pytest.skip(
            "needs a GPU or TPU, and jax has the CPU alone: `make test-hardware` where one is"
        )
    return device


@pytest.fixture(scope="session")
def tpu_compiler() -> Callable[..., topologies.TopologyDescription]:
    """`tpu_compiler("v5e:2x2").devices`: TPUs to compile for; skips where libtpu is absent."""
    os.environ.update(TPU_ENVIRONMENT)
    return lambda name, **options: topologies.get_topology_desc(
        platform="tpu", topology_name=name, **options
    )


@pytest.fixture(scope="session")
def gpu_compiler() -> Callable[..., topologies.TopologyDescription]:
    """`gpu_compiler(target_config=<text proto>, topology="1x1x1").devices`, likewise for GPUs."""
    return partial(topologies.get_topology_desc, platform="cuda")
