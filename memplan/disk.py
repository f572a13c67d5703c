"""Arrays whose bytes stay in files, for what does not fit into memory.

    memplan.disk.repack("checkpoint/", "model.aligned.safetensors")           once
    params = memplan.disk.load("model.aligned.safetensors", like=shapes)
    step = memplan.jit(decode, hbm="1GiB")
    params, cache = step.place(params, cache)          what stays in memory is read here
    logits, cache = step(params, cache)                the rest is streamed in each step

A file is safetensors' own format, so that whatever reads that reads these. What `save` adds is
where the tensors stand::

    0        8              64 mod 4096
    │ length │ JSON, padded │ those of whole blocks │ of whole cache lines │ the others │

Such a tensor has an address in memory without being there: the file is mapped, and an array in
``pinned_host`` memory is made of its bytes in place (XLA:CPU asks for multiples of 64). A program
of ``memplan.jit`` never touches that address: its transfers read the file, past the page cache,
straight into the slot that XLA has for them. For that the file's bytes lie as far into a block as
XLA's slots do, 64 bytes. Any other program that takes the array has the kernel read it page by
page.
"""

from __future__ import annotations

import json
import math
import os
import re
import tempfile
import time
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import IO, Any, cast

import jax
import ml_dtypes
import numpy as np
import numpy.typing as npt
from jax.sharding import SingleDeviceSharding

from custom_calls import library
from hlo_passes import xla
from hlo_passes.chains.lowering import FileSource
from hlo_passes.errors import TensorFileError
from memplan.checkpoints import arrays_of, item_of
from memplan.executable import Target
from memplan.signature import HOST_MEMORY_KIND

__all__ = ["load", "repack", "save"]

_TIER = "nvme"
_BLOCK = 4096
"""Bytes: no disk asks for coarser alignment."""
_SKEW = 64
"""Where XLA:CPU's large allocations begin, modulo `_BLOCK`: malloc's header, rounded up to the
alignment that XLA asks for."""
_LINE = 64
"""Bytes: XLA:CPU makes an array in place at multiples of this only."""
_SMALL = 1 << 20
"""Bytes up to which a tensor is read into memory where it cannot stay in its file."""
_PADDING = "memplan.padding"
_MEASURED, _PIECE = 256 << 20, 64 << 20
"""Bytes that a disk is measured with, and of one read of those."""
_CHECKSUM = "memplan.crc32c:"
"""Begins the metadata of a tensor's checksum; its name follows."""
_MOST_HEADER = 100_000_000
"""Bytes; the limit of safetensors' own readers."""

_DTYPES: Mapping[str, Any] = {
    "BOOL": np.bool_,
    "U8": np.uint8,
    "I8": np.int8,
    "U16": np.uint16,
    "I16": np.int16,
    "F16": np.float16,
    "BF16": ml_dtypes.bfloat16,
    "U32": np.uint32,
    "I32": np.int32,
    "F32": np.float32,
    "U64": np.uint64,
    "I64": np.int64,
    "F64": np.float64,
    "C64": np.complex64,
    "F8_E4M3": ml_dtypes.float8_e4m3fn,
    "F8_E5M2": ml_dtypes.float8_e5m2,
}
_CODES = {np.dtype(dtype): code for code, dtype in _DTYPES.items()}


def save(path: str | os.PathLike[str], tree: Any, *, padded: bool = False) -> None:
    """Writes the arrays of a pytree into a file, from which `load` streams them.

    The file is complete, or not there: it takes its name when all is on the disk. One array is in
    memory at a time, besides those that are anyway.

    Args:
      tree: of jax or NumPy arrays. The name of each is its path, joined by dots.
      padded: for what steps write over: have each begin a block and fill it up to its end, with
        tensors of zeros between, called ``memplan.padding`` and a number, which `load` leaves out.
        Without that, each tensor's CRC-32C is in the file's metadata.

    Raises:
      TensorFileError: when two arrays have one name, or a type that safetensors does not know.
      OSError: when the file cannot be written.
    """
    named = dict[str, Any]()
    for keys, leaf in jax.tree_util.tree_flatten_with_path(tree)[0]:
        name = _name(keys)
        if name in named:
            raise TensorFileError(path, f"two arrays are called {name!r}")
        array = leaf if hasattr(leaf, "dtype") else np.asarray(leaf)
        _check_type(name, array, path)
        named[name] = array
    if padded:
        _write(Path(path), _padded(named), 0, summed=False)
    else:
        _write(Path(path), _in_order(named), _SKEW, summed=True)


