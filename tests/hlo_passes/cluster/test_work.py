"""What is to be done: what does not fit together is refused, and files."""

import json
from dataclasses import replace
from typing import Any

import pytest

from experiments.cluster_works import served, streamed, training, two_slices
from hlo_passes.cluster.presets import over_network, tpu_slice
from hlo_passes.cluster.search import plan_cluster
from hlo_passes.cluster.work import Flow, Program, State, Task, Traffic, Work, pipeline
from hlo_passes.errors import ClusterError, ClusterFileError

SLICES = two_slices()


@pytest.mark.parametrize("work", [training(SLICES), served(SLICES)], ids=["training", "serving"])
def test_work_is_written_and_read(work: Work):
    assert Work.from_dict(json.loads(json.dumps(work.to_dict()))) == work


def test_what_has_a_default_may_be_left_out():
    data = {
        "programs": [{"name": "p", "node": "a0", "segments": [1e-3]}],
        "flows": [{"name": "x", "source": "", "destination": "p", "bytes": 8}],
    }
    assert Work.from_dict(data) == Work((Program("p", "a0", (1e-3,)),), (Flow("x", "", "p", 8),))


FLOW = {"name": "f", "source": "", "destination": "p", "bytes": 8}


def entry(**changes: object) -> Any:
    program = {"name": "p", "node": "a0", "segments": [1e-3], **changes}
    return {"programs": [{key: of for key, of in program.items() if of is not None}]}


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (entry(node=None), r"programs.p.node: expected a string, found nothing"),
        (entry(segments=["a"]), "segments: expected a list of seconds"),
        (entry(runs=0), "runs: expected a positive number, found 0"),
        (entry(runs=True), "runs: expected a positive number, found True"),
        (entry(runs=1 << 70), f"runs: expected at most 1048576, found {1 << 70}"),
        (entry(runs=2.5), "runs: expected a whole number, found 2.5"),
        (entry(memory_bytes=-1), "memory_bytes: expected a number that is not negative, found -1"),
        (entry(segments=[]), r"segments: expected a list of seconds, .* found \[\]"),
        (entry(segments=[True]), "segments: expected a list of seconds, .* found True"),
        (entry(segments=[-1e-3]), "segments: expected .* found -0.001"),
        (entry(segments=[float("nan")]), "segments: expected .* found nan"),
        (entry(segments=[1e300]), r"segments: expected .* found 1e\+300"),
        (entry(name=""), "name: expected a word of letters, digits, - and _, found ''"),
        (entry() | {"flows": [FLOW | {"at": 0.5}]}, "flows.f.at: expected a whole number"),
        (entry(colour=1), "colour: expected no such key"),
        (entry(traffic=[{"name": "w"}]), r"programs.p.traffic\[0\].source: expected a string"),
        (entry() | {"flow": []}, "work, flow: expected no such key"),
        ({"programs": 1}, "programs: expected a list of tables"),
    ],
)
def test_what_is_wrong_in_a_file_is_named(data: Any, message: str):
    with pytest.raises(ClusterFileError, match=message):
        Work.from_dict(data)


P = Program("p", "a0", (1e-3,), 2)
Q = Program("q", "a1", (1e-3,), 2)
S = State("s", "a0", 8)
FETCH = Traffic("t", "host", "hbm", "w", 8, 0, 0, 1)
STORE = Traffic("s", "hbm", "host", "w", 8, 1, 1, 2)


def of_traffic(*traffic: Traffic) -> Work:
    return Work((replace(P, segments=(1e-3, 1e-3), traffic=traffic),))


