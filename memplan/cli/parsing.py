"""The words of the command line."""

from __future__ import annotations

import argparse
from pathlib import Path

from memplan import __version__
from memplan.cli.caching import run_kv_replay
from memplan.cli.calibrating import run_calibrate
from memplan.cli.clustering import run_cluster
from memplan.cli.diffing import run_diff
from memplan.cli.inspecting import run_inspect
from memplan.cli.listing import run_demo, run_machines, run_passes
from memplan.cli.planning import run_curve, run_plan
from memplan.cli.runtime import run_as, run_chain, run_dis, run_repack
from memplan.cli.serving import run_serve
from memplan.cli.sidecar import run_intents
from memplan.cli.simulating import run_simulate, run_whatif
from memplan.cli.training import run_dojo


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="memplan", description="Plan the memory of XLA programs, byte by byte."
    )
    parser.add_argument("--version", action="version", version=f"memplan {__version__}")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)

    inspect = commands.add_parser(
        "inspect", help="who holds the memory of a compiled program, and what moves"
    )
    inspect.add_argument(
        "source",
        help="a scheduled module: HLO text, a .pb proto, either in gzip, or an --xla_dump_to "
        "folder; or, with --machine, what is compiled then: StableHLO, HLO before optimizations, "
        "or module:function as for plan",
    )
    inspect.add_argument(
        "--machine",
        help="predict seconds on this machine (memplan machines); where it is compiled for, a "
        "topology too: v5e:2x2, h200:8",
    )
    _add_choice(inspect)
    inspect.add_argument("--list", action="store_true", help="list the modules of a folder")
    _add_outputs(inspect)
    inspect.set_defaults(run=run_inspect)

    diff = commands.add_parser("diff", help="what changed between two compilations")
    diff.add_argument(
        "sources",
        nargs="*",
        metavar="A B",
        help="two scheduled modules, as for inspect; of two folders, the modules are paired",
    )
    diff.add_argument(
        "--run",
        dest="program",
        metavar="MODULE:FUNCTION",
        help="compile this twice, with --machine, instead",
    )
    diff.add_argument(
        "--with-flags",
        action="append",
        default=[],
        metavar="FLAGS",
        help="XLA options of one of the two compilations of --run: 'xla_a=1 xla_b=true', or ''; "
        "those that begin with dashes behind an equals sign: --with-flags=--xla_a=1",
    )
    diff.add_argument("--machine", help="predict seconds on this machine (memplan machines)")
    diff.add_argument(
        "--module", metavar="NAME", help="of folders, this module; a part of its name does"
    )
    diff.add_argument(
        "--fail-on",
        action="append",
        default=[],
        metavar="CONDITION",
        help="exit with status 1 if a figure is so: 'peak>+5%%', 'temp>+100MiB', 'total>12GiB'",
    )
    _add_json(diff)
    _add_html(diff)
    diff.set_defaults(run=run_diff)

    plan = commands.add_parser("plan", help="plan a program within a budget")
    plan.add_argument(
        "source",
        help="a scheduled module with its weights in host memory, as for inspect; or "
        "module:function, which returns (fun, args) or (fun, args, jit_options), args being "
        "arrays or jax.ShapeDtypeStruct",
    )
    plan.add_argument(
        "--machine",
        required=True,
        help="a machine (memplan machines); for module:function a topology too: v5e:2x2, h200:8",
    )
    _add_choice(plan)
    plan.add_argument("--hbm", required=True, help="the budget of device memory: 12GiB")
    _add_objective(plan)
    plan.add_argument("--out", type=Path, metavar="FILE", help="write the plan as JSON")
    plan.add_argument(
        "--chain",
        type=Path,
        metavar="FILE",
        help="write its transfers as a descriptor chain, for dis and run",
    )
    plan.add_argument(
        "--explain",
        nargs="?",
        const="",
        metavar="BUFFER",
        help="say why a buffer is kept, evicted, computed again or streamed, by HLO name or "
        "argument path, * for any part; without one, list the largest decisions",
    )
    plan.add_argument(
        "--advise",
        action="store_true",
        help="say what to write by hand, in the program or its trainer's switches, to come near "
        "the plan without it",
    )
    _add_outputs(plan)
    plan.set_defaults(run=run_plan)

    curve = commands.add_parser(
        "curve", help="predicted step against device memory, from all of it to the least"
    )
    curve.add_argument("source", metavar="MODULE:FUNCTION", help="a program, as for plan")
    curve.add_argument("--machine", required=True, help="a machine or a topology, as for plan")
    _add_objective(curve)
    curve.add_argument("--points", type=int, default=8, metavar="N", help="budgets to plan for")
    curve.add_argument("--plot", type=Path, metavar="FILE", help="draw it: an .svg or .png file")
    _add_json(curve)
    curve.set_defaults(run=run_curve)

    simulate = commands.add_parser(
        "simulate", help="a step on one machine or several: how long, and where the time goes"
    )
    simulate.add_argument("source", help="a scheduled module, or what is compiled, as for inspect")
    simulate.add_argument(
        "--machine",
        action="append",
        required=True,
        help="a machine (memplan machines), given once or more; of what is compiled for it, a "
        "topology too: v5e:2x2, h200:8; all for those of the module's platform, or that it can be "
        "compiled for",
    )
    simulate.add_argument(
        "--tier",
        metavar="NAME",
        help="where what the module has in host memory lies: a tier behind the host, nvme or cxl",
    )
    simulate.add_argument(
        "--jitter",
        metavar="SPREAD",
        help="draw steps in which each kernel and each transfer takes longer or shorter: the "
        "standard deviation over the mean, 5%%",
    )
    simulate.add_argument(
        "--steps", type=int, metavar="N", help="how many are drawn: 1000 by default"
    )
    simulate.add_argument("--seed", type=int, metavar="N", help="of what is drawn: 0 by default")
    _add_choice(simulate)
    _add_json(simulate)
    simulate.set_defaults(run=run_simulate)

    whatif = commands.add_parser(
        "whatif", help="a step if kernels were fused or split: how long, how many bytes, predicted"
    )
    whatif.add_argument("source", help="a scheduled module, or what is compiled, as for inspect")
    whatif.add_argument(
        "--machine",
        required=True,
        help="a machine (memplan machines); of what is compiled for it, a topology too",
    )
    whatif.add_argument(
        "--fuse",
        dest="edits",
        type=lambda text: ("fuse", text),
        action="append",
        default=[],
        metavar="A,B",
        help="make one kernel, A.B, of A and of B that reads what A makes; edits are given once or "
        "more, and made in their order; without any the best fusions are looked for",
    )
    whatif.add_argument(
        "--split",
        dest="edits",
        type=lambda text: ("split", text),
        action="append",
        metavar="A:N",
        help="run A in N parts, A.0 and so on, along its first dimension; A is what joins them "
        "then, unless what reads it is split alike",
    )
    whatif.add_argument(
        "--best", type=int, default=8, metavar="N", help="how many of these are told (8)"
    )
    _add_choice(whatif)
    _add_json(whatif)
    whatif.set_defaults(run=run_whatif)

    dojo = commands.add_parser(
        "dojo", help="memory schedulers side by side: the planner, baselines, and your own"
    )
    dojo.add_argument(
        "sources", nargs="+", type=Path, metavar="MODULE", help="scheduled modules, as for inspect"
    )
    dojo.add_argument(
        "--machines",
        nargs="+",
        required=True,
        metavar="NAME",
        help="machines (memplan machines); each program is scheduled for those of its platform",
    )
    dojo.add_argument(
        "--agents",
        nargs="+",
        default=["planner", "greedy", "longest-idle", "random"],
        metavar="NAME",
        help="planner, greedy, longest-idle, random (the default: these), or module:name, which "
        "returns an agent",
    )
    dojo.add_argument(
        "--episodes", type=int, default=10, metavar="N", help="for each agent, the same ones (10)"
    )
    dojo.add_argument(
        "--variants",
        type=int,
        default=0,
        metavar="N",
        help="machines drawn near each, with other bandwidths and latencies, instead of it",
    )
    dojo.add_argument(
        "--budgets",
        default="0.3:0.9",
        metavar="LOW:HIGH",
        help="between which budgets are drawn: 0 is the least that is known to be live at once, 1 "
        "what is needed with everything on the device (0.3:0.9)",
    )
    dojo.add_argument("--seed", type=int, default=0, metavar="N", help="of what is drawn (0)")
    _add_json(dojo)
    dojo.set_defaults(run=run_dojo)

    intents = commands.add_parser(
        "intents", help="what a step will do with each buffer and page, for a runtime beside it"
    )
    intents.add_argument(
        "source",
        help="a scheduled module or module:function, as for inspect; or intents, which are printed",
    )
    intents.add_argument("--machine", help="predict seconds on this machine, as for inspect")
    intents.add_argument(
        "--plan", type=Path, metavar="FILE", help="a plan for it, as plan --out writes, is followed"
    )
    _add_choice(intents)
    intents.add_argument("--out", type=Path, metavar="FILE", help="write their binary form")
    intents.add_argument("--text", action="store_true", help="print text that is read back")
    _add_json(intents)
    intents.set_defaults(run=run_intents)
    cluster = commands.add_parser(
        "cluster", help="one plan for several chips, and the wires between them"
    )
    cluster.add_argument(
        "cluster", type=Path, help="a cluster, TOML or JSON; or, alone, a plan that --out wrote"
    )
    cluster.add_argument(
        "work",
        type=Path,
        nargs="?",
        help="programs and what flows between them, TOML or JSON; a program may name a compiled "
        "module",
    )
    cluster.add_argument("--out", type=Path, metavar="FILE", help="write the plan as JSON")
    cluster.add_argument(
        "--windows",
        action="store_true",
        help="what computes, moves, is awaited and released, from one execution to the next",
    )
    cluster.add_argument(
        "--chain", type=Path, metavar="FILE", help="write the descriptor chain of a chip of --node"
    )
    cluster.add_argument("--node", metavar="NAME", help="whose chain is written")
    cluster.add_argument("--trace", type=Path, metavar="FILE", help="write a trace for Perfetto")
    _add_json(cluster)
    cluster.set_defaults(run=run_cluster)

    dis = commands.add_parser("dis", help="a descriptor chain as text")
    dis.add_argument("chain", type=Path, help="a chain, in its binary form or as text")
    dis.add_argument(
        "--windows",
        action="store_true",
        help="what is issued, awaited, executed and released, from one execution to the next",
    )
    dis.set_defaults(run=run_dis)

    assembler = commands.add_parser("as", help="a descriptor chain of its text")
    assembler.add_argument("chain", type=Path, help="a chain as text, as dis prints it")
    assembler.add_argument("--out", type=Path, metavar="FILE", required=True, help="what to write")
    assembler.set_defaults(run=run_as)

    run = commands.add_parser(
        "run", help="replay a descriptor chain without its program: is the disk as fast as that?"
    )
    run.add_argument("chain", type=Path, help="a chain, in its binary form or as text")
    run.add_argument("--replays", type=int, default=10, metavar="N", help="how often")
    run.add_argument("--trace", type=Path, metavar="FILE", help="write a trace for Perfetto")
    _add_json(run)
    run.set_defaults(run=run_chain)

    repack = commands.add_parser(
        "repack", help="write weights into a file from which they can be streamed"
    )
    repack.add_argument(
        "sources",
        type=Path,
        nargs="+",
        metavar="SOURCE",
        help="a safetensors file, several, or a folder of them; or an Orbax checkpoint's folder",
    )
    repack.add_argument("file", type=Path, metavar="FILE", help="which is replaced when all is in")
    repack.set_defaults(run=run_repack)

    kv = commands.add_parser("kv", help="caches of keys and values")
    of_kv = kv.add_subparsers(title="commands", metavar="COMMAND", required=True)
    replay = of_kv.add_parser(
        "replay", help="how many of a trace's tokens a cache would have had, by policy and size"
    )
    replay.add_argument(
        "trace",
        type=Path,
        metavar="TRACE",
        help="a .npz (memplan.kv.Trace says of what), or lines of JSON as Mooncake has published",
    )
    replay.add_argument(
        "--block-tokens",
        type=int,
        default=512,
        help="tokens of a block, where the trace does not say it",
    )
    replay.add_argument(
        "--capacity", type=int, required=True, metavar="BLOCKS", help="blocks that are held"
    )
    replay.add_argument(
        "--policy",
        choices=("lru", "belady", "learned", "hints"),
        default="hints",
        help="which stay: belady knows what comes; hints has what sessions say (the default)",
    )
    replay.add_argument(
        "--spread",
        type=float,
        default=0.5,
        help="of hints: declared returns are off by a lognormal factor of this spread",
    )
    replay.add_argument(
        "--ends", type=float, default=0.9, help="of hints: the share of ends that are declared"
    )
    replay.add_argument("--seed", type=int, default=0, help="of what is drawn for hints")
    _add_json(replay)
    replay.set_defaults(run=run_kv_replay)

    serve = commands.add_parser(
        "serve", help="answer requests with a model, as OpenAI's interface has them"
    )
    serve.add_argument(
        "folder",
        type=Path,
        metavar="CHECKPOINT",
        help="a folder as Hugging Face's libraries write it: config.json, tokenizer.json, "
        "*.safetensors; of Llama, Qwen2 or Qwen3",
    )
    serve.add_argument("--host", default="127.0.0.1", help="the address to listen at")
    serve.add_argument("--port", type=int, default=8000, help="0 for any that is free")
    serve.add_argument(
        "--dtype",
        choices=("bfloat16", "float16", "float32"),
        help="of the weights, instead of the checkpoint's",
    )
    serve.add_argument(
        "--memory", metavar="BYTES", help="for pages on the device: 8GiB; by default what is left"
    )
    serve.add_argument("--pages", type=int, metavar="N", help="on the device, instead of --memory")
    serve.add_argument("--page-tokens", type=int, default=16, metavar="N", help="of a page")
    serve.add_argument(
        "--host-pages", type=int, default=0, metavar="N", help="that the host's memory keeps beside"
    )
    serve.add_argument(
        "--disk-pages", type=int, default=0, metavar="N", help="that a file keeps beside"
    )
    serve.add_argument(
        "--disk-folder", type=Path, metavar="FOLDER", help="where that file is; it has no name"
    )
    serve.add_argument(
        "--policy",
        choices=("lru", "learned", "hints"),
        default="hints",
        help="which prefixes stay, as for kv replay",
    )
    serve.add_argument(
        "--max-len", type=int, metavar="N", help="tokens of a prompt and its answer, at most"
    )
    serve.add_argument(
        "--max-batch", type=int, default=32, metavar="N", help="answers that are made at a time"
    )
    serve.add_argument(
        "--chunk", type=int, default=256, metavar="N", help="tokens of prompts in one step"
    )
    serve.add_argument("--queue", type=int, default=256, metavar="N", help="requests that may wait")
    serve.add_argument(
        "--grace",
        type=float,
        default=30.0,
        metavar="SECONDS",
        help="for requests to end in, after SIGTERM",
    )
    serve.set_defaults(run=run_serve)

    calibrate = commands.add_parser(
        "calibrate", help="measure the machine that is here, into a machine file"
    )
    calibrate.add_argument("--name", help="of the machine; by default that of its device")
    calibrate.add_argument(
        "--out", type=Path, metavar="FILE", help="machine file to write; NAME.toml by default"
    )
    calibrate.add_argument(
        "--disk",
        type=Path,
        metavar="FOLDER",
        help="measure the drive of this folder, too; a file of 256 MiB is there meanwhile",
    )
    calibrate.add_argument(
        "--seconds",
        type=float,
        default=60.0,
        help="for the measurements, which are taken in turns; compilations come on top (60)",
    )
    calibrate.add_argument(
        "--profile",
        type=Path,
        action="append",
        metavar="FILE",
        help="measure nothing: learn from what this profile of a step has, given once or more",
    )
    calibrate.add_argument(
        "--machine", help="that the profiles are of; what is written is this one, corrected"
    )
    _add_json(calibrate)
    calibrate.set_defaults(run=run_calibrate)

    passes = commands.add_parser("passes", help="list the passes in order")
    _add_json(passes)
    passes.set_defaults(run=run_passes)

    machines = commands.add_parser("machines", help="list the known machines, or show one")
    machines.add_argument("name", nargs="?", help="a name, an alias, or a .toml file")
    _add_json(machines)
    machines.set_defaults(run=run_machines)

    demo = commands.add_parser("demo", help="plan Llamas for accelerators that are not here")
    demo.add_argument("--full", action="store_true", help="five of them on two targets: 10 minutes")
    _add_json(demo)
    demo.set_defaults(run=run_demo)
    return parser


def _add_choice(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--module", metavar="NAME", help="of a folder's modules this one; a part of its name does"
    )
    parser.add_argument(
        "--stage",
        metavar="NAME",
        help="of a module's stages this one; by default the one "
        "with XLA's buffer assignment, or the last",
    )


def _add_outputs(parser: argparse.ArgumentParser) -> None:
    _add_json(parser)
    _add_html(parser)
    parser.add_argument("--trace", type=Path, metavar="FILE", help="write a trace for Perfetto")


def _add_html(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--html", type=Path, metavar="FILE", help="write a self-contained page")


def _add_objective(command: argparse.ArgumentParser) -> None:
    command.add_argument(
        "--objective",
        choices=("latency", "energy", "traffic"),
        default="latency",
        help="what a plan is to be best for: the fastest step, by default; the fewest joules a "
        "step; the fewest bytes moved",
    )


def _add_json(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="print JSON instead of tables")
