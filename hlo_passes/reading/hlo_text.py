"""HLO text becomes an ``HloModuleProto``, by XLA's own parser, in a process of its own.

text ── constants that are left out ─► custom calls ─┐
     ── source locations ─► all their fields ────────┴─► XLA's parser ─► proto, constants again

A check that fails in the parser ends its process, and some texts have it fail: they are not to
take the caller with them. One process reads text after text; it is replaced when it has died.
The parser fills a constant whose numbers are left out, ``constant({...})``, with zeros, however
large: here it stays without numbers, as XLA itself has such constants in protos.
"""

from __future__ import annotations

import atexit
import os
import re
import subprocess
import sys
import tempfile
import threading
from multiprocessing import Pipe

from hlo_passes import xla
from hlo_passes.errors import UnreadableModuleError
from hlo_passes.proto import hlo_pb2

# An instruction that is a constant without its numbers: what stands before the opcode, and after.
_LEFT_OUT = re.compile(
    r"^(\s*(?:ROOT\s+)?[\w.%-]+\s*=\s*\S+\s+)constant\(\s*\{\s*\.\.\.\s*\}\s*\)", re.MULTILINE
)
_STAND_IN = "memplan.left_out"

_NUMBERED = re.compile(r"^(\d+) \{((?:\w+=\d+ ?)+)\}", re.MULTILINE)

# Of a process that died, the sentence of the check that failed.
_FATAL = re.compile(r"^F\d{4} .*?(\S+:\d+\] .*?)(?=\n\*\*\*|\Z)", re.MULTILINE | re.DOTALL)


def parse(text: str, where: str) -> hlo_pb2.HloModuleProto:
    """Parses HLO text; `where` is what errors call it.

    Constants whose numbers the text leaves out have no literal.

    Raises:
      UnreadableModuleError: when XLA's parser rejects it, or does not survive it.
    """
    prepared, left_out = _LEFT_OUT.subn(
        rf'\1custom-call(), custom_call_target="{_STAND_IN}"', _completed(text)
    )
    try:
        proto = hlo_pb2.HloModuleProto.FromString(_process_parse(prepared))
    except ValueError as error:  # The parser's sentence names line and column.
        raise UnreadableModuleError(
            where,
            f"XLA's parser rejects this HLO text: {_one_line(error)}",
            "It does not end with the line '}': check that it was copied whole."
            if text.rstrip().rpartition("\n")[2] != "}"
            else "A text from a newer XLA may hold attributes that the installed jaxlib does not "
            "know: dump with --xla_dump_hlo_as_proto, which memplan reads whatever its "
            "version, or install the jaxlib that wrote it.",
        ) from error
    except OSError as error:
        raise UnreadableModuleError(
            where,
            f"XLA's parser does not survive this HLO text: {_one_line(error)}",
            "Dump with --xla_dump_hlo_as_proto, which memplan reads without that parser.",
        ) from error
    if left_out:
        _restore(proto)
    return proto


def _completed(text: str) -> str:
    """The text, with all fields that the parser wants of source locations and stack frames."""
    begin = text.find("\nFileLocations\n")
    if begin < 0:
        return text
    end = text.find("{\n", begin)  # of the first computation's head
    return text[:begin] + _NUMBERED.sub(_with_all_fields, text[begin:end]) + text[end:]


def _with_all_fields(numbered: re.Match[str]) -> str:
    """A location or a frame with all that xla/hlo/parser/hlo_parser.cc asks for; dumps of other
    versions lack some. Of a frame without a parent, the text's number for it is 1."""
    found = dict(field.split("=") for field in numbered[2].split())
    if "file_location_id" in found:
        fields = {"parent_frame_id": "1"} | found
    else:
        # XLA forgets all locations where two are equal, or one has no function.
        missing = {"function_name_id": "1", "line": "0", "column": "0", "end_column": numbered[1]}
        fields = missing | {"end_line": found.get("line", "0")} | found
    return f"{numbered[1]} {{{' '.join(f'{k}={v}' for k, v in fields.items())}}}"


def _restore(proto: hlo_pb2.HloModuleProto) -> None:
    for computation in proto.computations:
        for i in computation.instructions:
            if i.custom_call_target == _STAND_IN:
                constant = hlo_pb2.HloInstructionProto(
                    name=i.name,
                    opcode="constant",
                    shape=i.shape,
                    metadata=i.metadata,
                    id=i.id,
                    control_predecessor_ids=i.control_predecessor_ids,
                    frontend_attributes=i.frontend_attributes,
                )
                i.CopyFrom(constant)


class _Process:
    """A process of XLA's parser."""

    def __init__(self) -> None:
        self._said = tempfile.TemporaryFile()
        self._pipe, theirs = Pipe()
        with theirs:
            program = (sys.executable or "python3", "-S", "-W", "ignore", "-c", xla.TEXT_PARSER)
            self._process = subprocess.Popen(
                [*program, str(theirs.fileno()), *sys.path],
                stdin=subprocess.DEVNULL,
                stdout=self._said,
                stderr=self._said,
                pass_fds=[theirs.fileno()],
            )

    def is_alive(self) -> bool:
        return self._process.poll() is None

    def parse(self, text: str) -> bytes:
        """Returns a serialized ``HloModuleProto``.

        Raises:
          ValueError: when the parser rejects the text.
          OSError: when the process ends, with the last that it said.
        """
        try:
            self._pipe.send_bytes(text.encode())
            accepted = self._pipe.recv_bytes() == b"\1"
            answer = self._pipe.recv_bytes()
        except (EOFError, OSError):
            raise ChildProcessError(self._last_words(self._process.wait())) from None
        if not accepted:
            raise ValueError(answer.decode(errors="replace"))
        return answer

    def _last_words(self, code: int) -> str:
        self._said.seek(0)
        said = self._said.read().decode(errors="replace")
        fatal = _FATAL.search(said)
        lines = [line for line in said.splitlines() if line.strip()]
        words = fatal[1] if fatal else lines[-1] if lines else "it says nothing"
        return f"{words} (exit code {code})"

    def end(self) -> None:
        self._process.kill()
        self._process.wait()
        self._close()

    def forget(self) -> None:
        """Leaves it to the process that this one was forked from."""
        self._process.returncode = 0
        self._close()

    def _close(self) -> None:
        self._pipe.close()
        self._said.close()


_lock = threading.Lock()
_process: _Process | None = None


def _process_parse(text: str) -> bytes:
    global _process
    with _lock:
        if _process is None or not _process.is_alive():
            _end()
            _process = _Process()
        try:
            return _process.parse(text)
        except ValueError:
            raise
        except BaseException:  # It died, or was interrupted, and owes an answer.
            _end()
            raise


def _end() -> None:
    global _process
    if _process is not None:
        _process.end()
        _process = None


def _after_fork() -> None:
    global _lock, _process
    _lock = threading.Lock()
    if _process is not None:
        _process.forget()
        _process = None


atexit.register(_end)
os.register_at_fork(after_in_child=_after_fork)


def _one_line(error: Exception, limit: int = 400) -> str:
    return " ".join(str(error).split())[:limit]