def repack(
    sources: str | os.PathLike[str] | Iterable[str | os.PathLike[str]],
    path: str | os.PathLike[str],
    *,
    told: Callable[[int, int], None] = lambda _bytes, _of: None,
) -> None:
    """Writes the tensors of safetensors files, or of an Orbax checkpoint, into one file from which
    `load` streams them, with their checksums.

    The file is complete, or not there. One tensor is in memory at a time.

    Args:
      sources: a file, several, or a folder of them; or the folder of an Orbax checkpoint, or of its
        item with arrays.
      told: called with how many bytes are written, and of how many, after each tensor.

    Raises:
      TensorFileError: when a source is no such file, or two tensors have one name.
      OSError: when a file cannot be read or written.
    """
    item = item_of(Path(sources)) if isinstance(sources, str | os.PathLike) else None
    named = tensors(sources) if item is None else arrays_of(item)
    for name, array in named.items():
        _check_type(name, array, Path(path))
    _write(Path(path), _in_order(named), _SKEW, summed=True, told=told)


def load(
    sources: str | os.PathLike[str] | Iterable[str | os.PathLike[str]], like: Any = None
) -> Any:
    """Returns the arrays of safetensors files; their bytes stay there.

    The files must not be written to while an array of them is in use. Where a file has a tensor's
    checksum (`save` and `repack` write it), whatever streams that ends with an error that names the
    file and the bytes if they are others.

    Args:
      sources: a file, several, or a folder of them.
      like: a pytree of arrays or ``jax.ShapeDtypeStruct``; None for a dict by name.

    Returns:
      jax arrays in ``pinned_host`` memory of a CPU, bound to it if that is the default device: for
      each leaf of `like` the tensor that has its path, joined by dots, as its name. What no array
      can be made of in place is in memory, if it is no more than 1 MiB.

    Raises:
      TensorFileError: when a file is not what it should be, or has a large tensor at an address
        that no array can have (`repack` mends it), or `like` asks for what is not there; where
        jax has no CPU.
      OSError: when a file cannot be read.
    """
    is_default = xla.devices()[0].platform == "cpu"
    try:
        device = xla.devices("cpu")[0]
    except RuntimeError as error:
        problem = f"arrays in files are those of a CPU, and jax has none here ({error})"
        raise TensorFileError(", ".join(map(str, _files(sources))), problem) from None
    host = SingleDeviceSharding(device, memory_kind=HOST_MEMORY_KIND)
    found = dict[str, jax.Array]()
    for source in _files(sources):
        tensors = _read_header(source)
        summed = [
            (t.offset, t.bytes, t.checksum) for t in tensors if t.checksum is not None and t.bytes
        ]
        data = np.frombuffer(library.load().MappedFile(source, summed), np.uint8)
        for tensor in tensors:
            if tensor.name.startswith(_PADDING):
                continue
            if tensor.name in found:
                raise TensorFileError(source, f"two tensors are called {tensor.name!r}")
            if tensor.offset % _LINE and tensor.bytes > _SMALL:
                problem = (
                    f"tensor {tensor.name!r} begins at byte {tensor.offset}, and arrays that stay "
                    f"in a file begin at multiples of {_LINE}: write the file anew with "
                    "memplan.disk.repack"
                )
                raise TensorFileError(source, problem)
            array = jax.device_put(tensor.of(data), host, may_alias=True)
            found[tensor.name] = array if is_default else xla.unbound(array)
    return found if like is None else _as_tree(found, like, _files(sources))


