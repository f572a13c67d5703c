"""Imports point downwards, and what is private to jax is touched in one place; what says so does
refuse what it should."""

import ast
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
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
    for room in re.findall(
        r"hlo_passes\.([a-z]+)\b(?=[ \"])", (tmp_path / "pyproject.toml").read_text()
    ):
        (tmp_path / "hlo_passes" / room).mkdir()
        (tmp_path / "hlo_passes" / room / "__init__.py").touch()
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
        ("hlo_passes/edits", "hlo_passes.placing"),
        ("hlo_passes/fitting", "hlo_passes.analysis"),
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
        ("hlo_passes/edits", "hlo_passes.fitting"),
        ("hlo_passes/edits", "hlo_passes.orders"),
        ("hlo_passes/analysis", "hlo_passes.pipeline"),
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
    assert f"{importer.replace('/', '.')}.module -> {imported} (l.1)" in result.stdout


# --- what is private to jax -------------------------------------------------------------------

# The compiler's side and the jaxpr's.
ADAPTER = ("hlo_passes/xla.py", "hlo_passes/equations.py")
# Who else reads something of that name, and why.
OTHERS = {
    "models/llama.py": "`rngs.params` are Flax's random numbers",
    "models/training.py": "`state.params` are the parameters of a model",
    "models/vit.py": "`rngs.params` are Flax's random numbers",
    "tests/experiments/test_steps.py": "sees into which memories jax puts arrays",
    "tests/memplan/streams/test_slicing.py": "sees what calls and prints are left",
    "tests/memplan/test_products.py": "sees which layouts jax was told",
    "tests/memplan/test_trainers.py": "`state.params` are the parameters of a model",
    "tests/models/test_training.py": "`state.params` are the parameters of a model",
}


def private_to_jax(source: str, names: bool = True) -> Iterator[str]:
    """What of a module is private to jax: imports, and parameters of equations.

    Args:
      names: names of primitives as well.
    """
    for node in ast.walk(ast.parse(source)):
        match node:
            case ast.Import():
                yield from filter(_is_private, (alias.name for alias in node.names))
            case ast.ImportFrom(module=str(module), level=0):
                whole = (f"{module}.{alias.name}" for alias in node.names)
                yield from filter(_is_private, whole)
            case ast.Call(func, [ast.Constant(str(name)), *_]) if _is_private(name):
                if ast.unparse(func).endswith("import_module"):
                    yield name
            case ast.Attribute(value=ast.Name("jax"), attr="_src"):
                yield "jax._src"
            case ast.Attribute(attr="params"):
                yield ast.unparse(node)
            case ast.Attribute(attr="primitive") if names:
                yield ast.unparse(node)
            case _:
                pass


def _is_private(module: str) -> bool:
    return module == "jaxlib" or module.startswith(("jax._", "jaxlib."))


def test_jax_is_touched_in_one_place():
    paths = [path for package in PACKAGES for path in ROOT.glob(f"{package}/**/*.py")]
    files = {path.relative_to(ROOT).as_posix(): path for path in paths}
    found = {
        file: list(private_to_jax(path.read_text(), names=not file.startswith("tests/")))
        for file, path in files.items()
        if file not in ADAPTER
    }
    assert {file: names for file, names in found.items() if names and file not in OTHERS} == {}
    assert [file for file in OTHERS if not found[file]] == [], "these need no exception any more"


@pytest.mark.parametrize(
    "source",
    [
        "import jax._src.core",
        "import jaxlib",
        "from jax import _src",
        "from jax._src import core",
        "from jaxlib._jax import pjit",
        "from importlib import import_module\nimport_module('jax._src.core')",
        "import jax\njax._src.core",
        "def length(eqn):\n  return eqn.params['length']",
        "def length(eqn):\n  return eqn.params.get('length')",
        "def again(eqn, x):\n  return eqn.replace(params={**eqn.params})",
        "def is_scan(eqn):\n  return eqn.primitive.name == 'scan'",
    ],
)
def test_what_is_private_is_seen(source: str):
    assert len(list(private_to_jax(source))) == 1


@pytest.mark.parametrize(
    "source",
    [
        "import jax.extend.core",
        "from jax import numpy",
        "from importlib.metadata import version\nversion('jaxlib')",
        "from hlo_passes.equations import decode",
        "params = {}\nprint(params['jax._src'])",
    ],
)
def test_what_is_public_is_left_alone(source: str):
    assert not list(private_to_jax(source))


# --- the walk through the code ----------------------------------------------------------------


def test_the_walk_through_the_code_names_what_is_there():
    text = (ROOT / "docs" / "architecture.md").read_text()
    section = text.split("## From `hbm=` to `copy-start`", 1)[1].split("\n## ", 1)[0]
    steps = re.findall(r"^\d+\. `([\w/]+\.py)` `([\w.]+)`", section, re.MULTILINE)
    assert 5 < len(steps) <= 10
    for file, name in steps:
        scope: ast.AST = ast.parse((ROOT / file).read_text())
        for part in name.split("."):
            named = (n for n in ast.iter_child_nodes(scope) if getattr(n, "name", "") == part)
            scope = next(named)
