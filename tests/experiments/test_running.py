"""Flags, rows that are kept and not measured again, and what is said of their origin."""

import json
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
from absl import flags

from experiments.running import FLAGS, Experiment, Row, Rows, found_apart, kept, stamp
from memplan.report.tables import Column, Table


def define() -> None:
    flags.DEFINE_multi_integer("size", [1, 2], "of what is measured")
    flags.DEFINE_string("name", "x", "of a row")


def measure(rows: Rows) -> Iterator[Row]:
    for n in FLAGS.size:
        yield rows.of({"size": n}, lambda n=n: square(n))


def square(n: int) -> Row:
    if n < 0:
        raise ValueError("negative")
    return {"square": n * n}


def tables(rows: Sequence[Row]) -> list[Table]:
    cells = tuple((str(row["size"]), str(row["square"])) for row in rows)
    return [Table(FLAGS.name, (Column("size"), Column("square")), cells)]


SQUARES = Experiment(measure, tables, define)


def shown(capsys: pytest.CaptureFixture[str]) -> list[list[str]]:
    _, _, *lines = capsys.readouterr().out.splitlines()
    return [line.split() for line in lines]


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ((), [1, 2]),
        (("--size", "3"), [3]),
        (("--size", "3", "4"), [3, 4]),
        (("--size", "3", "--size", "4"), [3, 4]),
        (("--size=3", "--size", "4", "5", "--name", "y"), [3, 4, 5]),
        (("--size",), []),
        (("--size", "--name", "y"), []),
    ],
)
def test_a_flag_takes_the_words_that_follow_it(
    words: tuple[str, ...], expected: list[int], capsys: pytest.CaptureFixture[str]
):
    SQUARES.run(*words)
    assert shown(capsys) == [[str(n), str(n * n)] for n in expected]


def test_experiments_follow_one_another_in_a_process(capsys: pytest.CaptureFixture[str]):
    """The second one's flags have the first one's names, and are not set by it."""
    before = set(FLAGS)
    SQUARES.run("--size", "3")
    SQUARES.run()
    assert capsys.readouterr().out.count("size") == 2
    assert set(FLAGS) == before


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (("--resume",), "--resume and --show need --json FILE"),
        (("--show",), "--resume and --show need --json FILE"),
        (("7",), "expected flags only, found 7"),
    ],
)
def test_what_an_experiment_does_not_take_is_told(words: tuple[str, ...], sentence: str):
    from absl.app import UsageError

    with pytest.raises(UsageError, match=sentence):
        SQUARES.run(*words)


def test_a_word_is_asked_for_by_its_name():
    from absl.app import UsageError

    of_folder = Experiment(lambda rows, folder: (), lambda rows: (), words=("FOLDER",))
    of_folder.run("here")
    with pytest.raises(UsageError, match="expected FOLDER, found nothing"):
        of_folder.run()


def test_an_unknown_flag_is_told(capsys: pytest.CaptureFixture[str]):
    with pytest.raises(SystemExit):
        SQUARES.run("--sizes", "3")
    assert "Unknown command line flag 'sizes'" in capsys.readouterr().err


def test_an_interrupted_run_loses_nothing_and_goes_on(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    path = tmp_path / "rows.jsonl"
    with pytest.raises(ValueError, match="negative"):
        SQUARES.run("--json", str(path), "--size", "3", "4", "-1")
    assert [row["size"] for row in kept(path)] == [3, 4]
    monkeypatch.setitem(globals(), "square", lambda n: {"square": -n})
    SQUARES.run("--json", str(path), "--resume", "--size", "3", "4", "5")
    assert shown(capsys) == [["3", "9"], ["4", "16"], ["5", "-5"]]
    assert len(path.read_text().splitlines()) == 3


def test_what_is_measured_again_counts(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    path = tmp_path / "rows.jsonl"
    other = json.dumps({"case": {"size": 3}, "found": {"square": 8}, "stamp": {}})
    path.write_text(other + "\n")
    SQUARES.run("--json", str(path), "--show")
    assert shown(capsys) == [["3", "8"]]
    SQUARES.run("--json", str(path), "--size", "3")
    assert shown(capsys) == [["3", "9"]]
    assert path.read_text().startswith(other)
    SQUARES.run("--json", str(path), "--show")
    assert shown(capsys) == [["3", "9"]]


def test_a_row_says_how_it_came_about(tmp_path: Path):
    path = tmp_path / "rows.jsonl"
    Rows(path).of({"size": 3}, lambda: {"square": 9})
    line = json.loads(path.read_text())
    assert (
        line["stamp"].keys() == stamp().keys() == {"commit", "dirty", "date", "machine", "versions"}
    )
    assert line["stamp"]["machine"]["cores"] > 0
    assert {"python", "jax", "jaxlib"} <= line["stamp"]["versions"].keys()


def test_a_row_is_what_its_file_will_say(tmp_path: Path):
    """So that tables are the same when they are shown again."""
    path = tmp_path / "rows.jsonl"
    row = Rows(path).of({"size": 3}, lambda: {"pair": (1, 2)})
    assert row == kept(path)[0] == {"size": 3, "pair": [1, 2]}


def test_a_picture_is_drawn_the_same_again(tmp_path: Path):
    def plot(rows: Sequence[Row]):
        from matplotlib.figure import Figure

        figure = Figure()
        figure.add_subplot().plot([row["square"] for row in rows])
        return figure

    drawing = Experiment(measure, tables, define, plot)
    paths = [tmp_path / "a.svg", tmp_path / "b.svg"]
    for path in paths:
        drawing.run("--plot", str(path))
    assert paths[0].read_text() == paths[1].read_text()
    assert "<svg" in paths[0].read_text()


def test_what_fails_in_its_process_is_told():
    assert found_apart(square, 3, timeout_s=100) == {"square": 9}
    assert found_apart(square, -1, timeout_s=100) == {"failure": "ValueError: negative"}
