from collections.abc import Buffer, Sequence

from typing_extensions import CapsuleType

gate: CapsuleType
gate_on_gpu: CapsuleType
storing_gate: CapsuleType
store: CapsuleType

class Runtime:
    """Replays a chain.

    Args:
      chain: as `hlo_passes.chains.binary.to_bytes` writes it.
      bound: an address for each bound space, in the order of the spaces. The memory has to be there
        while replays run.
      depth: requests to a disk under way at once, of each stream.
      chunk: bytes of a request, a multiple of 4096.
      use_uring: False for threads, as where the kernel has no io_uring.
      log: of how many descriptors each stream keeps what happened, the last ones; 0 for none.
      steps: how many steps of a program with gates a replay is; they have equally many segments,
        on the stream of the chain's first one.
      gpu: whose memory the arenas are, by its number among those that the process sees; below 0 for
        the host's.

    Raises:
      ValueError: for bytes that are no chain, with the offset of what is wrong; or where `bound`
        has not as many addresses as the chain has bound spaces.
      OSError: when an arena cannot be allocated, a file cannot be opened or is too short, or there
        is no such GPU.
    """

    def __new__(
        cls,
        chain: Buffer,
        bound: Sequence[int],
        *,
        depth: int = 16,
        chunk: int = 1 << 20,
        use_uring: bool = True,
        log: int = 0,
        steps: int = 1,
        gpu: int = -1,
    ) -> Runtime: ...
    def bind(self, bound: Sequence[int], /) -> None:
        """Other addresses for the bound spaces.

        Raises:
          RuntimeError: while a replay is under way.
        """

    def start(self, replays: int, /) -> None:
        """Begins so many more replays, and returns. What the arenas hold is as it was left."""

    def wait(self) -> None:
        """Waits until the replays that were started have ended.

        Raises:
          OSError: what ended them: names the descriptor, its stream and replay, and of a file the
            byte. Nothing is replayed any more.
        """

    def cancel(self, why: str = "the replay was cancelled", /) -> None:
        """Ends all replays; copies that are under way end first. Whoever waits gets an OSError."""

    def enter(self, stream: int, /) -> int | None:
        """Waits until the next segment of a stream may run.

        Returns:
          The segment, by index; None when the replays that were started have no more, or ended with
          what `wait` raises. One thread at a time drives a stream.
        """

    def leave(self, stream: int, /) -> None:
        """The segment that was entered has run."""

    def address(self, slot: int, /) -> int:
        """Where a slot lies; 0 in a file.

        Raises:
          IndexError: when the chain has no such slot.
        """

    def allocated_bytes(self) -> int:
        """Bytes of all arenas: what the chain says, in whole pages of 4096."""

    def is_running(self) -> bool: ...
    def failure(self) -> str:
        """What went wrong so far, or ``""``."""

    def log(self) -> bytes:
        """What `custom_calls.runtime.events` reads."""
