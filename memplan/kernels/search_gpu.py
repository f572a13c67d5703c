"""The search for the Hopper kernels' configurations: how to run them, and what they may take.

Without the hardware, candidates are judged by what the compilers make of them (`evidence_gpu`):
one that does not compile, that spills registers or whose wgmma was serialised loses; the others
are ranked by seconds that `cost_gpu` predicts from their code.
"""

from __future__ import annotations

import math
import re
import shutil
import subprocess
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from importlib.metadata import version
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from hlo_passes.errors import KernelCompilationError
from memplan.kernels import cost_gpu
from memplan.kernels.autotune import Method, Score, Search
from memplan.kernels.cost_gpu import HBM, L2, Ring, Work
from memplan.kernels.evidence_gpu import Job, KernelEvidence, each_gpu_evidence
from pallas_kernels.attention import kernel_gpu, kernel_gpu_dkv, kernel_gpu_dq
from pallas_kernels.attention.gpu_tiles import CONSUMERS
from pallas_kernels.attention.problem import Band, Problem, Segments
from pallas_kernels.attention.spans import span, transposed
from pallas_kernels.decode import kernel_gpu as decode_gpu
from pallas_kernels.decode.problem import Cache
from pallas_kernels.decode.problem import Problem as DecodeProblem
from pallas_kernels.targets import target_of

HOPPER = target_of("cuda", "NVIDIA H200")

# --- how to run them --------------------------------------------------------------------------

_SEGMENTS = 4


