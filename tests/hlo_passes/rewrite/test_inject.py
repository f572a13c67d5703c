"""A hook acts on one module of one compilation, and is gone afterwards."""

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any, cast

import jax
import jax.numpy as jnp
import pytest

import hlo_passes.xla as xla
from hlo_passes.errors import HookError
from hlo_passes.ir import Module
from hlo_passes.reading.reader import read_module
from hlo_passes.rewrite import inject
from hlo_passes.rewrite.inject import TOKEN, capture, compile_with


@pytest.fixture(autouse=True)
def registered(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """Every hook that was registered; all must be gone at the end."""
    live: set[str] = set()
    seen: list[str] = []
    register, clear = xla.register_hook, xla.clear_hook

    def registering(platform: str, name: str, hook: xla.Hook) -> None:
        register(platform, name, hook)
        live.add(name)
        seen.append(name)

    def clearing(platform: str, name: str) -> bool:
        live.remove(name)
        return clear(platform, name)

    monkeypatch.setattr(xla, "register_hook", registering)
    monkeypatch.setattr(xla, "clear_hook", clearing)
    yield seen
    assert not live


def lower(scale: float = 2.0) -> Any:
    def step(x: jax.Array) -> jax.Array:
        return jnp.tanh(x @ x) * scale

    return jax.jit(step).lower(jax.ShapeDtypeStruct((8, 8), jnp.float32))


def compile_through(
    transform: Callable[[Module], Module | None], token: str = "t", scale: float = 2.0
) -> Any:
    lowered = lower(scale)
    stablehlo = lowered.compiler_ir("stablehlo")
    return compile_with("cpu", stablehlo, token, transform, lowered.compile)


def unchanged(module: Module) -> None:
    del module


def renamed(module: Module) -> Module:
    """A change that shows in the executable."""
    proto = module.to_proto()
    entry = next(c for c in proto.computations if c.id == proto.entry_computation_id)
    entry.instructions[-1].name = "seen"
    return Module(proto)


def test_capture_gives_the_scheduled_module_and_compiles_nothing(registered: list[str]):
    lowered = lower()
    module = capture("cpu", lowered.compiler_ir("stablehlo"), lowered.compile)
    assert module.is_scheduled
    assert module.attributes[TOKEN].startswith("capture-")
    assert len(registered) == 1


def test_a_transformed_module_is_what_is_compiled():
    assert "%seen =" in compile_through(renamed).as_text()
    assert "%seen =" not in compile_through(unchanged).as_text()


def lower_scanned() -> Any:
    def scanned(w: jax.Array, x: jax.Array) -> jax.Array:
        def layer(x: jax.Array, w: jax.Array) -> tuple[jax.Array, None]:
            return jnp.tanh(x @ w), None

        return jnp.sin(jax.lax.scan(layer, x, w)[0])

    shapes = (jax.ShapeDtypeStruct(s, jnp.float32) for s in ((3, 8, 8), (8, 8)))
    return jax.jit(scanned).lower(*shapes)


def test_a_transformed_module_keeps_its_source_lines():
    def lines(module: Module) -> set[tuple[str, str]]:
        found = {(i.op_name, module.source_line(i)) for i in module.instructions.values()}
        return {(name, line) for name, line in found if name.endswith(("tanh", "sin"))}

    lowered = lower_scanned()
    transformed = compile_with(
        "cpu",
        lowered.compiler_ir("stablehlo"),
        "lines",
        lambda module: Module(module.to_proto()),
        lowered.compile,
    )
    expected = lines(read_module(lower_scanned().compile()))
    assert len(expected) == 2
    assert lines(read_module(transformed)) == expected


def test_nothing_is_left_registered_for_later_compilations(registered: list[str]):
    compile_through(renamed)
    assert len(registered) == 1
    assert "%seen" not in lower().compile().as_text()


def test_where_a_hook_cannot_be_registered_none_is_left(monkeypatch: pytest.MonkeyPatch):
    cleared: list[str] = []

    def register(platform: str, *_: object) -> None:
        if platform == "second":
            raise RuntimeError("no")

    monkeypatch.setattr(inject.xla, "loaded_platforms", lambda: ["first", "second"])
    monkeypatch.setattr(inject.xla, "register_hook", register)
    monkeypatch.setattr(inject.xla, "clear_hook", lambda platform, _: cleared.append(platform))
    with pytest.raises(RuntimeError, match="no"), inject.watched():
        pass
    assert cleared == ["first"]


class Mine(BaseException):
    pass


@pytest.mark.parametrize("error", [ValueError("mine"), Mine("mine"), KeyboardInterrupt()])
def test_an_exception_in_the_transform_is_raised_as_itself(error: BaseException):
    def fails(module: Module) -> None:
        raise error

    with pytest.raises(type(error)) as raised:
        compile_through(fails)
    assert raised.value is error
    assert "%seen" not in lower().compile().as_text()


def test_an_error_of_the_compiler_is_raised_as_itself():
    error = RuntimeError("compiler")

    def compile_module() -> None:
        raise error

    for attempt in (
        lambda: capture("cpu", lower().compiler_ir("stablehlo"), compile_module),
        lambda: compile_with(
            "cpu", lower().compiler_ir("stablehlo"), "t", unchanged, compile_module
        ),
    ):
        with pytest.raises(RuntimeError) as raised:
            attempt()
        assert raised.value is error


def test_a_compiler_that_shows_nothing():
    with pytest.raises(HookError, match="without showing memplan the scheduled module"):
        capture("cpu", lower().compiler_ir("stablehlo"), lambda: None)


class Garbage:
    computations = ()
    input_output_aliases = ()

    def to_proto(self) -> Any:
        return self

    def SerializeToString(self) -> bytes:
        return b"no module"


def test_bytes_that_are_no_module():
    with pytest.raises(HookError, match="cannot read the module that it got back"):
        compile_through(lambda _: cast(Module, Garbage()))
    assert "%seen" not in lower().compile().as_text()


def compiled_elsewhere() -> bytes:
    """What another thread gets for a module of its own, which holds the token's text."""
    found: list[bytes] = []

    def compile_other() -> None:
        lowered = lower(3.0)
        xla.set_module_attribute(lowered.compiler_ir("stablehlo"), "somebody.else", "the-token")
        module = read_module(lowered.compile()).to_proto()
        module.id = 0  # XLA numbers the modules of a process.
        found.append(module.SerializeToString(deterministic=True))

    thread = threading.Thread(target=compile_other)
    thread.start()
    thread.join(timeout=60)
    return found[0]


def test_a_module_compiled_in_another_thread_during_the_callback_is_left_alone():
    during: list[bytes] = []

    def transform(module: Module) -> Module:
        during.append(compiled_elsewhere())
        return renamed(module)

    assert "%seen =" in compile_through(transform, "the-token").as_text()
    assert during == [compiled_elsewhere()]


def test_compilations_in_the_same_thread_during_the_callback_are_left_alone():
    texts: list[str] = []

    def transform(module: Module) -> Module:
        texts.append(compile_through(unchanged, "inner", 3.0).as_text())
        return renamed(module)

    assert "%seen =" in compile_through(transform, "outer").as_text()
    assert "%seen" not in texts[0]


def test_one_token_in_several_threads_transforms_each_module_once():
    calls: list[str] = []

    def transform(module: Module) -> Module:
        calls.append(module.name)
        assert not any(i.name == "seen" for i in module.entry.instructions)
        return renamed(module)

    with ThreadPoolExecutor(4) as threads:
        found = list(threads.map(lambda _: compile_through(transform, "shared"), range(8)))
    assert len(calls) == 8
    assert all("%seen =" in compiled.as_text() for compiled in found)


def test_the_token_is_no_part_of_the_fingerprint():
    modules = [
        capture("cpu", lowered.compiler_ir("stablehlo"), lowered.compile)
        for lowered in (lower(), lower(), lower(3.0))
    ]
    tokens = {module.attributes[TOKEN] for module in modules}
    assert len(tokens) == 3
    assert modules[0].fingerprint == modules[1].fingerprint != modules[2].fingerprint


def test_constants_are_named_after_their_place():
    lowered = lower()
    module = capture("cpu", lowered.compiler_ir("stablehlo"), lowered.compile)
    constants = [i.name for i in module.instructions.values() if i.opcode == "constant"]
    assert constants == [f"constant_{n}" for n in range(len(constants))]
    assert constants
