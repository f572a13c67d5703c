"""A folder's files become modules by their names alone; two folders become pairs."""

import gzip
import random
from collections.abc import Callable, Iterable
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

from hlo_passes.errors import DumpChoiceError, MemplanError, UnreadableModuleError
from hlo_passes.ir import Module
from hlo_passes.proto import hlo_pb2
from hlo_passes.reading.dump import (
    DumpedModule,
    choose_module,
    find_modules,
    largest_module,
    pair_modules,
    platform_of,
)

UNSCHEDULED = """\
HloModule jit_f

ENTRY main {
  x = f32[8]{0} parameter(0)
  ROOT y = f32[8]{0} negate(x)
}
"""
SCHEDULED = UNSCHEDULED.replace("jit_f", "jit_f, is_scheduled=true")

CPU = ("before_optimizations.txt", "cpu_after_optimizations.txt")
# As each compiler names its files, module_0001.jit_f before it.
GPU = (
    "before_optimizations.txt",
    "0000.pre-spmd-partitioner.after_pipeline-start.before_dce.txt",
    "0043.copy-insertion.after_removing_unnecessary_copies.txt",
    "0007.fusion.after_cse.before_dce.txt",
    "after_spmd_partitioner.txt",
    "before_config_assignment.txt",
    "sm_9.0a_gpu_after_optimizations.txt",
)
TPU = (
    "cl_1003875606.after_codegen.txt",
    "cl_1003875606.after_optimizations.txt",
    "cl_1003875606.after_optimizations_after_buffer_assignment.txt",
    "cl_1003875606.after_optimizations_before_buffer_assignment.txt",
    "cl_1003875606.0018.tpu-tiling-rewriter.before_tiling_rewriter.txt",
    "cl_1003875606.before_optimizations.txt",
)
SIDE_FILES = (
    "cpu_after_optimizations-buffer-assignment-values.txt",
    "cpu_after_optimizations-live-range.txt",
    "cpu_after_optimizations-memory-usage-report.pb",
    "cpu_after_optimizations-memory-usage-report.txt",
    "cpu_after_optimizations.html",
    "cpu_after_optimizations.top_level.html",
    "cpu_after_optimizations.dot",
    "config.pbtxt",
    "debug_options",
    "gpu_target_config.pbtxt",
    "autotune_results.pbtxt",
    "thunk_sequence.txt",
    "thunk_sequence_after_thunk_passes.txt",
    "obj-file.__compute_module_add_fusion.10.o",
    "snapshot.1717153656.pb",
    "cl_1003875606.hlo_module_config.txt",
    "cl_1003875606.flagfile",
)


@pytest.fixture
def dump(tmp_path: Path) -> Callable[..., Path]:
    """`dump(*names, folder=, text=)`: a folder with files of these names."""

    def dump(*names: str, folder: str = "dump", text: str = SCHEDULED) -> Path:
        (tmp_path / folder).mkdir(exist_ok=True)
        for name in names:
            (tmp_path / folder / name).write_text(text)
        return tmp_path / folder

    return dump


def of_one(names: Iterable[str], key: str = "module_0001.jit_f") -> list[str]:
    return [f"{key}.{name}" for name in names]


def keys(modules: Iterable[DumpedModule]) -> list[str]:
    return [module.key for module in modules]


def program(opcode: str, size: int = 8, constant: int = 1) -> str:
    return f"""\
HloModule jit_f

ENTRY main {{
  x = f32[{size}]{{0}} parameter(0)
  y = f32[{size}]{{0}} {opcode}(x)
  c = f32[] constant({constant})
  d = f32[{size}]{{0}} broadcast(c), dimensions={{}}
  ROOT z = f32[{size}]{{0}} add(y, d)
}}
"""


def write(folder: Path, programs: Iterable[str], name: str = "jit__lambda") -> None:
    folder.mkdir(exist_ok=True)
    for n, text in enumerate(programs):
        (folder / f"module_{2 * n:04}.{name}.before_optimizations.txt").write_text(text)


def paired(before: Path, after: Path) -> list[tuple[str, str]]:
    pairs, _, _ = pair_modules(find_modules(before), find_modules(after))
    return [(a.key[:11], b.key[:11]) for a, b in pairs]