def _attention_inputs(problem: Problem) -> tuple[Any, ...]:
    """Queries, keys, values, segments if there are any."""
    keys = jax.random.split(jax.random.key(0), 3)
    lengths = ((problem.q_len, problem.q_heads), *((problem.kv_len, problem.kv_heads),) * 2)
    q, k, v = (
        jax.random.normal(
            key, (problem.batch, -(-length // 8) * 8, heads, problem.head_dim), problem.dtype
        )
        for key, (length, heads) in zip(keys, lengths, strict=True)
    )
    segments = None
    if problem.segments:
        segments = Segments(*(_ids(problem.batch, n) for n in (problem.q_len, problem.kv_len)))
    return q, k, v, segments


def _ids(batch: int, length: int) -> jax.Array:
    """Of a packed batch of equal segments."""
    row = jnp.arange(length, dtype=jnp.int32) * _SEGMENTS // length
    return jnp.broadcast_to(row, (batch, length))


def _backward_inputs(problem: Problem) -> tuple[Any, ...]:
    """Also log-sum-exp, delta and the gradient of the output."""
    q, k, v, segments = _attention_inputs(problem)
    rows = (problem.batch, problem.q_heads, problem.q_len)
    lse = jnp.full(rows, math.log(problem.kv_len), jnp.float32)
    return q, k, v, segments, lse, jnp.zeros(rows, jnp.float32), q


def _decode_inputs(problem: DecodeProblem) -> tuple[Any, ...]:
    """Queries, and a cache of full sequences whose pages are shuffled."""
    keys = jax.random.split(jax.random.key(0), 4)
    rows = (problem.batch, problem.q_len, problem.q_heads, problem.head_dim)
    pool = (problem.num_pages, problem.kv_heads, problem.page_size, problem.head_dim)
    q = jax.random.normal(keys[0], rows, problem.dtype)
    if problem.kv_dtype == "int8":
        k, v = (jax.random.randint(key, pool, -127, 128, jnp.int8) for key in keys[1:3])
    else:
        wide = (jax.random.normal(key, pool, problem.dtype) for key in keys[1:3])
        k, v = (each.astype(problem.kv_dtype) for each in wide)
    scales = jnp.full(pool[:3], 0.01, jnp.float32) if problem.is_quantized else None
    tables = None
    if problem.paged:
        tables = jax.random.permutation(keys[3], problem.num_pages).astype(jnp.int32)
        tables = jnp.resize(tables, (problem.batch, problem.max_pages))
    lengths = jnp.full((problem.batch,), problem.capacity, jnp.int32)
    return q, Cache(k, v, lengths, tables, scales, scales)


def _decode(
    problem: DecodeProblem, config: decode_gpu.Config, q: jax.Array, cache: Cache
) -> tuple[jax.Array, jax.Array]:
    return decode_gpu.forward(problem, HOPPER, q, cache, config)


FORWARD = Search(kernel_gpu.TUNABLE, kernel_gpu.forward, _attention_inputs)
QUERY_GRADIENT = Search(kernel_gpu_dq.TUNABLE, kernel_gpu_dq.query_gradient, _backward_inputs)
KEY_GRADIENTS = Search(kernel_gpu_dkv.TUNABLE, kernel_gpu_dkv.key_gradients, _backward_inputs)
DECODE = Search(decode_gpu.TUNABLE, _decode, _decode_inputs)
"""Each of the kernels for Hopper."""


# --- what their thread blocks do --------------------------------------------------------------


def _forward_work(problem: Problem, config: kernel_gpu.Config) -> Work:
    slot = _slot(problem, config.slots, config.block_kv)
    return _by_queries(problem, config.tile_q, config.block_kv, (slot, slot))


def _query_gradient_work(problem: Problem, config: kernel_gpu_dq.Config) -> Work:
    slots = (config.k_slots, config.v_slots)
    rings = tuple(_slot(problem, n, config.block_kv) for n in slots)
    return _by_queries(problem, config.tile_q, config.block_kv, rings)


def _by_queries(problem: Problem, tile: int, block: int, rings: tuple[Ring, ...]) -> Work:
    full, masked = _turns(problem.band, problem.q_len, problem.kv_len, tile, block)
    order = slice(None, None, -1 if problem.band.right is not None else 1)
    return _work(problem, full[order], masked[order], problem.batch * problem.q_heads, rings)


def _key_gradients_work(problem: Problem, config: kernel_gpu_dkv.Config) -> Work:
    band = transposed(problem.band)
    full, masked = _turns(band, problem.kv_len, problem.q_len, config.tile_kv, config.block_q)
    slot = _slot(problem, config.slots, config.block_q)
    order = slice(None, None, -1 if band.left is None and band.right is not None else 1)
    q_heads = problem.group // config.group_splits
    heads = problem.batch * problem.kv_heads * config.group_splits
    return _work(problem, q_heads * full[order], q_heads * masked[order], heads, (slot, slot))


def _turns(band: Band, rows: int, columns: int, tile: int, block: int) -> tuple[Any, Any]:
    """Of each tile of rows: blocks of columns that all of it sees, and that some of it does."""
    starts = np.arange(0, rows, tile)
    start, full_start, full_stop, stop = (
        np.broadcast_to(x, starts.shape) for x in span(band, starts, tile, rows, block, columns)
    )
    full = full_stop - full_start
    return full, stop - start - full


def _slot(problem: Problem, slots: int, rows: int) -> Ring:
    return Ring(slots, rows * problem.head_dim * jnp.dtype(problem.dtype).itemsize)


def _work(problem: Problem, full: Any, masked: Any, heads: int, rings: tuple[Ring, ...]) -> Work:
    if problem.segments:
        # Which blocks are full is known when it runs.
        full, masked = np.zeros_like(full), full + masked
    return Work(np.tile(full, heads), np.tile(masked, heads), CONSUMERS, rings, L2)


def _decode_work(problem: DecodeProblem, config: decode_gpu.Config) -> Work:
    seen = problem.capacity
    if problem.window is not None:
        seen = min(seen, problem.q_len + problem.window)
    blocks, parts = -(-seen // config.block), config.splits
    edges = np.arange(parts + 1) * blocks // parts
    tiles = -(-problem.rows // decode_gpu.ROWS)
    turns = np.tile(np.diff(edges), problem.batch * problem.kv_heads * tiles)
    size = config.block * problem.head_dim * jnp.dtype(problem.kv_dtype).itemsize
    ring = Ring(config.slots, size)
    return Work(turns, np.zeros_like(turns), 1, (ring, ring), HBM)


WORK: Mapping[str, Callable[[Any, Any], Work]] = {
    FORWARD.tunable.kernel: _forward_work,
    QUERY_GRADIENT.tunable.kernel: _query_gradient_work,
    KEY_GRADIENTS.tunable.kernel: _key_gradients_work,
    DECODE.tunable.kernel: _decode_work,
}


# --- the judge --------------------------------------------------------------------------------


def versions() -> dict[str, str]:
    """Of what makes the code."""
    return {"jax": jax.__version__, "cuda": version("jax-cuda13-plugin"), "ptxas": _ptxas()}


def by_evidence(machine: str = "h200") -> Method:
    """By what the compilers make of candidates, for a machine that need not be there."""
    # Nothing that the model says was measured: it has to be wrong by more than that.
    return Method("evidence", partial(_judge, machine), versions(), margin=0.2)


def _judge(
    machine: str, search: Search[Any, Any], problem: Any, candidates: Sequence[Any]
) -> Iterator[Score]:
    """Of candidates that differ in slots alone, those after the first that is clean are not tried:

    candidates have the most slots first, and with fewer nothing is predicted to be faster.
    """
    arguments = jax.eval_shape(partial(search.inputs, problem))
    groups: dict[tuple[Any, ...], list[int]] = {}
    for number, config in enumerate(candidates):
        fields = search.tunable.tuned_fields(config)
        tiles = tuple(value for name, value in fields.items() if not name.endswith("slots"))
        groups.setdefault(tiles, []).append(number)
    scores = [Score(math.inf, reason="not compiled: one with more slots is clean")] * len(
        candidates
    )
    waiting = list(groups.values())
    while waiting:
        turn = [group.pop(0) for group in waiting]
        jobs = [Job(partial(search.call, problem, candidates[n]), arguments) for n in turn]
        for number, found in zip(turn, each_gpu_evidence(jobs, machine), strict=True):
            scores[number] = _scored(search.tunable.kernel, problem, candidates[number], found)
        waiting = [
            group
            for group, number in zip(waiting, turn, strict=True)
            if group and math.isinf(scores[number].seconds)
        ]
    yield from scores


def _scored(
    name: str, problem: Any, config: Any, found: tuple[KernelEvidence, ...] | KernelCompilationError
) -> Score:
    if isinstance(found, KernelCompilationError):
        return Score(math.inf, reason=_reason(found))
    (kernel,) = (each for each in found if each.name == name)
    return score(kernel, WORK[name](problem, config))


def score(kernel: KernelEvidence, work: Work) -> Score:
    """Of one compiled candidate."""
    figures = {"registers": kernel.registers, "smem_bytes": kernel.smem_bytes}
    if kernel.spills:
        stored, loaded = kernel.spill_store_bytes, kernel.spill_load_bytes
        return Score(math.inf, figures, f"spills: {stored} bytes stored, {loaded} loaded")
    if kernel.serialised:
        return Score(math.inf, figures, "its wgmmas are serialised")
    return Score(cost_gpu.seconds(kernel, work), figures)


def _ptxas() -> str:
    """The version of the ptxas that is taken, or of none."""
    path = shutil.which("ptxas")
    if path is None:
        return "none"
    said = subprocess.run([path, "--version"], capture_output=True, text=True, check=True).stdout
    found = re.search(r"V(\d+(?:\.\d+)*)", said)
    return found[1] if found else said.strip()


def _reason(error: KernelCompilationError) -> str:
    """The last line of what the compiler wrote."""
    return error.output.strip().rpartition("\n")[2][:160] or "it does not compile"
