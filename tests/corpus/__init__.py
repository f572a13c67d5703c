"""Final modules of programs compiled for TPU, GPU and CPU, with XLA's count of their memory."""

from __future__ import annotations

import json
import lzma
from pathlib import Path

from hlo_passes.analysis.sharing import Target
from hlo_passes.ir import Module
from hlo_passes.reading.reader import read_module

MODULES = Path(__file__).parent / "modules"
MEMORY = Path(__file__).parent / "memory.json"


def read_bytes(name: str) -> bytes:
    """The serialized `HloModuleProto` of ``<program>.<target>``."""
    return lzma.decompress((MODULES / f"{name}.pb.xz").read_bytes())


def read(name: str) -> Module:
    return read_module(read_bytes(name))


def memory() -> dict[str, dict[str, int]]:
    """``<program>.<target>`` to XLA's argument, output, alias and temp bytes."""
    return json.loads(MEMORY.read_text())


def platform(key: str) -> Target:
    """The platform of ``<program>.<target>``."""
    platforms: dict[str, Target] = {"v5e": "tpu", "h200": "gpu", "cpu": "cpu"}
    return platforms[key.rpartition(".")[2]]
