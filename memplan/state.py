"""State that steps change, on the disk: whenever they are ended, one step's state is there, whole.

    memplan.state.save("run/state", state)                          once
    state = memplan.state.load("run/state", like=state)             also after a crash
    train = memplan.jit(step, hbm="1GiB", donate_argnums=0)
    with train.runtime(state, batch) as run:
        for batch in batches:
            state, loss = run(state, batch)                         state stays on the disk

A folder has two files of the same tensors, and says which one counts. All of them are donated to
a step that changes any. A step reads that one, and
writes the other; when all of that is on the disk, the other one counts:

    even.safetensors   odd.safetensors   epoch.json  {"epoch": 7}: seven steps; the odd file

Both are safetensors, with tensors of padding between, so that each has blocks of its own.
"""

from __future__ import annotations

import fcntl
import json
import os
import tempfile
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hlo_passes.chains.lowering import FileSource
from hlo_passes.errors import StateFolderError
from memplan import disk

__all__ = ["load", "save"]

_NAMES = ("even.safetensors", "odd.safetensors")
_EPOCH = "epoch.json"


def save(folder: str | os.PathLike[str], tree: Any) -> None:
    """Writes the arrays of a pytree into a folder that is not there yet, as epoch 0.

    The folder is complete, or not there. It takes twice the bytes of the arrays.

    Raises:
      StateFolderError: when the folder is there.
      TensorFileError: when two arrays have one name, or a type that safetensors does not know.
      OSError: when there is no room for it, or a file cannot be written.
    """
    path = Path(folder)
    if path.exists():
        raise StateFolderError(path, "is there already: load it, or remove it")
    with tempfile.TemporaryDirectory(dir=path.parent, prefix=f".{path.name}.") as made:
        whole = Path(made) / "state"
        whole.mkdir()
        even, odd = (whole / name for name in _NAMES)
        disk.save(even, tree, padded=True)
        with even.open("rb") as source, odd.open("xb") as twin:
            size, header = even.stat().st_size, int.from_bytes(source.read(8), "little")
            source.seek(0)
            twin.write(source.read(8 + header))
            os.posix_fallocate(twin.fileno(), 0, size)
            os.fsync(twin.fileno())
        _write_epoch(whole, 0)
        _sync(whole)
        os.rename(whole, path)
        _sync(path.parent)


def load(folder: str | os.PathLike[str], like: Any = None) -> Any:
    """Returns the arrays of the last step that was whole; their bytes stay in the folder.

    Args:
      like: as of `memplan.disk.load`.

    Raises:
      StateFolderError: when the folder is no such state.
      TensorFileError: when a file of it is not what it should be, or `like` asks for others.
    """
    found = Folder.at(Path(folder))
    return disk.load(found.path / _NAMES[found.epoch() % 2], like=like)


@dataclass(frozen=True, slots=True)
class Folder:
    """A folder of state."""

    path: Path

    @classmethod
    def at(cls, path: Path) -> Folder:
        """
        Raises:
          StateFolderError: when there is none.
        """
        if not (path / _EPOCH).is_file():
            raise StateFolderError(path, f"is no folder of state: it has no {_EPOCH}")
        return cls(path)

    @classmethod
    def of(cls, array: Any) -> Folder | None:
        """The one that an array's bytes are in, if they are in one."""
        source = disk.source_of(array)
        if source is None or Path(source.path).name not in _NAMES:
            return None
        folder = Path(source.path).parent
        return cls(folder) if (folder / _EPOCH).is_file() else None

    def count(self) -> int:
        """How many arrays it has."""
        return disk.count(self.path / _NAMES[0])

    def epoch(self) -> int:
        """How many steps its state has seen.

        Raises:
          StateFolderError: when it does not say.
        """
        text = (self.path / _EPOCH).read_text()
        try:
            epoch = json.loads(text)["epoch"]
        except (ValueError, TypeError, KeyError):
            raise StateFolderError(self.path, f"{_EPOCH} has {text!r}") from None
        if not isinstance(epoch, int) or epoch < 0:
            raise StateFolderError(self.path, f"{_EPOCH} has {text!r}")
        return epoch

    def taken(self, sources: Iterable[FileSource]) -> int:
        """Takes the folder for one user, who has arrays of it; returns a descriptor to close.

        Raises:
          StateFolderError: when somebody else has it, or the arrays are of an older epoch.
        """
        descriptor = os.open(self.path, os.O_RDONLY)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            newest = self.path / _NAMES[self.epoch() % 2]
            if any(Path(source.path) != newest for source in sources):
                raise StateFolderError(
                    self.path,
                    f"was loaded before epoch {self.epoch()}, which is there: load it again",
                )
        except BlockingIOError:
            os.close(descriptor)
            raise StateFolderError(self.path, "is in use by another runtime") from None
        except BaseException:
            os.close(descriptor)
            raise
        return descriptor

    def commit(self, epoch: int) -> None:
        """Has the file of an epoch count, once all that was written to it is on the disk.

        Raises:
          StateFolderError: when it is not the next one.
        """
        if epoch != self.epoch() + 1:
            raise StateFolderError(self.path, f"is at epoch {self.epoch()}, not {epoch - 1}")
        with (self.path / _NAMES[epoch % 2]).open("rb") as file:
            os.fdatasync(file.fileno())
        _write_epoch(self.path, epoch)
        _sync(self.path)


def release(descriptor: int) -> None:
    """Gives back a folder that was `Folder.taken`, also where the process has forked since."""
    fcntl.flock(descriptor, fcntl.LOCK_UN)
    os.close(descriptor)


def twin_of(source: FileSource) -> FileSource:
    """The same bytes in the other file of a folder."""
    path = Path(source.path)
    other = _NAMES[1 - _NAMES.index(path.name)]
    return FileSource(str(path.with_name(other)), source.offset)


def _write_epoch(folder: Path, epoch: int) -> None:
    path = folder / f".{_EPOCH}"
    with path.open("w") as file:
        json.dump({"epoch": epoch}, file)
        file.flush()
        os.fsync(file.fileno())
    os.replace(path, folder / _EPOCH)


def _sync(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
