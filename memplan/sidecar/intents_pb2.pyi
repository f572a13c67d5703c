from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class Intents(_message.Message):
    __slots__ = ("format", "version", "module", "module_fingerprint", "plan_fingerprint", "machine", "device_tier", "step_s", "ticks", "loops", "buffers", "pools", "crc32")
    FORMAT_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    MODULE_FIELD_NUMBER: _ClassVar[int]
    MODULE_FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    PLAN_FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    MACHINE_FIELD_NUMBER: _ClassVar[int]
    DEVICE_TIER_FIELD_NUMBER: _ClassVar[int]
    STEP_S_FIELD_NUMBER: _ClassVar[int]
    TICKS_FIELD_NUMBER: _ClassVar[int]
    LOOPS_FIELD_NUMBER: _ClassVar[int]
    BUFFERS_FIELD_NUMBER: _ClassVar[int]
    POOLS_FIELD_NUMBER: _ClassVar[int]
    CRC32_FIELD_NUMBER: _ClassVar[int]
    format: str
    version: int
    module: str
    module_fingerprint: str
    plan_fingerprint: str
    machine: str
    device_tier: str
    step_s: float
    ticks: _containers.RepeatedCompositeFieldContainer[Tick]
    loops: _containers.RepeatedCompositeFieldContainer[Loop]
    buffers: _containers.RepeatedCompositeFieldContainer[Buffer]
    pools: _containers.RepeatedCompositeFieldContainer[Pool]
    crc32: int
    def __init__(self, format: _Optional[str] = ..., version: _Optional[int] = ..., module: _Optional[str] = ..., module_fingerprint: _Optional[str] = ..., plan_fingerprint: _Optional[str] = ..., machine: _Optional[str] = ..., device_tier: _Optional[str] = ..., step_s: _Optional[float] = ..., ticks: _Optional[_Iterable[_Union[Tick, _Mapping]]] = ..., loops: _Optional[_Iterable[_Union[Loop, _Mapping]]] = ..., buffers: _Optional[_Iterable[_Union[Buffer, _Mapping]]] = ..., pools: _Optional[_Iterable[_Union[Pool, _Mapping]]] = ..., crc32: _Optional[int] = ...) -> None: ...

class Tick(_message.Message):
    __slots__ = ("instruction", "op_name", "source_line", "loop", "begin_s")
    INSTRUCTION_FIELD_NUMBER: _ClassVar[int]
    OP_NAME_FIELD_NUMBER: _ClassVar[int]
    SOURCE_LINE_FIELD_NUMBER: _ClassVar[int]
    LOOP_FIELD_NUMBER: _ClassVar[int]
    BEGIN_S_FIELD_NUMBER: _ClassVar[int]
    instruction: str
    op_name: str
    source_line: str
    loop: int
    begin_s: float
    def __init__(self, instruction: _Optional[str] = ..., op_name: _Optional[str] = ..., source_line: _Optional[str] = ..., loop: _Optional[int] = ..., begin_s: _Optional[float] = ...) -> None: ...

class Loop(_message.Message):
    __slots__ = ("tick", "body", "outer", "trip_count", "executions")
    TICK_FIELD_NUMBER: _ClassVar[int]
    BODY_FIELD_NUMBER: _ClassVar[int]
    OUTER_FIELD_NUMBER: _ClassVar[int]
    TRIP_COUNT_FIELD_NUMBER: _ClassVar[int]
    EXECUTIONS_FIELD_NUMBER: _ClassVar[int]
    tick: int
    body: LiveRange
    outer: int
    trip_count: int
    executions: int
    def __init__(self, tick: _Optional[int] = ..., body: _Optional[_Union[LiveRange, _Mapping]] = ..., outer: _Optional[int] = ..., trip_count: _Optional[int] = ..., executions: _Optional[int] = ...) -> None: ...

class LiveRange(_message.Message):
    __slots__ = ("start", "end")
    START_FIELD_NUMBER: _ClassVar[int]
    END_FIELD_NUMBER: _ClassVar[int]
    start: int
    end: int
    def __init__(self, start: _Optional[int] = ..., end: _Optional[int] = ...) -> None: ...