@pytest.mark.parametrize(
    ("work", "message"),
    [
        (Work((replace(P, node="z"),)), "no node 'z'"),
        (Work((replace(P, node="dcn"),)), "program p: expected a node of chips, found 'dcn'"),
        (Work(()), "programs: expected at least one, found none"),
        (Work((replace(P, segments=()),)), "programs.p.segments: expected a list of seconds"),
        (Work((replace(P, memory_bytes=-1),)), "programs.p.memory_bytes: expected a number"),
        (Work((P,), (), (State("s", "a0", 0),)), "states.s.bytes: expected a positive number"),
        (Work((P, P)), "programs: expected names that differ"),
        (Work((replace(P, name="p#1"),)), "name: expected a word of letters, digits, - and _"),
        (Work((replace(P, reads=("w",)),)), "program p: expected a state of a0, found 'w'"),
        (Work((P, Q), (Flow("f", "p", "r", 8),)), "flow f: no program 'r'"),
        (Work((P, Q), (Flow("f", "p", "q", 8, at=1),)), "flow f: expected bytes between segments"),
        (Work((P, Q), (Flow("f", "p", "q", 0),)), "flows.f.bytes: expected a positive number"),
        (Work((P, Q), (Flow("f", "p", "q", 8, in_flight=0),)), "flows.f.in_flight: expected"),
        (
            Work((P, Q), (Flow("f", "p", "q", 8), Flow("g", "q", "p", 8))),
            "programs wait for each other: ",
        ),
        (
            Work((replace(P, traffic=(Traffic("t", "disk", "hbm", "w", 8, 0, 0, 1),)),)),
            "a0-host has no such memory",
        ),
        (
            Work((replace(P, traffic=(Traffic("t", "hbm", "host", "w", 8, 0, 1, 2),)),)),
            "program p, t: expected a start, a done and an end",
        ),
        (Work((replace(P, reads=("s", "s")),), (), (S,)), "states: expected names that differ"),
        (
            of_traffic(FETCH, FETCH),
            "program p, traffic: expected names that differ, found 't' twice",
        ),
        (of_traffic(FETCH, replace(FETCH, name="u", bytes=9)), "'w' in one place, with as many"),
        (
            of_traffic(STORE, replace(FETCH, start=1, done=1, end=2)),
            "behind the segment that waits",
        ),
        (of_traffic(STORE, replace(STORE, name="u")), "behind the segment that waits for u"),
        (of_traffic(replace(STORE, destination="hbm")), "one end in a0.hbm, and one in its host"),
        (
            of_traffic(replace(STORE, source="dram", destination="hbm")),
            "one end in a0.hbm, and one in its host",
        ),
        (of_traffic(replace(STORE, source="fabric")), "'fabric' at both ends"),
        (of_traffic(replace(FETCH, name="x\n")), "name: expected letters that are printed"),
        (Work((P,), (), (State("s", "a0", 1 << 50),)), "a0.hbm: programs, states and one slot"),
        (Work((replace(P, memory_bytes=1 << 40),)), "a0.hbm: programs, states and one slot"),
    ],
)
def test_what_does_not_fit_is_refused(work: Work, message: str):
    with pytest.raises((ClusterError, ClusterFileError), match=message):
        plan_cluster(SLICES, work)


def test_chips_share_bytes_evenly():
    slices = two_slices(1)
    work = Work((replace(P, node="a"), replace(Q, node="b")), (Flow("f", "p", "q", 7),))
    plan_cluster(slices, work)  # One chip each.
    wide = over_network(tpu_slice("v5e:2x2", name="a"), tpu_slice("v5e:2x2", name="b"))
    with pytest.raises(ClusterError, match="f has 7 bytes, which 4 chips cannot share evenly"):
        plan_cluster(wide, work)


def test_a_pipeline_has_as_much_of_each_as_stages():
    with pytest.raises(ClusterError, match=r"of 2 stages with 2 activations\. Expected 1"):
        pipeline([P, Q], [], 2, activations=[1, 1], saved=[])
    with pytest.raises(ClusterError, match=r"with 1 backward\. Expected 2"):
        pipeline([P, Q], [P], 2, activations=[1], saved=[1, 1])


def test_runs_that_flows_join():
    work = served(SLICES, layers=1)
    kv, token = work.flows
    # Three prompts, of which the third's keys and values come to runs that are there: 3, 6, 9.
    assert [kv.reader(n) for n in work.runs(kv)] == [3, 6, 9]
    assert len(work.runs(token)) == 11
    assert [f.name for f, _ in work.read_by(Task("decode", 6))] == ["kv0", "token"]
    assert [f.name for f, _ in work.read_by(Task("decode", 7))] == ["token"]


def test_own_traffic_is_read_where_it_is_waited_for_and_last():
    work = Work((streamed("p", "a0", 4),))
    task = Task("p", 0)
    read = [[operand.value for operand in work.arguments(task, k)] for k in range(4)]
    assert read == [["p/w0"], ["p/w1"], ["p/w2", "p#0/gather0"], ["p/w3", "p#0/gather1"]]
    written = [[operand.value for operand in work.results(task, k)] for k in range(4)]
    assert written == [["begun p#0/gather0"], ["begun p#0/gather1"], [], []]
