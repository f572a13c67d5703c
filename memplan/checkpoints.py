"""Checkpoints of Orbax, an array at a time.

Their arrays are compressed, in chunks of OCDBT or zarr, so that none can be streamed from where it
is: `memplan.disk.repack` writes them anew, once.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

import jax
import numpy as np
import numpy.typing as npt

from hlo_passes.errors import TensorFileError

_MARK = "_METADATA"
"""The file that an item of arrays has."""


@dataclass(frozen=True)
class Stored:
    """An array of a checkpoint, which is read when its values are asked for."""

    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    restore: Callable[[], npt.NDArray[Any]]

    @property
    def nbytes(self) -> int:
        return int(np.prod(self.shape)) * self.dtype.itemsize

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> npt.NDArray[Any]:
        return self.restore()


def item_of(path: Path) -> Path | None:
    """The folder of arrays that is an Orbax checkpoint at `path`, or is the only one within it, of
    one step or of the only one; None where there is none.

    Raises:
      TensorFileError: when there are several.
    """
    if (path / _MARK).is_file():
        return path
    marks = [*path.glob(f"*/{_MARK}")] or [*path.glob(f"*/*/{_MARK}")]
    if len(marks) > 1:
        names = ", ".join(sorted(str(mark.parent.relative_to(path)) for mark in marks))
        raise TensorFileError(path, f"has several folders of arrays: name one of {names}")
    return marks[0].parent if marks else None


def arrays_of(item: Path) -> Mapping[str, Stored]:
    """The arrays of an Orbax item by their paths, joined by dots.

    Raises:
      TensorFileError: when Orbax is not installed, or cannot read it.
    """
    try:
        ocp = import_module("orbax.checkpoint")
    except ImportError as error:
        problem = f"is an Orbax checkpoint, which needs `pip install orbax-checkpoint` ({error})"
        raise TensorFileError(item, problem) from None
    checkpointer = ocp.PyTreeCheckpointer()

    def read(call: Callable[[], Any]) -> Any:
        try:
            return call()
        except Exception as error:  # Orbax does not say which it raises.
            raise TensorFileError(item, f"Orbax cannot read it: {error}") from error

    tree = read(lambda: checkpointer.metadata(item.absolute()).item_metadata.tree)
    told, treedef = jax.tree_util.tree_flatten_with_path(tree)
    as_numpy = treedef.unflatten([ocp.RestoreArgs(restore_type=np.ndarray)] * len(told))

    def restored(k: int) -> npt.NDArray[Any]:
        wanted = [ocp.PLACEHOLDER] * len(told)
        wanted[k] = told[k][1]
        what = ocp.args.PyTreeRestore(item=treedef.unflatten(wanted), restore_args=as_numpy)
        tree = read(lambda: checkpointer.restore(item.absolute(), args=what))
        return jax.tree.leaves(tree, is_leaf=lambda leaf: leaf is ocp.PLACEHOLDER)[k]

    return {
        jax.tree_util.keystr(keys, simple=True, separator="."): Stored(
            tuple(leaf.shape), np.dtype(leaf.dtype), lambda k=k: restored(k)
        )
        for k, (keys, leaf) in enumerate(told)
        if hasattr(leaf, "shape")  # Strings are no arrays.
    }
