from typing_extensions import CapsuleType

copy_start: CapsuleType
copy_done: CapsuleType

type _Record = tuple[int, int, int, int, int, int, int, int, int, int, int, int, int]

def trace_begin(capacity: int, /) -> None: ...
def trace_end() -> tuple[list[_Record], int]: ...
def set_link_bandwidth(bytes_per_second: float, /) -> None: ...
