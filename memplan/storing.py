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
from hlo_passes.errors import NotReplayableError, StateFolderError
from memplan.function import Function
from memplan.signature import HOST_MEMORY_KIND
from memplan.stages import Traced
from memplan.state import Folder

_REFUSED = frozenset({"in_shardings", "out_shardings", "static_argnames", "static_argnums"})


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
    if kwargs or given.keys() & _REFUSED:
        problem = "is changed by functions of positional arguments without shardings only"
        raise StateFolderError(folder.path, problem)
    if len(donated) != (count := folder.count()):
        # The other file would have nothing of the rest.
        problem = f"has {count} arrays, of which {len(donated)} are donated: donate all of them"
        raise StateFolderError(folder.path, problem)
    results = _matched(donated, args, traced.out_info)
    if missing := [n for n in donated if n not in results]:
        path = traced.lower().placing.lowering.paths[missing[0]]
        raise StateFolderError(
            folder.path,
            f"no result takes the place of argument {path}: for each donated argument one result "
            "has its structure and types",
        )
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
            if any(values[k] is argument for argument in arguments):
                raise NotReplayableError(f"result {k} is an argument as it was")
            values[k] = mark(arguments[n], values[k])
        return values

    functools.update_wrapper(marked, fun)
    return marked


def _matched(donated: Sequence[int], args: Sequence[Any], results: Any) -> dict[int, int]:
    """The flat result that takes the place of each flat argument.

    That of a whole positional argument is a result, or an element of the results, of its structure
    and types; where several arguments are alike, there are as many such, in their order.
    """
    parts = list(results) if isinstance(results, tuple | list) else [results]
    alike: dict[Any, tuple[list[range], list[range]]] = {}
    for side, trees in enumerate((args, parts)):
        n = 0
        for tree in trees:
            leaves, structure = jax.tree.flatten(tree)
            own = range(n, n + len(leaves))
            n = own.stop
            if side == 1 or any(m in own for m in donated):
                types = tuple((leaf.shape, leaf.dtype) for leaf in leaves)
                alike.setdefault((structure, types), ([], []))[side].append(own)
    return {
        n: k
        for arguments, found in alike.values()
        if len(arguments) == len(found)
        for argument, result in zip(arguments, found, strict=True)
        for n, k in zip(argument, result, strict=True)
        if n in donated
    }


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
