"""Imports point downwards, and the contracts that say so do refuse what they should."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PACKAGES = (
    "custom_calls",
    "experiments",
    "hlo_passes",
    "memplan",
    "models",
    "pallas_kernels",
    "tests",
)
LINT = (
    "import sys; from importlinter.cli import lint_imports; sys.exit(lint_imports(no_cache=True))"
)


def lint(folder: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", LINT]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """The contracts over packages that are empty, so far."""
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    for package in PACKAGES:
        (tmp_path / package).mkdir()
        (tmp_path / package / "__init__.py").touch()
    (tmp_path / "custom_calls" / "targets.py").touch()
    (tmp_path / "custom_calls" / "register.py").touch()
    return tmp_path


def test_the_layers_hold():
    result = lint(ROOT)
    assert result.returncode == 0, result.stdout + result.stderr


@pytest.mark.parametrize(
    ("importer", "imported"),
    [
        ("hlo_passes", "custom_calls.targets"),
        ("memplan", "custom_calls.register"),
        ("memplan", "hlo_passes"),
        ("models", "memplan"),
        ("models", "pallas_kernels"),
        ("experiments", "hlo_passes"),
        ("tests", "experiments"),
    ],
)
def test_an_import_downwards_is_left_alone(project: Path, importer: str, imported: str):
    (project / importer / "module.py").write_text(f"import {imported}\n")
    result = lint(project)
    assert result.returncode == 0, result.stdout + result.stderr


@pytest.mark.parametrize(
    ("importer", "imported"),
    [
        ("hlo_passes", "memplan"),
        ("hlo_passes", "custom_calls.register"),
        ("hlo_passes", "pallas_kernels"),
        ("custom_calls", "hlo_passes"),
        ("pallas_kernels", "custom_calls.targets"),
        ("pallas_kernels", "memplan"),
        ("memplan", "models"),
        ("models", "hlo_passes"),
        ("memplan", "tests"),
    ],
)
def test_an_import_upwards_is_refused(project: Path, importer: str, imported: str):
    (project / importer / "module.py").write_text(f"import {imported}\n")
    result = lint(project)
    assert result.returncode == 1, result.stdout + result.stderr
    assert f"{importer}.module -> {imported} (l.1)" in result.stdout
