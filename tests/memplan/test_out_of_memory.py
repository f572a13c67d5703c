"""Errors for lack of memory, with what the memory is for."""

import inspect
import re
import subprocess
import sys
import textwrap
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import pytest

import memplan
from hlo_passes.rewrite import inject
from memplan import out_of_memory, topologies
from memplan.executable import Program
from memplan.stages import Lowered
from tests.memplan.chains import chain

HEADING = "memplan on what the memory is for:"


def too_large(x: jax.Array) -> jax.Array:
    """Takes 256 TiB for 2 ** 23 numbers, which XLA:CPU does not find out before it runs."""
    return (jnp.outer(x, x) + 1).sum(axis=0) @ jnp.outer(x, x)


def large(x: jax.Array) -> jax.Array:
    """Takes 16 GiB and more for 2 ** 16 × 2 ** 16 numbers: a TPU v5e has less."""
    return (x @ x + 1).sum(axis=0) @ (x @ x)


def note_of(error: BaseException) -> str:
    (note,) = [note for note in error.__notes__ if note.startswith(HEADING)]
    return note


def line_of(program: Callable[..., Any]) -> str:
    """Where a program of one line under one of docstring stands."""
    return f"test_out_of_memory.py:{inspect.getsourcelines(program)[1] + 2}"


def exhausted(text: str) -> Exception:
    return jax.errors.JaxRuntimeError(f"RESOURCE_EXHAUSTED: {text}")


def explained(text: str) -> str:
    with pytest.raises(jax.errors.JaxRuntimeError) as raised, memplan.explain_oom():
        raise exhausted(text)
    return note_of(raised.value)


@pytest.mark.parametrize("when", ["before", "inside"])
def test_a_program_that_there_is_no_room_to_run(when: str):
    x = jnp.ones(1 << 23)
    step = jax.jit(too_large)
    run = step.lower(x).compile() if when == "before" else step
    with pytest.raises(jax.errors.JaxRuntimeError) as raised, memplan.explain_oom():
        jax.block_until_ready(run(x))
    assert "Out of memory allocating" in str(raised.value)
    note = note_of(raised.value)
    assert "jit_too_large, as XLA scheduled it" in note
    assert "256.00 TiB" in note
    assert line_of(too_large) in note
    assert "float32[8388608]" in note


def test_a_result_that_there_is_no_room_for():
    with pytest.raises(jax.errors.JaxRuntimeError) as raised, memplan.explain_oom():
        jax.block_until_ready(jax.jit(lambda: jnp.zeros((1 << 23, 1 << 20)))())
    assert "32.00 TiB" in note_of(raised.value)


@pytest.mark.tpu
@pytest.mark.parametrize("by", ["jax", "memplan"])
def test_a_program_that_xla_does_not_compile(by: str):
    there = topologies.topology("v5e").sharding()
    x = jax.ShapeDtypeStruct((1 << 16, 1 << 16), jnp.float32, sharding=there)
    if by == "memplan":
        compile_program: Any = memplan.jit(large, machine="v5e").lower(x).unplanned
    else:
        compile_program = memplan.explain_oom()(jax.jit(large).lower(x).compile)
    with pytest.raises(jax.errors.JaxRuntimeError, match="Ran out of memory") as raised:
        compile_program()
    note = note_of(raised.value)
    assert "jit_large, as XLA scheduled it" in note
    assert line_of(large) in note
    assert "arrays on a device" not in note


@pytest.mark.tpu
def test_a_plan_that_xla_does_not_compile(monkeypatch):
    """As where its later passes need what the plan left free: what is told is of the module with
    the plan in it."""
    compiler = Program.compiler

    def failing(self: Program, options: Any) -> Callable[[], Any]:
        def compile_program() -> None:
            compiler(self, options)()
            raise exhausted("by a hair")

        return compile_program

    weights = [jax.ShapeDtypeStruct((2048, 2048), jnp.float32)] * 4
    step = memplan.jit(chain, hbm="48MiB", machine="v5e")
    lowered = step.lower(weights, jax.ShapeDtypeStruct((8, 2048), jnp.float32))
    monkeypatch.setattr(Program, "compiler", failing)
    with pytest.raises(jax.errors.JaxRuntimeError, match="by a hair") as raised:
        lowered.compile()
    (together,) = re.findall(r"together +([\d.]+) MiB", note_of(raised.value))
    assert float(together) <= 48  # It is 64 MiB and more without a plan.