def source_of(array: Any) -> FileSource | None:
    """Where an array's bytes are, if they stay in a file that `load` mapped."""
    if not isinstance(array, jax.Array) or array.sharding.memory_kind != HOST_MEMORY_KIND:
        return None
    if not array.is_fully_addressable or len(array.devices()) > 1 or array.size == 0:
        return None
    if next(iter(array.devices())).platform != "cpu":
        return None
    place = library.load().file_place(array.unsafe_buffer_pointer())
    if place is None:
        return None
    path, offset, summed = place
    # An array of a part of a tensor begins there, too.
    size, checksum = summed or (0, None)
    return FileSource(path, offset, checksum if size == array.nbytes else None)


def count(path: Path) -> int:
    """How many tensors that are not empty a file has, without padding."""
    tensors = _read_header(path)
    return sum(t.bytes > 0 and not t.name.startswith(_PADDING) for t in tensors)


def read(array: jax.Array, source: FileSource) -> npt.NDArray[Any]:
    """The bytes of an array that stays in a file, in memory: read past the page cache, where
    nobody else has a use for them.

    Raises:
      OSError: when they cannot be read.
    """
    memory = np.empty(array.nbytes + _BLOCK, np.uint8)
    # As far into a block as in the file, so that the disk's blocks are read in place.
    begin = (source.offset - memory.ctypes.data) % _BLOCK
    own = memory[begin : begin + array.nbytes]
    library.load().read_file(source.path, own, source.offset)
    if source.checksum not in (None, found := library.load().crc32c(own)):
        raise OSError(
            f"reading {source.path}, bytes {source.offset} to {source.offset + own.size}: their "
            f"checksum is {found:#010x}, expected {source.checksum:#010x}: they are not what was "
            "written"
        )
    return own.view(array.dtype).reshape(array.shape)


def read_rate(path: str) -> float:
    """The bytes per second at which the begin of a file is read past the page cache.

    Raises:
      OSError: when it cannot be read.
    """
    size = min(_MEASURED, os.path.getsize(path))
    memory = np.ones(min(_PIECE, size), np.uint8)
    library.load().read_file(path, memory[: min(size, _BLOCK)], 0)  # A disk may be asleep.
    begin = time.perf_counter()
    for offset in range(0, size, _PIECE):
        library.load().read_file(path, memory[: size - offset], offset)
    return size / (time.perf_counter() - begin)


def fed(target: Target, leaves: Iterable[Any], *, all_of_them: bool = False) -> Target:
    """What arguments like these are planned for: where some, or all, stay in files, the host's link
    is as fast as the machine's disk, if it has one."""
    machine = target.machine
    if all(tier.name != _TIER for tier in machine.tiers):
        return target
    if not all_of_them and not any(map(source_of, leaves)):
        return target
    return replace(target, machine=machine.fed_from(_TIER))


# --- from here on: how --------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Tensor:
    """Where a tensor stands in its file; `offset` in bytes from the file's begin, `checksum` its
    CRC-32C where the file says it."""

    name: str
    dtype: np.dtype[Any]
    shape: tuple[int, ...]
    offset: int
    checksum: int | None

    @property
    def bytes(self) -> int:
        return self.dtype.itemsize * math.prod(self.shape)

    def of(self, data: npt.NDArray[np.uint8]) -> npt.NDArray[Any]:
        """The tensor as a view of all bytes of its file."""
        own = data[self.offset : self.offset + self.bytes]
        # Bytes that begin anywhere: NumPy is told so by a type without alignment.
        return np.ndarray(self.shape, self.dtype, own.data if own.size else b"")


def _name(keys: Sequence[Any]) -> str:
    return jax.tree_util.keystr(tuple(keys), simple=True, separator=".")


def _check_type(name: str, array: Any, path: object) -> None:
    if array.dtype not in _CODES:
        problem = f"{name!r} has type {array.dtype}, which safetensors does not know"
        raise TensorFileError(path, problem)


