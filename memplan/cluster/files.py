"""Work as files, in which a program may be a compiled module."""

from __future__ import annotations

import json
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

from hlo_passes.cluster.cluster import Cluster
from hlo_passes.cluster.compiled import program_of
from hlo_passes.cluster.work import Work
from hlo_passes.errors import ClusterFileError
from hlo_passes.pipeline import rewrite_module
from hlo_passes.plan import Plan
from hlo_passes.reading.reader import read_module


def read_work(path: str | Path, cluster: Cluster) -> Work:
    """Reads a file, TOML or (``.json``) JSON, in the form of `Work.to_dict`.

    A program with ``module``, the path of a scheduled module from the file's folder, has its
    ``segments``, ``traffic`` and ``memory_bytes`` from that; with ``plan``, the path of what
    `Plan.save` wrote, the module is first written anew by that plan.

    Raises:
      ClusterFileError: when the file is missing, or not in that form.
      MemplanError: when a module or a plan is none, or they do not go together.
    """
    path = Path(path)
    try:
        text = path.read_text(encoding="utf-8")
        data: Any = json.loads(text) if path.suffix == ".json" else tomllib.loads(text)
    except (OSError, ValueError) as error:
        raise ClusterFileError(str(path), "", "a readable file", str(error)) from error
    if isinstance(data, dict) and isinstance(data.get("programs"), list):
        data["programs"] = [_program(entry, cluster, path) for entry in data["programs"]]
    return Work.from_dict(data, str(path))


def _program(entry: Any, cluster: Cluster, path: Path) -> Any:
    """The entry of a file, with what a module says in it."""
    if not isinstance(entry, dict) or "module" not in entry:
        return entry
    left = dict(cast("Mapping[str, Any]", entry))
    texts: list[str] = []
    for key in ("module", "name", "node", "plan"):
        value = left.pop(key, "") if key == "plan" else left.pop(key, None)
        if not isinstance(value, str):
            raise ClusterFileError(str(path), f"programs.{key}", "a string", repr(value))
        texts.append(value)
    module_path, name, node, plan_path = texts
    machine = cluster.node(node).machine
    if machine is None:
        raise ClusterFileError(str(path), "programs.node", "a node of chips", repr(node))
    module = read_module(path.parent / module_path)
    if plan_path:
        module = rewrite_module(module, Plan.load(path.parent / plan_path), machine)
    program = program_of(module, machine, name=name, node=node)
    made = Work((program,)).to_dict()["programs"]
    (of_module,) = cast("list[dict[str, Any]]", made)
    for key in ("segments", "traffic", "memory_bytes"):
        if key in left:
            raise ClusterFileError(str(path), f"programs.{key}", "no such key beside module", key)
    return {**of_module, **left}
