"""Programs that store results on the disk in place of returning them; see `memplan.state`."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
from jax.sharding import SingleDeviceSharding

import custom_calls
from custom_calls import targets
from hlo_passes.errors import StateFolderError
from memplan.function import Function
from memplan.signature import HOST_MEMORY_KIND
from memplan.stages import Traced
from memplan.state import Folder


@dataclass(frozen=True)
class Stored:
    """What a program stores.

    Attributes:
      results: of flat arguments, which flat result takes the place of each.
      folder: that they are in.
      tree: of the results, when they were returned.
    """

    results: Mapping[int, int]
    folder: Folder
    tree: Any


def storing(
    function: Function, trace: Callable[[], Traced], args: Sequence[Any], kwargs: Mapping[str, Any]
) -> tuple[Stored, Function] | None:
    """Returns what a function stores of its arguments, and it as one that does; its results are
    flat then, with a number in place of what is stored.

    Stored are those that are donated and lie in a folder of `memplan.state`. None where there are
    none.

    Args:
      trace: traces the function with these arguments.

    Raises:
      StateFolderError: when they lie in several, or a result is missing, or the function is not one
        of positional arguments without shardings.
    """
    leaves = jax.tree.leaves(function.static.dynamic(tuple(args), dict(kwargs)))
    folders = {n: found for n, leaf in enumerate(leaves) if (found := Folder.of(leaf))}
    if not folders:
        return None
    traced = trace()
    infos = jax.tree.leaves(traced.args_info)
    donated = [n for n in folders if infos[n].donated]
    if not donated:
        return None
    folder = folders[donated[0]]
    if any(folders[n] != folder for n in donated):
        raise StateFolderError(folder.path, "is one of several whose arrays are donated")
    given = function.jit_options
    if kwargs or given.keys() & {"in_shardings", "out_shardings", "static_argnums"}:
        problem = "is changed by functions of positional arguments without shardings only"
        raise StateFolderError(folder.path, problem)
    results = _matched(donated, infos, jax.tree.leaves(traced.out_info))
    if missing := [n for n in donated if n not in results]:
        path = traced.lower().placing.lowering.paths[missing[0]]
        raise StateFolderError(folder.path, f"no result takes the place of argument {path}")
    stored = Stored(results, folder, jax.tree.structure(traced.out_info))
    custom_calls.register()
    options = {name: v for name, v in given.items() if not name.startswith("donate_")}
    options["donate_argnums"] = tuple(_donated_whole(args, infos, results))
    options["in_shardings"] = jax.tree.unflatten(
        jax.tree.structure(tuple(args)),
        [_on_host(leaf) if n in results else None for n, leaf in enumerate(leaves)],
    )
    return stored, replace(
        function,
        fun=_with_marks(function.fun, results),
        options=replace(function.options, in_runtime=True),
        jit_options=options,
    )


def _with_marks(fun: Callable[..., Any], results: Mapping[int, int]) -> Callable[..., list[Any]]:
    def marked(*args: Any) -> list[Any]:
        arguments, values = jax.tree.leaves(args), jax.tree.leaves(fun(*args))
        number = jax.ShapeDtypeStruct((), "int32")
        mark = jax.ffi.ffi_call(targets.STORE, number, has_side_effect=True)
        for n, k in results.items():
            values[k] = mark(arguments[n], values[k])
        return values

    functools.update_wrapper(marked, fun)
    return marked


def _matched(donated: Sequence[int], arguments: Any, results: Any) -> dict[int, int]:
    """For each argument the first result of its type that is no other one's, as jax has it."""
    left = {k: (result.shape, result.dtype) for k, result in enumerate(results)}
    found: dict[int, int] = {}
    for n in donated:
        wanted = arguments[n].shape, arguments[n].dtype
        at = next((k for k, of in left.items() if of == wanted), None)
        if at is not None:
            found[n] = at
            del left[at]
    return found


def _donated_whole(
    args: Sequence[Any], infos: Sequence[Any], stored: Mapping[int, int]
) -> Iterator[int]:
    """The positional arguments that are donated, and none of which is stored."""
    n = 0
    for k, arg in enumerate(args):
        own = range(n, n + len(jax.tree.leaves(arg)))
        n = own.stop
        if any(infos[m].donated for m in own) and not any(m in stored for m in own):
            yield k


def _on_host(leaf: Any) -> SingleDeviceSharding:
    (device,) = leaf.devices()
    return SingleDeviceSharding(device, memory_kind=HOST_MEMORY_KIND)
