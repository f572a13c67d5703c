"""What a person sees and does on a page: findings, differences, links, search, long lists."""

from dataclasses import replace
from pathlib import Path

import pytest

import memplan.cli as cli
from hlo_passes.hardware.machine import Machine
from hlo_passes.reading.reader import read_module
from memplan.report.advising import advise
from memplan.report.build import target_of, view_run
from memplan.report.differences import Side, find_differences
from memplan.report.html import render_differences, render_html
from memplan.report.inspecting import Inspector
from memplan.report.view import Report
from tests.memplan.browser import browse
from tests.memplan.programs import TOY, streamed_text
from tests.memplan.test_report_html import Page, data_of

BEFORE = streamed_text(ahead=1)
AFTER = streamed_text().replace("tanh(p)", "sine(p)").replace("dot.1", "product")

HEADINGS = 'const headings = [...document.querySelectorAll("h2, h3")].map(h => h.textContent);'
FACTS = """
const words = name => [...document.querySelectorAll(name)].map(e => e.textContent);
const click = async (row, text) => {
  const found = [...document.querySelectorAll(row)].find(e => e.textContent.includes(text));
  found.querySelector("a").click();
  await settle();
};
const find = async text => {
  at("search").value = text;
  at("search").dispatchEvent(new Event("input"));
  await settle();
};
"""


def inspected(text: str, machine: Machine | None = None) -> str:
    module = read_module(text)
    run = view_run("schedule", module, machine)
    findings = Inspector(module, target_of(module, machine), machine).findings()
    return render_html(Report("t", "", None, (run,), "0"), findings, advise(run, findings))


def compared(before: str, after: str, machine: Machine | None = None, title: str = "t") -> str:
    sides = [Side.of(n, read_module(t), machine) for n, t in (("a", before), ("b", after))]
    runs = tuple(replace(s.run, name=n) for s, n in zip(sides, ("before", "after"), strict=True))
    return render_differences(Report(title, "", None, runs, "0"), find_differences(*sides))


def test_the_page_shows_what_was_found(toy: Machine, tmp_path: Path):
    page = inspected(BEFORE, toy)
    tables = data_of(Page(page))["tables"]
    assert len(tables["advice"][0]["rows"]) > 1
    headings = browse(page, tmp_path, f"{HEADINGS} return headings;")
    for table in tables["findings"]:
        assert table["title"] in headings
    assert {"What could be saved", "Findings", "Transfers and collectives"} <= set(headings)
    assert not {"What changed", "Differences", "Temporaries"} & set(headings)


def test_a_finding_leads_to_its_instruction_and_to_its_line(toy: Machine, tmp_path: Path):
    seen = browse(
        inspected(BEFORE, toy),
        tmp_path,
        FACTS
        + """
        await find("nothing like it");
        const none = words("#lines .line").length;
        await click("#findings tr", "%dot.1");
        const chosen = words("#lines .chosen"), mark = runs[0].view.mark;
        const hash = decodeURIComponent(location.hash);
        const box = at("list").getBoundingClientRect();
        const inSight = box.top >= 0 && box.bottom <= innerHeight;
        await click("#findings tr", "model.py:11");
        return [none, chosen, mark, hash, inSight, at("search").value, words("#lines .mono")];
        """,
    )
    tick = [s.instruction for s in view_run("r", read_module(BEFORE)).steps].index("dot.1")
    none, (chosen,), mark, address, in_sight, searched, names = seen
    assert none == 0
    assert chosen == f"{tick}%dot.1jit(step)/layer_1/dotmodel.py:11"
    assert (mark, address) == (tick + 0.5, "#0:dot.1")
    assert in_sight
    assert (searched, names) == ("model.py:11", ["%dot.1"])


def test_an_address_opens_the_page_at_its_instruction(tmp_path: Path):
    page = compared(BEFORE, AFTER)
    chosen = 'return [...document.querySelectorAll("#lines .chosen .mono")].map(e => e.textContent)'
    steps = f'location.hash = "#1%3Aproduct"; await settle(); {chosen};'
    assert browse(page, tmp_path, steps) == ["%dot.1", "%product"]
    steps = f'location.hash = "#7%3Anothing"; await settle(); {chosen};'
    assert browse(page, tmp_path, steps) == []


def test_search_finds_pairs_by_either_name(tmp_path: Path):
    seen = browse(
        compared(BEFORE, AFTER),
        tmp_path,
        FACTS
        + """
        await find("%PRODUCT");
        const byAfter = words("#lines .line .mono"), count = at("count").textContent;
        await find("dot.1 layer_1");
        const byBefore = words("#lines .line .mono");
        await click("#lines .line", "%dot.1");
        const marks = runs.map(run => run.view.mark - 0.5);
        await find("");
        return [byAfter, count, byBefore, marks, rows.length];
        """,
    )
    by_after, count, by_before, marks, rows = seen
    assert by_after == by_before == ["%dot.1", "%product"]
    runs = [view_run("r", read_module(text)) for text in (BEFORE, AFTER)]
    for run, mark, name in zip(runs, marks, by_after, strict=True):
        assert f"%{run.steps[int(mark)].instruction}" == name
    assert count == f"1 of {rows}"


