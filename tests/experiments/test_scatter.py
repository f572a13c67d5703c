"""The figure holds every point, and a front only what nothing beats."""

from xml.etree import ElementTree

from hypothesis import given
from hypothesis import strategies as st

from experiments.scatter import Panel, Point, front, scatter

SVG = "{http://www.w3.org/2000/svg}"
POINTS = st.lists(st.builds(Point, st.integers(1, 9), st.integers(1, 9)))


def panel(**series: list[Point]) -> Panel:
    return Panel("step, v5e", "GiB", "ms", series)


@given(POINTS)
def test_a_front_is_what_no_point_beats(points: list[Point]):
    found = front(points)
    beaten = {
        p for p in points for q in points if q.x <= p.x and q.y <= p.y and (q.x, q.y) != (p.x, p.y)
    }
    assert {(p.x, p.y) for p in found} == {(p.x, p.y) for p in points if p not in beaten}
    assert [p.y for p in found] == sorted({p.y for p in found}, reverse=True)


def test_every_point_is_drawn_inside_the_plane():
    drawn = ElementTree.fromstring(
        scatter([panel(jit=[Point(10, 0.2, "jax.jit")], memplan=[Point(3, 0.25), Point(5, 0.21)])])
    )
    plane = drawn.find(f"{SVG}g")
    assert plane is not None
    frame = plane.find(f"{SVG}rect")
    assert frame is not None
    circles = plane.findall(f"{SVG}circle")
    assert len(circles) == 3
    for circle in circles:
        assert 0 < float(circle.attrib["cx"]) < float(frame.attrib["width"])
        assert 0 < float(circle.attrib["cy"]) < float(frame.attrib["height"])
    # Less is to the left, and lower.
    jit, small, large = ((float(c.attrib["cx"]), float(c.attrib["cy"])) for c in circles)
    assert small[0] < large[0] < jit[0]
    assert small[1] < large[1] < jit[1]


def test_numbers_keep_apart_and_their_meaning_is_escaped():
    drawn = ElementTree.fromstring(scatter([panel(a=[Point(1, 1, "x < 1"), Point(1, 1, "y")])]))
    numbers = [t for t in drawn.iter(f"{SVG}text") if t.attrib.get("font-size") == "9"]
    assert [number.text for number in numbers] == ["1", "2"]
    assert abs(float(numbers[0].attrib["y"]) - float(numbers[1].attrib["y"])) >= 9
    assert [t.text for t in drawn.findall(f"{SVG}text")] == ["a:  1 x < 1,  2 y"]


def test_a_label_has_one_number_in_all_panels():
    first, second = panel(a=[Point(1, 1, "x"), Point(2, 2, "y")]), panel(a=[Point(3, 1, "y")])
    drawn = ElementTree.fromstring(scatter([first, second]))
    numbers = [t.text for t in drawn.iter(f"{SVG}text") if t.attrib.get("font-size") == "9"]
    assert numbers == ["1", "2", "2"]


def test_a_method_has_one_colour_in_all_panels():
    drawn = ElementTree.fromstring(
        scatter([panel(a=[Point(1, 1)], b=[Point(2, 1)]), panel(b=[Point(1, 1)])])
    )
    planes = [
        [c.attrib["fill"] for c in plane.findall(f"{SVG}circle")]
        for plane in drawn.findall(f"{SVG}g")
    ]
    assert planes[0][1] == planes[1][0] != planes[0][0]


def test_a_panel_without_points_is_left_out():
    drawn = ElementTree.fromstring(scatter([panel(a=[]), panel(a=[Point(1, 1)])]))
    assert len(drawn.findall(f"{SVG}g")) == 1