def tensors(
    sources: str | os.PathLike[str] | Iterable[str | os.PathLike[str]],
) -> Mapping[str, Any]:
    """The tensors of safetensors files by name, NumPy arrays of the files' bytes wherever these
    begin; raises as `load` does. For what is read once, and copied."""
    named = dict[str, Any]()
    for source in _files(sources):
        data = np.memmap(source, np.uint8, mode="r")
        for tensor in _read_header(source):
            if tensor.name in named:
                raise TensorFileError(source, f"two tensors are called {tensor.name!r}")
            if not tensor.name.startswith(_PADDING):
                named[tensor.name] = tensor.of(data)
    return named


def _files(sources: str | os.PathLike[str] | Iterable[str | os.PathLike[str]]) -> list[Path]:
    if not isinstance(sources, str | os.PathLike):
        return [Path(source) for source in sources]
    path = Path(sources)
    if not path.is_dir():
        return [path]
    found = sorted(path.glob("*.safetensors"))
    if not found:
        problem = "the folder has no file that ends in .safetensors"
        if item_of(path) is not None:
            problem = (
                "is an Orbax checkpoint, whose arrays are compressed: write them into a file with "
                "memplan.disk.repack, once"
            )
        raise TensorFileError(path, problem)
    return found


def _read_header(path: Path) -> list[_Tensor]:
    """The tensors of a safetensors file, in the order in which they stand there."""
    size = path.stat().st_size
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if size < 8 or length > min(size - 8, _MOST_HEADER):
            raise TensorFileError(
                path,
                f"is no safetensors file: it has {size} bytes, and says its header has {length}",
            )
        try:
            header: Any = json.loads(file.read(length))
        except ValueError as error:
            raise TensorFileError(
                path, f"is no safetensors file: its header is no JSON ({error})"
            ) from None
    if not isinstance(header, dict):
        raise TensorFileError(path, "is no safetensors file: its header is no JSON object")
    begin, entries = 8 + length, cast("dict[str, Any]", header)
    checksums = _checksums(path, entries.pop("__metadata__", None))
    tensors = [
        _tensor(path, name, entry, begin, size, checksums.get(name))
        for name, entry in entries.items()
    ]
    return sorted(tensors, key=lambda tensor: tensor.offset)


def _checksums(path: Path, metadata: Any) -> Mapping[str, int]:
    """The tensors' checksums, by name, as far as a file has them."""
    if not isinstance(metadata, dict):
        return {}
    found = dict[str, int]()
    for key, text in cast("dict[str, Any]", metadata).items():
        if not key.startswith(_CHECKSUM):
            continue
        if not isinstance(text, str) or not re.fullmatch("[0-9a-f]{8}", text):
            raise TensorFileError(path, f"{key!r} is {text!r}, expected 8 hexadecimal digits")
        found[key.removeprefix(_CHECKSUM)] = int(text, 16)
    return found


def _tensor(
    path: Path, name: str, entry: Any, begin: int, size: int, checksum: int | None
) -> _Tensor:
    try:
        code, shape, (start, end) = entry["dtype"], entry["shape"], entry["data_offsets"]
    except (TypeError, KeyError, ValueError):
        problem = f"tensor {name!r}: expected dtype, shape and data_offsets, found {entry!r}"
        raise TensorFileError(path, problem) from None
    if code not in _DTYPES:
        raise TensorFileError(path, f"tensor {name!r} has type {code!r}, which jax does not have")
    numbers = [*shape, start, end]
    if not all(isinstance(n, int) and n >= 0 for n in numbers):
        raise TensorFileError(path, f"tensor {name!r}: shape and data_offsets are {entry!r}")
    tensor = _Tensor(name, np.dtype(_DTYPES[code]), tuple(shape), begin + start, checksum)
    if end - start != tensor.bytes:
        problem = (
            f"tensor {name!r} is {tensor.dtype}{list(tensor.shape)}, {tensor.bytes} bytes, and its "
            f"data_offsets have {end - start}"
        )
        raise TensorFileError(path, problem)
    if begin + end > size:
        problem = f"tensor {name!r} ends at byte {begin + end}, and the file has {size}"
        raise TensorFileError(path, problem)
    return tensor


