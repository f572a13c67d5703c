"""Pairs of nodes, on graphs of a few nodes."""

from array import array

from hlo_passes.diff.graph_matching import match_graphs, match_identified
from hlo_passes.diff.pair_refinement import refine_pairs
from hlo_passes.diff.twin_graph import Node, TwinGraph, signatures


def nodes(*rows: tuple[str, tuple[int, ...]], names: str = "") -> list[Node]:
    """Nodes of (letter for a label, operands)."""
    called = names or " " * len(rows)
    return [
        Node(ord(label), 0, [(o, slot) for slot, o in enumerate(operands)], 0, name.strip(), n)
        for n, ((label, operands), name) in enumerate(zip(rows, called, strict=True))
    ]


def row(labels: str, names: str = "") -> list[Node]:
    """Each node reads the one before."""
    return nodes(*((k, (n - 1,) if n else ()) for n, k in enumerate(labels)), names=names)


def test_equal_nodes_in_a_row_are_told_apart_by_both_ends():
    assert match_graphs(row("abbbbc"), row("abbbbc")) == [(n, n) for n in range(6)]


def test_one_more_leaves_one():
    found = match_graphs(row("abbbc"), row("abbbbc"))
    assert (found[0], found[-1]) == ((0, 0), (4, 5))
    shifts = [b - a for a, b in found]
    assert shifts == sorted(shifts)
    assert len(found) == 5


def test_names_say_which_one_is_new():
    found = match_graphs(row("abbbc", " xyz "), row("abbbbc", " nxyz "))
    assert found == [(0, 0), (1, 2), (2, 3), (3, 4), (4, 5)]


def test_names_tell_apart_what_nothing_else_does():
    before, after = (nodes(("b", ()), ("b", ()), ("b", ()), names=k) for k in ("xyz", "yzx"))
    assert match_graphs(before, after) == [(0, 2), (1, 0), (2, 1)]


def test_names_of_one_side_say_nothing():
    assert match_graphs(row("abbc", " xy "), row("abbc", " uv ")) == [(n, n) for n in range(4)]


def test_places_in_the_interface_count_where_nothing_else_changed():
    before = [n._replace(place=k) for n, k in zip(nodes(("a", ()), ("a", ())), (1, 2), strict=True)]
    after = [n._replace(place=k) for n, k in zip(nodes(("a", ()), ("a", ())), (2, 1), strict=True)]
    assert match_graphs(before, after) == [(0, 1), (1, 0)]


def test_what_nothing_tells_apart_is_taken_by_rank():
    before = nodes(("a", ()), ("a", ()), ("c", ()))
    after = [n._replace(rank=-n.rank) for n in nodes(("a", ()), ("a", ()), ("d", ()))]
    assert match_graphs(before, after) == [(0, 1), (1, 0)]


def test_of_parts_that_nothing_tells_apart_each_stays_whole():
    """The ranks of the readers say otherwise than those of what they read."""
    before = nodes(("a", ()), ("a", ()), ("b", (0,)), ("b", (1,)), ("c", ()))
    after = nodes(("a", ()), ("a", ()), ("b", (1,)), ("b", (0,)), ("d", ()))
    assert match_graphs(before, after) == [(0, 0), (1, 1), (2, 3), (3, 2)]


def test_another_label_of_the_same_kind_is_a_pair_between_pairs():
    assert match_graphs(row("abc"), row("axc")) == [(0, 0), (1, 1), (2, 2)]


def test_given_pairs_hold():
    twice = nodes(("a", ()), ("b", (0,)), ("b", (0,)))
    assert match_identified(twice, twice, [(1, 2)]) == [(0, 0), (1, 2), (2, 1)]


def test_slots_tell_operands_apart():
    before = nodes(("a", ()), ("a", ()), ("s", (0, 1)))
    after = nodes(("a", ()), ("a", ()), ("s", (1, 0)))
    assert match_graphs(before, after) == [(0, 1), (1, 0), (2, 2)]


def test_a_signature_sees_no_further_than_its_radius():
    graph = TwinGraph(row("abcde"), row("xbcde"))
    found = signatures(graph, (0, 1, 2, 4))
    for radius, same in ((0, "bcde"), (1, "cde"), (2, "de"), (4, "")):
        equal = [found[radius][n] == found[radius][5 + n] for n in range(5)]
        assert equal == [k in same for k in "abcde"]


def test_a_signature_does_not_turn_back():
    """What else reads an operand is no part of it."""
    before = nodes(("a", ()), ("b", (0,)), ("c", (0,)))
    after = nodes(("a", ()), ("b", (0,)), ("d", (0,)))
    found = signatures(TwinGraph(before, after), (2,))[2]
    assert found[1] == found[4]
    assert found[0] != found[3]


def test_contradicting_pairs_move_over():
    """A chain of three was paired with the wrong half of two."""
    before = row("abc")
    after = nodes(("a", ()), ("b", (0,)), ("c", (1,)), ("x", ()), ("b", (3,)), ("y", (4,)))
    graph = TwinGraph(before, after)
    partner = array("q", [3, 7, 5, 0, -1, 2, -1, 1, -1])
    refine_pairs(graph, partner)
    assert list(partner) == [3, 4, 5, 0, 1, 2, -1, -1, -1]


def test_exchanged_pairs_change_back():
    both = nodes(("a", ()), ("c", ()), ("b", (0,)), ("b", (1,)))
    graph = TwinGraph(both, both)
    partner = array("q", [4, 5, 7, 6, 0, 1, 3, 2])
    refine_pairs(graph, partner)
    assert list(partner) == [4, 5, 6, 7, 0, 1, 2, 3]


def test_pairs_that_agree_stay():
    both = row("abcd")
    partner = array("q", [4, 5, 6, 7, 0, 1, 2, 3])
    refine_pairs(TwinGraph(both, both), partner)
    assert list(partner) == [4, 5, 6, 7, 0, 1, 2, 3]