@pytest.mark.parametrize(
    ("names", "stages"),
    [
        (CPU, ["before_optimizations", "after_optimizations"]),
        (
            GPU,
            [
                "before_optimizations",
                "after_spmd_partitioner",
                "before_config_assignment",
                "0000.pre-spmd-partitioner.after_pipeline-start.before_dce",
                "0007.fusion.after_cse.before_dce",
                "0043.copy-insertion.after_removing_unnecessary_copies",
                "after_optimizations",
            ],
        ),
        (
            TPU,
            [
                "before_optimizations",
                "0018.tpu-tiling-rewriter.before_tiling_rewriter",
                "after_optimizations_before_buffer_assignment",
                "after_optimizations",
                "after_optimizations_after_buffer_assignment",
                "after_codegen",
            ],
        ),
    ],
    ids=["cpu", "gpu", "tpu"],
)
def test_stages_in_the_order_of_compilation(dump, names, stages):
    (module,) = find_modules(dump(*of_one(names), *of_one(SIDE_FILES), "notes.txt"))
    assert (module.key, module.name) == ("module_0001.jit_f", "jit_f")
    assert list(module.stages) == stages
    assert module.default_stage == stages[-1]


def test_modules_in_the_order_of_their_numbers(dump):
    names = ("module_10000.jit_a", "module_0002.jit_f", "module_0002.jit_e", "module_0010.main.42")
    folder = dump(*(f"{name}.cpu_after_optimizations.txt" for name in names))
    modules = find_modules(folder)
    assert [module.name for module in modules] == ["jit_e", "jit_f", "main.42", "jit_a"]


def test_a_name_that_looks_like_a_pass(dump):
    names = ("before_optimizations.txt", "0003.fusion.after_cse.before_dce.txt")
    (module,) = find_modules(dump(*of_one(names, "module_0001.main.1234")))
    assert (module.name, len(module.stages)) == ("main.1234", 2)


def test_a_name_too_long_for_a_file(dump):
    names = [f"module_0006.{stage}" for stage in (*GPU, *TPU, *SIDE_FILES)]
    (module,) = find_modules(dump(*names))
    assert (module.key, module.name) == ("module_0006", "")
    assert len(module.stages) == len({*GPU, *TPU}) - 2  # Two stages are called alike.


def test_a_name_too_long_for_some_files(dump):
    short, long, other = "module_0006.jit_f", "module_0006", "module_0060.jit_g"
    folder = dump(f"{short}.{CPU[0]}", f"{long}.{CPU[1]}", f"{other}.{CPU[1]}")
    assert [(m.name, len(m.stages)) for m in find_modules(folder)] == [("jit_f", 2), ("jit_g", 1)]
    dump(f"{long}.jit_h.{CPU[0]}")  # Of another process: it may be either's.
    assert keys(find_modules(folder)) == [long, short, f"{long}.jit_h", other]


def test_the_platform_that_a_file_tells():
    def told(names: Iterable[str]) -> set[str | None]:
        return {platform_of(Path(name)) for name in of_one(names)}

    assert told(CPU) == {None, "cpu"}
    assert told(GPU) == {None, "gpu"}
    assert told(["gfx942_gpu_after_optimizations.txt", "gpu_after_optimizations.txt"]) == {"gpu"}
    assert told(TPU) == {"tpu"}
    assert told(SIDE_FILES) == told(["after_optimizations.txt"]) == {None}


def test_times_tell_modules_of_two_processes_apart(dump):
    names = [f"{time}.module_0000.jit_f.{stage}" for time in (95, 1234) for stage in CPU]
    modules = find_modules(dump(*names))
    assert keys(modules) == ["95.module_0000.jit_f", "1234.module_0000.jit_f"]
    assert {module.name for module in modules} == {"jit_f"}


def test_proto_before_text_and_what_can_be_unpacked_first(dump):
    # Each file that joins the folder is better than those before it.
    for kind in (".txt.zst", ".hlo.pb.zst", ".txt.gz", ".txt", ".hlo.pb.gz", ".hlo.pb"):
        name = f"module_0001.jit_f.after_codegen{kind}"
        (module,) = find_modules(dump(name))
        assert module.path().name == name


def test_where_the_buffer_assignment_is(dump):
    text = "module_0001.jit_f.sm_9.0_gpu_after_optimizations-buffer-assignment.txt"
    proto = "module_0001.jit_f.sm_9.0_gpu_after_optimizations.hlo.pb"
    (module,) = find_modules(dump(*of_one(GPU), text))
    assert module.assignment_text is not None
    assert module.assignment_text.name == text
    assert module.assignment_proto is None
    for name in (proto, f"{proto}.gz"):
        (module,) = find_modules(dump(name, folder=name))
        assert module.assignment_proto == module.path()
        assert module.assignment_text is None
    (module,) = find_modules(dump("module_0001.jit_f.after_codegen.hlo.pb", folder="codegen"))
    assert module.assignment_proto is None


def test_looking_into_a_folder_reads_nothing(dump):
    folder = dump(*of_one(CPU))
    for path in folder.iterdir():
        path.unlink()
        path.symlink_to(folder / "missing")
    (module,) = find_modules(folder)
    with pytest.raises(FileNotFoundError):
        module.read()


