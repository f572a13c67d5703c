"""Traces of requests: when, and for which prefix.

A trace is a ``.npz`` of arrays, for N requests and B blocks:

    time    float64[N]  seconds; does not fall
    n_in    int[N]      tokens of the prompt
    last    int[N]      the last whole block of the prompt, -1 if it has none
    plen    int[N]      whole blocks of the prompt
    parent  int[B]      how much less the number of the block before is; -1 for none before
    session int[N]      optional: who asks; -1 unknown
    meta    int[>=1]    tokens of a block, and whatever follows

or a ``.jsonl`` as Mooncake has published them, and others replay: a line for each request, with
``timestamp`` in milliseconds, ``input_length`` in tokens, and ``hash_ids``, a number for each block
of the prompt (the last one need not be whole) that stands for all tokens up to its end.
"""

from __future__ import annotations

import json
import zipfile
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Self

import numpy as np
import numpy.typing as npt

from memplan.kv.errors import KvSettingError, TraceError

type _Ints = npt.NDArray[np.int64]
type _Blocks = npt.NDArray[np.int32]


@dataclass(frozen=True)
class Trace:
    """Requests in the order of their arrival.

    Attributes:
      time: float64[N], seconds.
      n_in: int64[N], tokens of prompts.
      paths: for each request int32[blocks], the blocks of its prompt from the first on. A block is
        a number for all the tokens up to its end.
      session: int64[N], who asks; -1 unknown.
      block_tokens: tokens of a block.
      blocks: how many there are.
    """

    time: npt.NDArray[np.float64]
    n_in: _Ints
    paths: tuple[_Blocks, ...]
    session: _Ints
    block_tokens: int
    blocks: int

    @classmethod
    def load(cls, path: Path, block_tokens: int = 512) -> Self:
        """Reads a trace.

        Args:
          path: of a ``.npz``, or of lines of JSON.
          block_tokens: of the latter, which do not say it.

        Raises:
          TraceError: for a file that is none.
          KvSettingError: for blocks of no tokens.
          OSError: for one that cannot be read.
        """
        with path.open("rb") as file:
            if not zipfile.is_zipfile(file):
                file.seek(0)
                return cls.of(_arrays_of_lines(file, path, block_tokens), path)
            file.seek(0)
            try:
                with np.load(file) as archive:
                    arrays = {name: archive[name] for name in archive.files}
            except (ValueError, KeyError, zipfile.BadZipFile, EOFError) as error:
                raise TraceError(path, f"its arrays cannot be read ({error})") from error
        return cls.of(arrays, path)

    @classmethod
    def of(cls, arrays: Mapping[str, npt.NDArray[Any]], path: object = "trace") -> Self:
        """Makes a trace of a file's arrays; raises as `load` does, `path` is the file's name."""
        for name in ("time", "n_in", "last", "plen", "parent", "meta"):
            if name not in arrays:
                raise TraceError(path, f"no array {name!r} in it")
        for name in ("time", "n_in", "last", "plen", "parent", "meta", "session"):
            kinds = "iuf" if name == "time" else "iu"
            if name in arrays and (arrays[name].dtype.kind not in kinds or arrays[name].ndim != 1):
                found = f"{arrays[name].dtype}{list(arrays[name].shape)}"
                raise TraceError(path, f"{name} is {found}, not one dimension of numbers")
        time = np.asarray(arrays["time"], np.float64)
        n_in, last, plen = (np.asarray(arrays[name], np.int64) for name in ("n_in", "last", "plen"))
        parent = np.asarray(arrays["parent"], np.int64)
        session = np.asarray(arrays.get("session", np.full(time.shape, -1)), np.int64)
        block_tokens = int(arrays["meta"][0]) if arrays["meta"].size else 0
        if block_tokens < 1:
            raise TraceError(path, "meta does not begin with the tokens of a block")
        requests, blocks = time.size, parent.size
        for name, array in (("n_in", n_in), ("last", last), ("plen", plen), ("session", session)):
            if array.shape != (requests,):
                raise TraceError(path, f"{name} is of shape {array.shape}, of time {time.shape}")
        if not np.isfinite(time).all() or (np.diff(time) < 0).any():
            raise TraceError(path, "time falls, or is none")
        if ((plen < 0) | (n_in < plen * block_tokens)).any():
            raise TraceError(path, "a prompt has more whole blocks than its tokens make")
        before = np.arange(blocks) - parent
        if ((before < -1) | (before >= np.arange(blocks))).any():
            raise TraceError(path, "a block's parent does not come before it")
        if ((last < -1) | (last >= blocks) | ((last == -1) != (plen == 0))).any():
            raise TraceError(path, "last is no block, or plen is not 0 where there is none")
        paths = tuple(_path(before, int(last[k]), int(plen[k]), path) for k in range(requests))
        return cls(time, n_in, paths, session, block_tokens, blocks)

    @cached_property
    def returns(self) -> _Ints:
        """int64[N]: the request that goes on from each, -1 if none does: the session's next one, or
        where no session is known the next one for all of its blocks."""
        following = np.full(len(self.paths), -1, np.int64)
        next_of_block = np.full(self.blocks, -1, np.int64)
        next_of_session: dict[int, int] = {}
        for request in reversed(range(len(self.paths))):
            path, session = self.paths[request], int(self.session[request])
            if session >= 0:
                following[request] = next_of_session.get(session, -1)
                next_of_session[session] = request
            elif path.size:
                following[request] = next_of_block[path[-1]]
            next_of_block[path] = request
        return following


def _arrays_of_lines(
    lines: Iterable[bytes], path: object, block_tokens: int
) -> dict[str, npt.NDArray[Any]]:
    if block_tokens < 1:
        raise KvSettingError("block_tokens", block_tokens, "at least 1")
    times, tokens, lasts, lengths = [], [], [], []
    numbers: dict[int, int] = {}
    parents = list[int]()
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            request = json.loads(line)
            time, n_in = float(request["timestamp"]) / 1e3, int(request["input_length"])
            ids = [int(one) for one in request["hash_ids"]]
        except (ValueError, KeyError, TypeError, OverflowError) as error:
            raise TraceError(path, f"line {number} is no request ({error!r})") from error
        if len(ids) not in (n_in // block_tokens, -(-n_in // block_tokens)):
            raise TraceError(
                path,
                f"line {number} has {len(ids)} hash_ids for {n_in} tokens in blocks of "
                f"{block_tokens}; say how many tokens a block has",
            )
        before = -1
        for one in ids[: n_in // block_tokens]:
            block = numbers.setdefault(one, len(parents))
            if block == len(parents):
                parents.append(block - before)
            elif block - parents[block] != before:
                raise TraceError(path, f"line {number}: hash id {one} stands behind two others")
            before = block
        times.append(time)
        tokens.append(n_in)
        lasts.append(before)
        lengths.append(n_in // block_tokens)
    arrays = {"n_in": tokens, "last": lasts, "plen": lengths, "parent": parents}
    return {
        "time": np.array(times, np.float64),
        "meta": np.array([block_tokens]),
        **{name: np.array(values, np.int64) for name, values in arrays.items()},
    }


def _path(before: _Ints, last: int, blocks: int, file: object) -> _Blocks:
    path = np.empty(blocks, np.int32)
    for at in reversed(range(blocks)):
        if last < 0:
            raise TraceError(file, f"a path of {blocks} blocks begins {at + 1} blocks too late")
        path[at] = last
        last = before[last]
    if blocks and last != -1:
        raise TraceError(file, f"a path of {blocks} blocks has others before it")
    return path