def _write(
    path: Path,
    named: Mapping[str, Any],
    skew: int,
    *,
    summed: bool,
    told: Callable[[int, int], None] = lambda _bytes, _of: None,
) -> None:
    """Writes arrays in their order, the first one so many bytes into a block; with checksums if
    `summed`."""
    # What transformers read has to say of what kind it is, if it has metadata.
    metadata = {"format": "pt"} | {f"{_CHECKSUM}{name}": "0" * 8 for name in named}
    header, offset = dict[str, Any](__metadata__=metadata) if summed else dict[str, Any](), 0
    for name, array in named.items():
        end = offset + array.nbytes
        header[name] = {
            "dtype": _CODES[np.dtype(array.dtype)],
            "shape": list(array.shape),
            "data_offsets": [offset, end],
        }
        offset = end

    def text() -> bytes:
        found = json.dumps(header, separators=(",", ":")).encode()
        return found + b" " * ((skew - 8 - len(found)) % _BLOCK)

    with _replacing(path) as file:
        file.write(len(text()).to_bytes(8, "little"))
        file.write(text())
        for name, array in named.items():
            data = np.ascontiguousarray(np.asarray(array)).reshape(-1).view(np.uint8).data
            file.write(data)
            if summed:
                metadata[f"{_CHECKSUM}{name}"] = f"{library.load().crc32c(data):08x}"
            told(header[name]["data_offsets"][1], offset)
        file.seek(8)
        file.write(text())  # As long as before.


def _in_order(named: Mapping[str, Any]) -> dict[str, Any]:
    """The same in the order of a file: what is a multiple of a block keeps what comes after it as
    aligned as it was itself."""
    order = sorted(named, key=lambda name: -_alignment(named[name].nbytes))
    return {name: named[name] for name in order}


def _padded(named: Mapping[str, Any]) -> dict[str, Any]:
    """The same, each filled up to whole blocks."""
    found = dict[str, Any]()
    for name, array in named.items():
        found[name] = array
        if rest := -array.nbytes % _BLOCK:
            found[f"{_PADDING}.{len(found)}"] = np.zeros(rest, np.uint8)
    return found


def _alignment(size: int) -> int:
    """The largest power of two up to a block that divides a number of bytes."""
    return math.gcd(size, _BLOCK) if size else _BLOCK


@contextmanager
def _replacing(path: Path) -> Generator[IO[bytes]]:
    """A file that takes the place of `path` when all of it is on the disk, and only then."""
    with tempfile.NamedTemporaryFile(
        dir=path.parent, prefix=f".{path.name}.", delete=False
    ) as file:
        try:
            yield file
            file.flush()
            os.fsync(file.fileno())
            os.replace(file.name, path)
        except BaseException:
            os.unlink(file.name)
            raise


def _as_tree(found: Mapping[str, jax.Array], like: Any, files: Sequence[Path]) -> Any:
    def leaf(keys: Sequence[Any], wanted: Any) -> jax.Array:
        name = _name(keys)
        where = ", ".join(map(str, files))
        if name not in found:
            near = ", ".join(map(repr, sorted(found)[:5]))
            raise TensorFileError(
                where, f"has no tensor {name!r}; it has {near}, {len(found)} in all"
            )
        array = found[name]
        if (array.shape, array.dtype) != (tuple(wanted.shape), np.dtype(wanted.dtype)):
            problem = (
                f"tensor {name!r} is {array.dtype}{list(array.shape)}, expected "
                f"{np.dtype(wanted.dtype)}{list(wanted.shape)}"
            )
            raise TensorFileError(where, problem)
        return array

    return jax.tree_util.tree_map_with_path(leaf, like)