def test_every_instruction_of_both_is_listed_once(tmp_path: Path):
    longer = streamed_text(layers=4)
    rows, different = browse(
        compared(BEFORE, longer),
        tmp_path,
        FACTS
        + """
        const all = rows.slice();
        [...document.querySelectorAll("#which button")][1].click();
        return [all, shown.map(row => [row, differs(row)])];
        """,
    )
    for k, text in enumerate((BEFORE, longer)):
        ticks = [row[k] for row in rows if row[k] >= 0]
        assert sorted(ticks) == list(range(len(view_run("r", read_module(text)).steps)))
    assert [row for row, _ in different] == [r for r in rows if -1 in r]
    assert {what for _, what in different} == {"only after"}


def test_a_pair_says_in_what_it_differs(tmp_path: Path):
    after = BEFORE.replace("dot.1 = f32[64,256]{1,0}", "dot.1 = f32[64,256]{0,1}")
    found = browse(
        compared(BEFORE, after),
        tmp_path,
        FACTS + 'await find("layout"); return words("#lines .line > *:not(.quiet)");',
    )
    assert found == ["%dot.1", "%dot.1", "layout"]


@pytest.mark.parametrize("width", [1300, 500])
def test_timelines_stand_above_each_other(tmp_path: Path, width: int):
    boxes, wide = browse(
        compared(BEFORE, AFTER),
        tmp_path,
        """
        const boxes = [...document.querySelectorAll("#memory canvas")].map(canvas => {
          const {left, top, width} = canvas.getBoundingClientRect();
          return [left, top, width];
        });
        return [boxes, document.body.scrollWidth > innerWidth];
        """,
        width,
    )
    (left, top, room), (other, below, same) = boxes
    assert room == same > 300
    assert left == other
    assert below > top
    assert not wide


def test_zoom_and_hover_over_a_timeline(toy: Machine, tmp_path: Path):
    seen = browse(
        compared(BEFORE, AFTER, toy),
        tmp_path,
        """
        const canvas = document.querySelector("#memory canvas");
        const {left, top} = canvas.getBoundingClientRect();
        const move = (name, x) =>
          canvas.dispatchEvent(new PointerEvent(name, {clientX: left + x, clientY: top + 60}));
        move("pointermove", 300);
        const hovered = at("tip").textContent;
        move("pointerdown", 200);
        move("pointerup", 400);
        const {low, high, end} = runs[0].view;
        canvas.dispatchEvent(new MouseEvent("dblclick"));
        return [hovered, low, high, end, runs[0].view.low, runs[1].view.high === runs[1].view.end];
        """,
    )
    hovered, low, high, end, back, other_as_it_was = seen
    assert "corresponds to%" in hovered
    assert "live" in hovered
    assert 0 < low < high < end
    assert (back, other_as_it_was) == (0, True)


def test_equal_programs_differ_in_nothing(tmp_path: Path):
    page = compared(BEFORE, BEFORE)
    assert data_of(Page(page))["tables"]["differences"] == []
    headings, hint, different = browse(
        page,
        tmp_path,
        f"""{HEADINGS}
        [...document.querySelectorAll("#which button")][1].click();
        const hint = document.querySelector("#summary .hint").textContent;
        return [headings, hint, at("count").textContent];
        """,
    )
    assert "Differences" not in headings
    assert hint == "the same bytes, and the same work"
    assert different.startswith("0 of ")


HOSTILE = ["</script><script>bad()</script>", "<b>bold</b>", "é 重み 🧠 \u2028", "&lt;%s</style>"]


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_names_are_text(tmp_path: Path, name: str):
    before = BEFORE.replace("model.py", name)
    after = AFTER.replace("model.py", name).replace("layer_", name)
    for page in (inspected(before), compared(before, after, title=name)):
        assert len(Page(page).scripts) == 2
        seen, added = browse(
            page,
            tmp_path,
            FACTS
            + """
            await click("#findings tr, #differences tr", ":11");
            const added = document.querySelectorAll("b:not(#tip b), style").length;
            const lines = [...document.querySelectorAll("#lines .line > :last-child")];
            return [[at("search").value, ...lines.map(line => line.title)], added];
            """,
        )
        assert seen[0] == f"{name}:11"
        assert len(seen) > 1
        assert set(seen[1:]) == {f"{name}:11"}
        assert added == 1


