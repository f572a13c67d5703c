"""The repository itself: what is tracked, what is shipped, one version."""

import pkgutil
import re
import shutil
import subprocess
import sys
import tomllib
import zipfile
from importlib import metadata
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

import memplan
from hlo_passes import check_jax

ROOT = Path(__file__).parent.parent
SHIPPED = ("custom_calls", "hlo_passes", "memplan", "pallas_kernels")
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]

# Written so that this file does not match itself.
OF_ONE_MACHINE = re.compile(
    rb"/(?:hom[e]|roo[t]|wor[k]|User[s])/[\w.-]"
    rb"|/tm[p]/(?!xla|hlo|dump)[\w.-]"
    rb"|fil[e]:///"
    rb"|--(?:extra-)?inde[x]-url|--find-link[s]|--trusted-hos[t]"
    rb"|pyp[i]\.org|pythonhoste[d]\.org|registry\.npmj[s]"
)


def tracked_files() -> list[Path]:
    command = ["git", "ls-files", "-z"]
    listing = subprocess.run(command, cwd=ROOT, capture_output=True, check=False)
    if listing.returncode != 0:
        pytest.skip("not a git checkout")
    paths = (ROOT / name.decode() for name in listing.stdout.split(b"\0") if name)
    return [path for path in paths if path.is_file()]


def constraints() -> dict[str, str]:
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    pins = (line.split("==") for line in lines if line and not line.startswith("#"))
    return {canonicalize_name(name): version for name, version in pins}


@pytest.mark.parametrize(
    "line",
    [
        b'op_name="x" source_file="/hom' + b'e/someone/model.py"',
        b"pip install --inde" + b"x-url somewhere",
        b"see /wor" + b"k/tree",
    ],
)
def test_the_pattern_finds_what_belongs_to_one_machine(line: bytes):
    assert OF_ONE_MACHINE.search(line)


@pytest.mark.parametrize("line", [b"--xla_dump_to=/tmp/xla", b"jax.experimental/x", b"network/a"])
def test_the_pattern_leaves_the_rest_alone(line: bytes):
    assert not OF_ONE_MACHINE.search(line)


def test_no_tracked_file_names_a_machine_or_a_registry():
    found = [
        f"{path.relative_to(ROOT)}:{number}: {match[0].decode()}"
        for path in tracked_files()
        for number, line in enumerate(path.read_bytes().splitlines(), 1)
        if (match := OF_ONE_MACHINE.search(line))
    ]
    assert not found, "\n".join(found)


def test_no_tracked_file_is_built_or_downloaded():
    found = [p for p in tracked_files() if p.suffix in (".whl", ".so", ".gz", ".zip", ".tar")]
    large = [p for p in tracked_files() if p.stat().st_size > 1 << 18]
    assert not found, "what is built or downloaded does not belong here"
    assert not large, "the largest files are pictures and captured modules, of 150 KiB or so"


def test_the_version_is_the_one_installed():
    assert memplan.__version__ == metadata.version("memplan")


def test_no_module_hides_a_public_name():
    # Importing a module makes it an attribute of its package, in the place of a function.
    modules = {m.name for m in pkgutil.iter_modules(memplan.__path__)}
    assert not modules & set(memplan.__all__)


def test_the_changelog_knows_the_version():
    headings = re.findall(r"^## \[(.+?)\]", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert memplan.__version__ in headings


@pytest.mark.parametrize("package", SHIPPED)
def test_the_shipped_packages_are_typed(package: str):
    assert (ROOT / package / "py.typed").exists()


def test_every_pin_satisfies_what_the_project_requires():
    pins = constraints()
    extras = PROJECT["optional-dependencies"]
    pinned = ("tpu", "cuda", "models", "serve", "docs", "dev")
    texts = [*PROJECT["dependencies"], *(text for name in pinned for text in extras[name])]
    for requirement in map(Requirement, texts):
        pin = pins.get(canonicalize_name(requirement.name))
        assert pin is not None, f"{requirement.name} has no pin: run `make constraints`"
        assert requirement.specifier.contains(pin), f"{requirement} does not allow {pin}"


def test_another_jax_is_refused_in_one_sentence_and_as_the_project_requires():
    (required,) = (r for r in map(Requirement, PROJECT["dependencies"]) if r.name == "jax")
    for found in ("0.11.1", "0.11.2", "0.12.0.1", "0.12.9", "0.13.0", "0.13.0.dev20261101", "1.0"):
        if required.specifier.contains(found):
            check_jax(found)
        else:
            with pytest.raises(ImportError, match=f"and found {re.escape(found)}: pip install"):
                check_jax(found)


def test_generated_protobuf_code_is_not_newer_than_the_required_runtime():
    (required,) = (r for r in map(Requirement, PROJECT["dependencies"]) if r.name == "protobuf")
    for path in (p for of in ("hlo_passes", "memplan") for p in ROOT.glob(f"{of}/**/*_pb2.py")):
        match = re.search(r"Protobuf Python Version: (\S+)", path.read_text())
        assert match, f"{path} does not say which protobuf generated it"
        assert f">={match[1]}" in str(required.specifier), f"{path} needs protobuf >= {match[1]}"


@pytest.mark.slow
def test_the_wheel_ships_the_four_packages_with_their_data(tmp_path: Path):
    source = tmp_path / "source"
    tracked = [path.relative_to(ROOT) for path in tracked_files()]
    for path in tracked:
        (source / path).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / path, source / path)
    pip = [sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "--no-build-isolation"]
    subprocess.run([*pip, "-w", tmp_path, source], check=True)

    (wheel,) = tmp_path.glob("*.whl")
    names = set(zipfile.ZipFile(wheel).namelist())
    top = {name.split("/")[0] for name in names}
    assert top == {*SHIPPED, f"memplan-{memplan.__version__}.dist-info"}
    suffixes = {".html", ".proto", ".py", ".pyi", ".toml", ".typed"}
    due = {path.as_posix() for path in tracked if path.suffix in suffixes}
    assert not {name for name in due if name.split("/")[0] in SHIPPED} - names
