"""Plans of clusters, run: their numbers are those of plain jax."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from experiments.cluster_drawn import drawn
from experiments.cluster_replay import _Expected
from experiments.cluster_works import chips_of, training, two_slices
from hlo_passes.chains.chain import SpaceKind
from hlo_passes.errors import ClusterError
from memplan import cluster

WIDTH, ROWS, MICROBATCHES = 64, 16, 6
ACTIVATION, WEIGHT = 4 * ROWS * WIDTH, 4 * WIDTH * WIDTH


def forward(w, x):
    y = jnp.tanh(x @ w)
    return y, jnp.stack([x, y])


def last(w, x):
    y, saved = forward(w, x)
    return saved, (y**2).sum()


def gradients(w, g, dy, saved):
    x, y = saved
    dz = dy * (1 - y * y)
    return dz @ w.T, g + x.T @ dz


def functions(stages: int) -> dict[str, Any]:
    """Of each stage, with flows in the order of the work: what comes from the next stage first."""
    end = stages - 1
    found: dict[str, Any] = {f"f{s}": jax.jit(forward) for s in range(end)}
    found[f"f{end}"] = jax.jit(last)
    for s in range(1, end):
        found[f"b{s}"] = jax.jit(gradients)
    found["b0"] = jax.jit(lambda w, g, dy, saved: gradients(w, g, dy, saved)[1])
    found[f"b{end}"] = jax.jit(lambda w, g, saved: gradients(w, g, 2 * saved[1], saved))
    return found


@pytest.fixture(scope="module")
def trained():
    """A plan of four stages on two slices, its functions, and what is given."""
    slices = two_slices()
    work = training(slices, MICROBATCHES, activation=ACTIVATION, saved=2 * ACTIVATION, memory=0)
    states = tuple(cluster.State(s.name, s.node, WEIGHT) for s in work.states)
    plan = cluster.plan(slices, cluster.Work(work.programs, work.flows, states))
    rng = np.random.default_rng(0)
    stages = range(len(chips_of(slices)))
    given = {f"w{s}": rng.normal(size=(WIDTH, WIDTH)).astype("f4") / 8 for s in stages}
    given |= {f"g{s}": np.zeros((WIDTH, WIDTH), "f4") for s in stages}
    given |= {f"x#{n}": rng.normal(size=(ROWS, WIDTH)).astype("f4") for n in range(MICROBATCHES)}
    like = {
        f"{kind}{s}": jax.ShapeDtypeStruct((ROWS, WIDTH), "f4")
        for s in stages
        for kind in ("act", "grad")
    }
    like |= {f"saved{s}": jax.ShapeDtypeStruct((2, ROWS, WIDTH), "f4") for s in stages}
    like["loss"] = jax.ShapeDtypeStruct((), np.dtype("f4"))
    return plan, functions(len(stages)), given, like


def test_a_pipeline_over_two_slices_computes_what_plain_jax_does(trained):
    plan, of_programs, given, like = trained
    found = cluster.run(plan, of_programs, given, like)

    def loss(ws, xs):
        for w in ws:
            xs = jnp.tanh(xs @ w)
        return (xs**2).sum()

    xs = np.stack([given[f"x#{n}"] for n in range(MICROBATCHES)])
    expected, gradient = jax.value_and_grad(loss)([given[f"w{s}"] for s in range(4)], xs)
    total = sum(found[f"loss#{n}"] for n in range(MICROBATCHES))
    np.testing.assert_allclose(total, expected, rtol=1e-5)
    for s in range(4):
        np.testing.assert_allclose(found[f"g{s}"], gradient[s], rtol=1e-4, atol=1e-4)


def test_every_run_has_the_same_bits(trained):
    first, second = (cluster.run(*trained) for _ in range(2))
    assert first.keys() == second.keys()
    for name, array in first.items():
        np.testing.assert_array_equal(array, second[name])


def test_weights_come_from_the_host():
    """A program's own traffic is part of the chain: the function takes what it brought."""
    slices = cluster.tpu_slice("v5e:1x2", "1x2")
    fetch = cluster.Traffic("fetch", "host", "hbm", "w", WEIGHT, 0, 0, 1)
    programs = tuple(
        cluster.Program(f"p{s}", f"tpu{s}", (1e-3,), 3, traffic=(fetch,)) for s in range(2)
    )
    flows = (
        cluster.Flow("x", "", "p0", ACTIVATION),
        cluster.Flow("h", "p0", "p1", ACTIVATION),
        cluster.Flow("y", "p1", "", ACTIVATION),
    )
    plan = cluster.plan(slices, cluster.Work(programs, flows))
    rng = np.random.default_rng(0)
    weights = [rng.normal(size=(WIDTH, WIDTH)).astype("f4") for _ in range(2)]
    xs = [rng.normal(size=(ROWS, WIDTH)).astype("f4") for _ in range(3)]
    given = {f"p{s}/w": w for s, w in enumerate(weights)} | {f"x#{n}": x for n, x in enumerate(xs)}
    like = {name: jax.ShapeDtypeStruct((ROWS, WIDTH), "f4") for name in ("h", "y")}
    product = jax.jit(lambda x, w: x @ w)
    found = cluster.run(plan, {"p0": product, "p1": product}, given, like)
    for n, x in enumerate(xs):
        np.testing.assert_allclose(
            found[f"y#{n}"], x @ weights[0] @ weights[1], rtol=1e-4, atol=1e-3
        )