def test_a_folder_without_modules(dump):
    with pytest.raises(UnreadableModuleError, match=r"no module dump.*XLA_FLAGS=--xla_dump_to=DIR"):
        find_modules(dump(*of_one(SIDE_FILES)))
    text = "module_0001.jit_f.cpu_after_optimizations-buffer-assignment.txt"
    with pytest.raises(UnreadableModuleError):
        find_modules(dump(text))


def test_the_default_stage_is_read(dump):
    dump(*of_one(["before_optimizations.txt"]), text=UNSCHEDULED)
    (module,) = find_modules(dump(*of_one(["cpu_after_optimizations.txt"])))
    assert module.read().is_scheduled
    assert not module.read("before_optimizations").is_scheduled


@pytest.mark.parametrize(
    ("form", "stage"),
    [
        ("hlo.pb", "after_optimizations"),
        ("hlo.pb.gz", "after_optimizations"),
        ("txt", "after_codegen"),
    ],
)
def test_the_stage_with_the_buffer_assignment_is_the_default(dump, form, stage):
    names = f"cl_1.after_optimizations.{form}", "cl_1.after_codegen.hlo.pb"
    (module,) = find_modules(dump(*of_one(names)))
    assert module.default_stage == stage


def test_a_part_of_a_stage_is_enough(dump):
    (module,) = find_modules(dump(*of_one(TPU)))
    assert module.path("0018").name.endswith(TPU[4])
    # Though three stages have it in their names.
    assert module.path("after_optimizations").name.endswith(TPU[1])
    with pytest.raises(
        DumpChoiceError, match=r"stage 'buffer' may be after_opt\S+, after_opt\S+\."
    ):
        module.path("buffer")
    with pytest.raises(DumpChoiceError, match=r"_0001\.jit_f: no stage 'fusion'. It has before_op"):
        module.read("fusion")


def test_a_module_by_name_key_or_part(dump):
    names = ("module_0001.jit_f", "module_0003.jit_f2", "module_0005.jit_g", "module_0007.jit_g")
    modules = find_modules(dump(*(f"{name}.after_codegen.txt" for name in names)))
    for text, key in (("jit_f", names[0]), ("f2", names[1]), ("0005", names[2])):
        assert choose_module(modules, text).key == key
    with pytest.raises(
        DumpChoiceError, match=r"'jit_g' may be module_0005.jit_g, module_0007.jit_g"
    ):
        choose_module(modules, "jit_g")
    with pytest.raises(DumpChoiceError, match=r"no module 'jit_h'. It has module_0001") as caught:
        choose_module(modules, "jit_h")
    assert caught.value.candidates == names


def test_an_error_names_a_few_candidates(dump):
    names = (f"module_{n:04}.jit_f.after_codegen.txt" for n in range(20))
    with pytest.raises(DumpChoiceError, match=r"module_0007.jit_f and 12 more\. Give more"):
        choose_module(find_modules(dump(*names)), "jit_f")


def test_the_largest_is_that_of_the_stage_that_is_read(dump):
    dump("module_0001.jit_f.before_optimizations.txt", text=SCHEDULED + 100 * "\n")
    dump("module_0001.jit_f.after_codegen.txt")
    folder = dump("module_0002.jit_g.after_codegen.txt", text=SCHEDULED + "\n")
    assert largest_module(find_modules(folder)).name == "jit_g"


def test_a_broken_module_leaves_the_others(dump):
    dump("module_0001.jit_f.after_codegen.txt", "module_0003.jit_f.after_codegen.txt")
    folder = dump("module_0002.jit_f.after_codegen.txt", text="")
    found: list[Module | MemplanError] = []
    for dumped in find_modules(folder):
        try:
            found.append(dumped.read())
        except MemplanError as error:
            found.append(error)
    assert [type(each) for each in found] == [Module, UnreadableModuleError, Module]
    assert "module_0002.jit_f.after_codegen.txt: the input is empty" in str(found[1])


def test_a_dump_of_the_installed_compiler(tmp_path):
    options = {"xla_dump_to": str(tmp_path), "xla_dump_hlo_as_proto": True}
    more = {"xla_dump_hlo_as_text": True, "xla_dump_hlo_pass_re": "fusion|copy-insertion"}
    lowered = jax.jit(lambda x: jnp.tanh(x @ x).sum()).lower(jnp.ones((8, 8)))
    lowered.compile(compiler_options=options | more)
    (module,) = find_modules(tmp_path)
    stages = list(module.stages)
    assert (stages[0], stages[-1]) == ("before_optimizations", "after_optimizations")
    assert len(stages) > 2
    # Side files apart, each file of its has been taken for a stage.
    dumped = {path.name for path in tmp_path.iterdir() if path.name.endswith(".hlo.pb")}
    assert {path.name for path in module.stages.values()} == dumped
    assert module.read().is_scheduled
    assert not module.read("before_optimizations").is_scheduled
    assert module.assignment_proto is not None
    proto = hlo_pb2.HloProto.FromString(module.assignment_proto.read_bytes())
    proto.ClearField("hlo_module")
    assert proto.ByteSize() > 0
    assert module.assignment_text is not None
    assert module.assignment_text.read_text().startswith("BufferAssignment:")