@pytest.mark.slow
def test_a_long_list_has_elements_for_what_is_in_sight(tmp_path: Path):
    elements, last, height, shown = browse(
        inspected(streamed_text(layers=2000)),
        tmp_path,
        FACTS
        + """
        at("list").scrollTop = 1e9;
        // Without a screen there are no frames, which would tell.
        at("list").dispatchEvent(new Event("scroll"));
        const names = words("#lines .line .mono");
        return [names.length, names.at(-1), at("lines").clientHeight, shown.length];
        """,
    )
    assert elements < 60
    assert last == "%out"
    assert height == 26 * shown


def test_a_plan_lists_the_instructions_of_either_run(report: Report, tmp_path: Path):
    seen = browse(
        render_html(report),
        tmp_path,
        FACTS
        + """
        const names = () => words("#lines .line .mono");
        const later = names();
        document.querySelector("#which button").click();
        return [later, names()];
        """,
    )
    for run, names in zip(reversed(report.runs), seen, strict=True):
        assert names == [f"%{step.instruction}" for step in run.steps][: len(names)]


@pytest.fixture
def files(tmp_path: Path) -> tuple[Path, Path]:
    paths = tmp_path / "before.hlo", tmp_path / "after.hlo"
    for path, text in zip(paths, (BEFORE, AFTER), strict=True):
        path.write_text(text)
    return paths


def test_diff_writes_a_page(run, files, tmp_path: Path):
    out = tmp_path / "out.html"
    text = run("diff", *files, "--machine", TOY, "--html", out)
    assert text == run("diff", *files, "--machine", TOY)
    data = data_of(Page(out.read_text()))
    assert [shown["name"] for shown in data["runs"]] == ["before", "after"]
    assert data["title"] == f"{files[0]} → {files[1]}"
    assert data["figures"][0][:2] == ["peak", ["768.0 KiB", "960.0 KiB"]]
    before, after = ([name for name, *_ in shown["steps"]] for shown in data["runs"])
    partners = data["matched"]["partners"]
    assert after[partners[before.index("dot.1")]] == "product"


def test_a_page_of_folders_shows_all_modules_and_what_changed_most(run, tmp_path: Path):
    for name, layers in (("a", 3), ("b", 4)):
        (tmp_path / name).mkdir()
        for n, text in enumerate((streamed_text(layers=layers), streamed_text(layers=1))):
            path = tmp_path / name / f"module_000{n}.jit_f{n}.cpu_after_optimizations.txt"
            path.write_text(text)
    out = tmp_path / "out.html"
    run("diff", tmp_path / "a", tmp_path / "b", "--html", out)
    data = data_of(Page(out.read_text()))
    assert data["title"] == "module_0000.jit_f0"
    overview = data["tables"]["summary"][1]
    assert [row[0] for row in overview["rows"]] == ["module_0000.jit_f0", "module_0001.jit_f1"]


def test_a_page_of_nothing_to_compare_is_refused(capsys, tmp_path: Path):
    for name, text in (("a", streamed_text()), ("b", "HloModule cut")):
        (tmp_path / name).mkdir()
        (tmp_path / name / "module_0000.jit_f.cpu_after_optimizations.txt").write_text(text)
    words = ["diff", str(tmp_path / "a"), str(tmp_path / "b"), "--html", str(tmp_path / "out.html")]
    assert cli.main(words) == 2
    assert "--html needs two modules to compare; module_0000.jit_f: " in capsys.readouterr().err
    assert not (tmp_path / "out.html").exists()


LAYOUT = """
const box = name => document.querySelector(name).getBoundingClientRect();
const inTable = e => e.closest(".scroll") !== null;
const isWide = e => !inTable(e) && e.getBoundingClientRect().right > innerWidth + 1;
const wide = [...document.querySelectorAll("body *")].filter(isWide).map(e => e.outerHTML);
const lines = cell => {
  const text = document.createRange();
  text.selectNodeContents(cell);
  return text.getBoundingClientRect().height;
};
const tall = [...document.querySelectorAll("#figures tr")].filter(row =>
  row.getBoundingClientRect().height > 16 + Math.max(...[...row.cells].map(lines))
).map(row => row.textContent);
return {wide, tall, picture: box("#memory"), numbers: box("#figures"), notes: at("notes")?.open};
"""


@pytest.mark.parametrize("width", [1500, 1000])
@pytest.mark.parametrize("kind", ["inspected", "compared"])
def test_the_picture_is_on_the_first_screen_and_the_numbers_beside_it(
    kind: str, width: int, toy: Machine, tmp_path: Path
):
    page = inspected(BEFORE, toy) if kind == "inspected" else compared(BEFORE, AFTER, toy)
    seen = browse(page, tmp_path, LAYOUT, width)
    assert seen["wide"] == []
    assert seen["tall"] == []
    picture, numbers = seen["picture"], seen["numbers"]
    assert picture["bottom"] < 900
    assert picture["right"] < numbers["left"]
    assert abs(picture["top"] - numbers["top"]) < 100
    assert numbers["right"] <= width
    assert not seen.get("notes")