def test_what_a_function_raises_ends_all(trained):
    plan, of_programs, given, like = trained

    def broken(*_):
        raise ZeroDivisionError("in stage 2")

    with pytest.raises(ZeroDivisionError, match="in stage 2"):
        cluster.run(plan, {**of_programs, "b2": broken}, given, like)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda f, g, k: (f | {"f1": lambda w, x: x}, g, k), "f1 returns 1 arrays. Expected 2"),
        (lambda f, g, k: (f | {"f1": lambda w, x: (x, x)}, g, k), r"f1 returns float32\[16, 64\]"),
        (lambda f, g, k: ({n: f[n] for n in f if n != "b1"}, g, k), "no function for b1"),
        (lambda f, g, k: (f, {n: g[n] for n in g if n != "w2"}, k), "w2 is not given"),
        (lambda f, g, k: (f, g | {"w2": np.zeros(3)}, k), "w2 has 24 bytes. The plan has 16384"),
        (lambda f, g, k: (f, g, {n: k[n] for n in k if n != "act0"}), "what shape act0#0 has"),
    ],
)
def test_what_does_not_fit_is_named(trained, change, message):
    plan, *rest = trained
    with pytest.raises(ClusterError, match=message):
        cluster.run(plan, *change(*rest))


def test_programs_of_compilers_are_not_run_here():
    slices = cluster.tpu_slice("v5e:2x2")
    plan = cluster.plan(slices, cluster.Work((cluster.Program("p", "tpu", (1e-3, 1e-3)),)))
    with pytest.raises(ClusterError, match="program p is more than one segment"):
        cluster.run(plan, {"p": lambda: ()}, {}, {})


def hashed(read: list[int], result: int) -> int:
    return (17 + 31 * result + sum((k + 3) * of for k, of in enumerate(read))) % 251


def one_by_one(expected: Any, given: dict[str, int]) -> dict[str, int]:
    """What a work computes, from what each of its runs reads and writes by name."""
    values = dict(given)
    left = list(expected.streams)
    while left:
        name = next(n for n in left if all(of in values for of in expected.reads[n]))
        left.remove(name)
        read = [values[of] for of in expected.reads[name]]
        for k, of in enumerate(expected.writes[name]):
            values[of] = hashed(read, k)
    return values


def of_single_segments(work: cluster.Work) -> cluster.Work:
    programs = tuple(
        replace(
            p,
            segments=p.segments[:1],
            traffic=tuple(t for t in p.traffic if t.end == 1 or (t.leaves and t.start == 1)),
        )
        for p in work.programs
    )
    flows = tuple(replace(f, at=-1, needed=0) for f in work.flows)
    return replace(work, programs=programs, flows=flows)


def test_drawn_works_compute_what_their_programs_do_one_by_one():
    """Flows with few slots, states that several programs write, transfers from and to hosts."""
    count = 0
    for seed in range(80):
        machines, work = drawn(random.Random(seed), odd=0)
        work = of_single_segments(work)
        try:
            plan = cluster.plan(machines, work)
        except ClusterError:
            continue
        expected = _Expected(work.to_dict())
        rng = random.Random(seed)
        bound = {s.name: s.bytes for s in plan.chain.spaces if s.kind == SpaceKind.BOUND}
        taken = {f"{f.name}#{n}" for f in work.flows if not f.destination for n in work.runs(f)}
        given = {name: rng.randrange(251) for name in bound if name not in taken}
        start = {f"{of}@0" if of in expected.changes else of: n for of, n in given.items()}
        values = one_by_one(expected, start)
        like = {f.name: jax.ShapeDtypeStruct((f.bytes,), "u1") for f in work.flows}
        for p in work.programs:
            size = machines.node(p.node).count
            like |= {
                f"{p.name}#{run}/{t.of}": jax.ShapeDtypeStruct((t.bytes * size,), "u1")
                for run in range(p.runs)
                for t in p.traffic
            }
        operands = {
            segment.name: [plan.chain.slots[slot].bytes for slot in segment.results]
            for segment in plan.chain.segments
        }

        def program(name: str, operands: dict[str, list[int]] = operands):
            sizes = operands[f"{name}#0"]

            def function(*read: Any) -> list[Any]:
                return [
                    np.full(size, hashed([int(of[0]) for of in read], k), "u1")
                    for k, size in enumerate(sizes)
                ]

            return function

        # All runs of a program have the same operands, or it is no function.
        if any(
            operands[f"{p.name}#0"] != operands[f"{p.name}#{n}"]
            for p in work.programs
            for n in range(p.runs)
        ):
            continue
        arrays = {name: np.full(bound[name], of, "u1") for name, of in given.items()}
        found = cluster.run(plan, {p.name: program(p.name) for p in work.programs}, arrays, like)
        count += 1
        for name, array in found.items():
            changes = expected.changes.get(name)
            assert {values[name if changes is None else f"{name}@{changes}"]} == {*map(int, array)}
    assert count > 20