def test_modules_of_one_name_are_a_pair_unread(dump, monkeypatch):
    monkeypatch.setattr(DumpedModule, "read", pytest.fail)
    before = dump("module_0001.jit_f.after_codegen.txt", "module_0002.jit_g.after_codegen.txt")
    after = dump(
        "module_0005.jit_h.after_codegen.txt",
        "module_0009.jit_f.after_codegen.txt",
        folder="after",
    )
    pairs, only_before, only_after = pair_modules(find_modules(before), find_modules(after))
    assert [keys(pair) for pair in pairs] == [["module_0001.jit_f", "module_0009.jit_f"]]
    assert (keys(only_before), keys(only_after)) == (["module_0002.jit_g"], ["module_0005.jit_h"])


def test_modules_of_one_name_by_content_whatever_their_order(tmp_path):
    programs = [program(op, size, c) for op in ("tanh", "sine") for size in (8, 9) for c in (1, 2)]
    order = list(range(len(programs)))
    random.Random(3).shuffle(order)
    write(tmp_path / "before", programs)
    write(tmp_path / "after", [programs[n] for n in order])
    expected = [(f"module_{2 * n:04}", f"module_{2 * order.index(n):04}") for n in range(8)]
    assert paired(tmp_path / "before", tmp_path / "after") == expected
    # Lines of source are no content.
    for path in (tmp_path / "after").iterdir():
        text = path.read_text().replace("(x)", '(x), metadata={source_file="b.py" source_line=3}')
        path.write_text(text)
    assert paired(tmp_path / "before", tmp_path / "after") == expected


def test_what_changed_is_paired_by_outline_and_then_in_order(tmp_path):
    write(tmp_path / "before", [program("tanh"), program("sine"), program("cosine")])
    after = [program("negate"), program("cosine", constant=5), program("abs"), program("floor")]
    write(tmp_path / "after", after)
    found = pair_modules(find_modules(tmp_path / "before"), find_modules(tmp_path / "after"))
    assert [(a.key[7:11], b.key[7:11]) for a, b in found.pairs] == [
        ("0000", "0000"),
        ("0002", "0004"),
        ("0004", "0002"),
    ]
    assert (keys(found.only_before), keys(found.only_after)) == ([], ["module_0006.jit__lambda"])


def test_each_module_is_in_one_pair(tmp_path):
    write(tmp_path / "before", 3 * [program("tanh")])
    write(tmp_path / "after", 5 * [program("tanh")])
    found = pair_modules(find_modules(tmp_path / "before"), find_modules(tmp_path / "after"))
    assert [(a.key, b.key) for a, b in found.pairs] == [
        (f"module_{n:04}.jit__lambda", f"module_{n:04}.jit__lambda") for n in (0, 2, 4)
    ]
    assert len(found.only_after) == 2


def test_pairs_compare_a_stage_that_all_have(tmp_path):
    write(tmp_path / "before", [program("tanh"), program("sine")])
    write(tmp_path / "after", [program("sine"), program("tanh")])
    for folder, of in (("before", ("floor", "abs")), ("after", ("floor", "abs"))):
        for n, opcode in enumerate(of):
            name = f"module_{2 * n:04}.jit__lambda.after_codegen.txt"
            (tmp_path / folder / name).write_text(program(opcode))
    crossed = [("module_0000", "module_0002"), ("module_0002", "module_0000")]
    assert paired(tmp_path / "before", tmp_path / "after") == crossed
    # Without the early stage of one of them the last stage decides.
    (tmp_path / "after" / "module_0000.jit__lambda.before_optimizations.txt").unlink()
    straight = [("module_0000", "module_0000"), ("module_0002", "module_0002")]
    assert paired(tmp_path / "before", tmp_path / "after") == straight


def test_what_cannot_be_compared_is_paired_in_order(tmp_path):
    write(tmp_path / "before", [program("tanh"), "", program("sine")])
    write(tmp_path / "after", [program("sine"), program("tanh"), "broken"])
    assert paired(tmp_path / "before", tmp_path / "after") == [
        ("module_0000", "module_0002"),
        ("module_0002", "module_0004"),
        ("module_0004", "module_0000"),
    ]
    write(tmp_path / "other", [])
    for n in range(3):
        path = tmp_path / "other" / f"module_{n:04}.jit__lambda.after_codegen.txt.gz"
        path.write_bytes(gzip.compress(program("sine").encode()))
    assert paired(tmp_path / "before", tmp_path / "other") == [
        (f"module_{2 * n:04}", f"module_{n:04}") for n in range(3)
    ]