class Buffer(_message.Message):
    __slots__ = ("name", "label", "source_line", "kind", "shape", "size", "tier", "block", "live", "writes", "reads", "dead_after", "idle", "next_read_s", "load_s", "evict_s", "recompute_s", "fallback")
    NAME_FIELD_NUMBER: _ClassVar[int]
    LABEL_FIELD_NUMBER: _ClassVar[int]
    SOURCE_LINE_FIELD_NUMBER: _ClassVar[int]
    KIND_FIELD_NUMBER: _ClassVar[int]
    SHAPE_FIELD_NUMBER: _ClassVar[int]
    SIZE_FIELD_NUMBER: _ClassVar[int]
    TIER_FIELD_NUMBER: _ClassVar[int]
    BLOCK_FIELD_NUMBER: _ClassVar[int]
    LIVE_FIELD_NUMBER: _ClassVar[int]
    WRITES_FIELD_NUMBER: _ClassVar[int]
    READS_FIELD_NUMBER: _ClassVar[int]
    DEAD_AFTER_FIELD_NUMBER: _ClassVar[int]
    IDLE_FIELD_NUMBER: _ClassVar[int]
    NEXT_READ_S_FIELD_NUMBER: _ClassVar[int]
    LOAD_S_FIELD_NUMBER: _ClassVar[int]
    EVICT_S_FIELD_NUMBER: _ClassVar[int]
    RECOMPUTE_S_FIELD_NUMBER: _ClassVar[int]
    FALLBACK_FIELD_NUMBER: _ClassVar[int]
    name: str
    label: str
    source_line: str
    kind: str
    shape: str
    size: int
    tier: str
    block: int
    live: _containers.RepeatedCompositeFieldContainer[LiveRange]
    writes: _containers.RepeatedScalarFieldContainer[int]
    reads: _containers.RepeatedScalarFieldContainer[int]
    dead_after: int
    idle: Gap
    next_read_s: float
    load_s: float
    evict_s: float
    recompute_s: float
    fallback: str
    def __init__(self, name: _Optional[str] = ..., label: _Optional[str] = ..., source_line: _Optional[str] = ..., kind: _Optional[str] = ..., shape: _Optional[str] = ..., size: _Optional[int] = ..., tier: _Optional[str] = ..., block: _Optional[int] = ..., live: _Optional[_Iterable[_Union[LiveRange, _Mapping]]] = ..., writes: _Optional[_Iterable[int]] = ..., reads: _Optional[_Iterable[int]] = ..., dead_after: _Optional[int] = ..., idle: _Optional[_Union[Gap, _Mapping]] = ..., next_read_s: _Optional[float] = ..., load_s: _Optional[float] = ..., evict_s: _Optional[float] = ..., recompute_s: _Optional[float] = ..., fallback: _Optional[str] = ...) -> None: ...

class Gap(_message.Message):
    __slots__ = ("start", "end", "seconds")
    START_FIELD_NUMBER: _ClassVar[int]
    END_FIELD_NUMBER: _ClassVar[int]
    SECONDS_FIELD_NUMBER: _ClassVar[int]
    start: int
    end: int
    seconds: float
    def __init__(self, start: _Optional[int] = ..., end: _Optional[int] = ..., seconds: _Optional[float] = ...) -> None: ...

class Pool(_message.Message):
    __slots__ = ("buffer", "is_stack", "page_bytes", "reads", "writes")
    BUFFER_FIELD_NUMBER: _ClassVar[int]
    IS_STACK_FIELD_NUMBER: _ClassVar[int]
    PAGE_BYTES_FIELD_NUMBER: _ClassVar[int]
    READS_FIELD_NUMBER: _ClassVar[int]
    WRITES_FIELD_NUMBER: _ClassVar[int]
    buffer: int
    is_stack: bool
    page_bytes: int
    reads: _containers.RepeatedCompositeFieldContainer[PageIntent]
    writes: _containers.RepeatedCompositeFieldContainer[PageIntent]
    def __init__(self, buffer: _Optional[int] = ..., is_stack: bool = ..., page_bytes: _Optional[int] = ..., reads: _Optional[_Iterable[_Union[PageIntent, _Mapping]]] = ..., writes: _Optional[_Iterable[_Union[PageIntent, _Mapping]]] = ...) -> None: ...

class PageIntent(_message.Message):
    __slots__ = ("tick", "access")
    TICK_FIELD_NUMBER: _ClassVar[int]
    ACCESS_FIELD_NUMBER: _ClassVar[int]
    tick: int
    access: PageAccess
    def __init__(self, tick: _Optional[int] = ..., access: _Optional[_Union[PageAccess, _Mapping]] = ...) -> None: ...

class PageAccess(_message.Message):
    __slots__ = ("pool", "tokens", "sequences", "pages", "queries", "window")
    POOL_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    SEQUENCES_FIELD_NUMBER: _ClassVar[int]
    PAGES_FIELD_NUMBER: _ClassVar[int]
    QUERIES_FIELD_NUMBER: _ClassVar[int]
    WINDOW_FIELD_NUMBER: _ClassVar[int]
    pool: _containers.RepeatedScalarFieldContainer[int]
    tokens: int
    sequences: int
    pages: int
    queries: int
    window: int
    def __init__(self, pool: _Optional[_Iterable[int]] = ..., tokens: _Optional[int] = ..., sequences: _Optional[int] = ..., pages: _Optional[int] = ..., queries: _Optional[int] = ..., window: _Optional[int] = ...) -> None: ...