@pytest.mark.parametrize("call", ["step(x)", "step.lower(x).compile()(x)"])
def test_memplan_jit_explains_by_itself(call: str):
    """In a process where programs run at once: otherwise they fail after the call."""
    program = f"""
        import jax, jax.numpy as jnp, memplan
        jax.config.update("jax_cpu_enable_async_dispatch", False)
        from tests.memplan.test_out_of_memory import note_of, too_large
        step, x = memplan.jit(too_large, hbm="1024TiB"), jnp.ones(1 << 23)
        try:
            {call}
        except jax.errors.JaxRuntimeError as error:
            print(note_of(error))
    """
    command = [sys.executable, "-c", textwrap.dedent(program)]
    found = subprocess.run(command, capture_output=True, text=True, check=True)
    assert "jit_too_large, as XLA scheduled it" in found.stdout


def test_what_could_not_be_compiled_is_not_compiled_again_to_explain_it(
    monkeypatch: pytest.MonkeyPatch,
):
    compiled: list[object] = []

    def failing(self: Lowered, options: Any = None) -> None:
        compiled.append(options)
        raise exhausted("at compile time")

    monkeypatch.setattr(Lowered, "compile", failing)
    with pytest.raises(jax.errors.JaxRuntimeError, match="at compile time"):
        memplan.jit(too_large, hbm="1024TiB")(jnp.ones(8))
    assert len(compiled) == 1


def test_sizes_are_found_as_they_are_rounded():
    @jax.jit
    def twelve(x):
        return jnp.sort(jnp.sin(x)[::-1]) @ x

    jax.block_until_ready(twelve(jnp.ones(3 << 20)))
    assert "jit_twelve" in explained("Attempting to allocate 12.00M. That was not possible.")
    assert "cannot be told" in explained("Attempting to allocate 12.73M. That was not possible.")


@pytest.mark.slow
def test_of_programs_that_ask_for_as_much_the_last_one_is_meant():
    for n in range(3):

        def step(x: jax.Array, n: int = n) -> jax.Array:
            return jnp.sort(jnp.sin(x)[::-1]) @ x + n

        step.__name__ = f"step_{n}"
        jax.block_until_ready(jax.jit(step)(jnp.ones(5 << 20)))
    assert "jit_step_2," in explained("Out of memory allocating 20971520 bytes.")


def test_a_program_that_nothing_tells():
    kept = jnp.ones((4099, 4099))  # 64 MiB: only the largest are listed, of all that is alive
    note = explained("a lack of something")
    assert "Which program it is cannot be told" in note
    assert f"float32{list(kept.shape)}" in note


def test_other_errors_are_left_alone():
    with pytest.raises(jax.errors.JaxRuntimeError) as raised, memplan.explain_oom():
        raise jax.errors.JaxRuntimeError("INVALID_ARGUMENT: no")
    assert not hasattr(raised.value, "__notes__")


def test_it_is_explained_once():
    outside, inside = memplan.explain_oom(), memplan.explain_oom()
    with pytest.raises(jax.errors.JaxRuntimeError) as raised, outside, inside:
        raise exhausted("no")
    note_of(raised.value)


def test_an_error_of_the_explanation_does_not_replace_the_users(monkeypatch):
    def fail(said: str) -> None:
        raise ValueError("broken")

    monkeypatch.setattr(out_of_memory, "_asking", fail)
    assert "for an error of its own: ValueError: broken" in explained("no")


def test_nothing_is_watched_afterwards():
    with inject.watched() as inside:
        jax.jit(lambda x: x + 1)(1.0)
    assert inside
    seen = len(inside)
    inside.clear()
    jax.jit(lambda x: x + 2)(1.0)
    assert not inside
    assert seen <= 4
