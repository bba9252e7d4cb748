"""The command line: ``gnnfast doctor``, ``gnnfast run`` and ``gnnfast bench``."""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import json
import os
import sys
import textwrap
from pathlib import Path
from types import ModuleType
from typing import Any


def main(arguments: list[str] | None = None) -> int:
    """Entry point. Returns the exit status."""
    try:
        status = _run(arguments)
        sys.stdout.flush()
        return status
    except BrokenPipeError:  # as in `| head`: nobody reads on
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # or Python's last flush would fail again
        return 1


def _run(arguments: list[str] | None) -> int:
    parser = argparse.ArgumentParser(prog="gnnfast", description="Existing graph-neural-network code, fast.")
    parser.add_argument("--version", action="version", version=f"gnnfast {_version()}")
    commands = parser.add_subparsers(dest="command", required=True)
    ask = commands.add_parser("doctor", help="what is installed, compiled and patched, and what to do about what is not")
    ask.add_argument("--json", action="store_true", help="as JSON, for a bug report")
    run = commands.add_parser("run", help="run a script with gnnfast, without changing it")
    run.add_argument("--report", action="store_true", help="print what ran where when the script ends")
    run.add_argument(
        "--profile",
        action="store_true",
        help="run it twice, without and with gnnfast: time, peak memory and the largest operations",
    )
    run.add_argument("-m", dest="module", action="store_true", help="SCRIPT is the name of a module")
    run.add_argument("script", metavar="SCRIPT")
    run.add_argument("arguments", nargs=argparse.REMAINDER).required = False  # Python 3.11 would name it as missing beside SCRIPT
    bench = commands.add_parser("bench", help="a benchmark on this machine; without a name, lists what there is")
    bench.add_argument(
        "--script", nargs=argparse.REMAINDER, metavar="SCRIPT", help="your own script with its arguments, without and with gnnfast"
    )
    bench.add_argument("name", nargs="?")
    bench.add_argument("arguments", nargs=argparse.REMAINDER, help="the benchmark's own; --help lists them")
    for stream in (sys.stdout, sys.stderr):  # what a terminal cannot show must not end in a traceback
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="replace")
    parsed = parser.parse_args(arguments)
    if parsed.command == "bench" and parsed.script is not None:
        return run_benchmark("script", parsed.script)
    if parsed.command == "bench":
        return run_benchmark(parsed.name, parsed.arguments)
    if parsed.command == "run" and parsed.profile:
        if parsed.module or parsed.report:
            run.error("--profile takes a script, and neither -m nor --report")
        return profile_script(parsed.script, parsed.arguments)
    if parsed.command == "run":
        return run_script(parsed.script, parsed.arguments, parsed.report, parsed.module)
    return doctor(parsed.json)


def _version() -> str:
    import gnnfast

    return gnnfast.__version__


def run_benchmark(name: str | None, arguments: list[str]) -> int:
    """Runs a benchmark by name. An unknown name, or none, lists what there is and returns 2."""
    from gnnfast import _native

    package = benchmarks()
    if name not in package.BENCHMARKS | package.TOOLS:
        if name is not None:
            print(f"gnnfast bench: there is no benchmark {name!r}", file=sys.stderr)
        for title, names in (
            ("usage: gnnfast bench NAME [arguments], where NAME is", package.BENCHMARKS),
            ("or, rather than a benchmark,", package.TOOLS),
        ):
            print(title)
            for known, about in names.items():
                print(textwrap.fill(f"{known:15} {about}", 80, initial_indent="  ", subsequent_indent=" " * 18))
        print("gnnfast bench NAME --help says what each accepts")
        return 2
    if _native.cpu.reason and (name in package.BENCHMARKS or name == "script"):  # both sides would be the same
        print(f"gnnfast bench: nothing to measure: {_native.cpu.reason}", file=sys.stderr)
        return 2
    try:
        module = importlib.import_module(f"{package.__name__}.{name}")
    except ImportError as error:
        missing = {"torch_geometric": "torch_geometric", "dgl": "dgl", "numpy": "numpy"}.get(error.name or "")
        if missing is None:
            raise
        print(f"gnnfast bench {name}: {missing} is not installed; pip install {missing}", file=sys.stderr)
        return 2
    return module.main(arguments)


def in_benchmark(name: str, function: str, *arguments: Any) -> Any:
    """What a function of a benchmark returns: to be run by another process, which does not know that package yet."""
    return getattr(importlib.import_module(f"{benchmarks().__name__}.{name}"), function)(*arguments)


def benchmarks() -> ModuleType:
    """The package of benchmarks: in a source tree it lies beside the package ``gnnfast``, in a wheel inside."""
    name = "gnnfast.benchmarks"
    if name in sys.modules or importlib.util.find_spec(name):
        return importlib.import_module(name)
    source = Path(__file__).parents[1] / "benchmarks" / "__init__.py"
    if not source.is_file():
        raise SystemExit(f"gnnfast bench: this installation has no benchmarks, neither {name} nor {source.parent}")
    spec = importlib.util.spec_from_file_location(name, source, submodule_search_locations=[str(source.parent)])
    assert spec is not None and spec.loader is not None
    package = sys.modules[name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(package)
    return package


def run_script(script: str, arguments: list[str], report: bool, module: bool = False) -> int:
    """Runs a script as ``python script``, or a module as ``python -m module`` would, with gnnfast imported first."""
    import runpy
    import traceback

    import gnnfast

    if not module and not os.path.exists(script):
        print(f"gnnfast run: there is no file {script!r}", file=sys.stderr)
        return 2
    sys.argv = [script, *arguments]
    sys.path[0] = os.getcwd() if module else os.path.dirname(os.path.abspath(script))
    try:
        if module:
            runpy.run_module(script, run_name="__main__", alter_sys=True)
        else:
            runpy.run_path(script, run_name="__main__")
    except Exception as error:  # the user's, shown as Python shows it: without our frames
        ours = (__file__, runpy.__file__, "<frozen runpy>")
        frames = error.__traceback__
        while frames is not None and frames.tb_frame.f_code.co_filename in ours:
            frames = frames.tb_next
        traceback.print_exception(type(error), error, frames)
        return 1
    finally:
        if report:
            print(gnnfast.report(), flush=True)
    return 0


def profile_script(script: str, arguments: list[str]) -> int:
    """Runs a script without and with gnnfast, each in its own process, and prints where the time of both goes. Returns the exit
    status of the first that fails."""
    from gnnfast import _native, sides
    from gnnfast.rendering import Table, text

    if _native.cpu.reason:  # both sides would be the same
        print(f"gnnfast run: nothing to measure: {_native.cpu.reason}", file=sys.stderr)
        return 2
    if not os.path.exists(script):
        print(f"gnnfast run: there is no file {script!r}", file=sys.stderr)
        return 2
    found = []
    for on, name in ((False, sides.OFF), (True, sides.ON)):
        print(f"gnnfast: {script} {name} ...", flush=True)
        side = sides.run(script, arguments, on, profile=True, show=lambda line: print(f"  {line}", flush=True))
        if side.status:
            print(f"gnnfast run: {script} {name} ended with status {side.status}", file=sys.stderr)
            return side.status
        found.append(side)
    print()
    for side, name in zip(found, (sides.OFF, sides.ON)):
        where = side.profile
        if where:
            print(
                text(
                    [f"{name.capitalize()}: {where['headline']}"],
                    [Table("", where["columns"], where["rows"], where["columns"][:-1])],
                )
            )
        else:
            few = "no optimiser stepped" if not side.steps else f"there were {side.steps} steps"
            print(f"{name.capitalize()}: no operations, since {few}; the profile begins after {sides.WARM_STEPS}")
        print()
    print(text([found[1].report], [sides.table(*found)], sides.no_ratios(found[1])))
    return 0


def doctor(as_json: bool = False) -> int:
    """Prints the state of the installation. Returns 1 if something that should work does not."""
    from gnnfast.doctor import PROBLEM, findings

    found = findings()
    if as_json:
        print(json.dumps([finding._asdict() for finding in found], indent=1))
    else:
        from rich.console import Console
        from rich.table import Table
        from rich.text import Text

        colours = {"ok": "green", PROBLEM: "red"}
        table = Table("what", "state", "note", box=None, pad_edge=False)
        for what, state, note, _ in found:
            table.add_row(what, Text(state, colours.get(state, "yellow")), Text(note, overflow="fold"))
        Console().print(table)
        problems = [finding for finding in found if finding.state == PROBLEM]
        print(f"\n{len(problems)} problem{'s' if len(problems) > 1 else ''}" if problems else "\nno problems")
        unused = [finding for finding in found if finding.state != PROBLEM and finding.fix]
        for title, some in (("", problems), ("what is not in use, if you want to change that:", unused)):
            print(f"\n{title}" if title and some else "", end="\n" if title and some else "")
            for finding in some:  # not wrapped: lines to type
                print(f"  {finding.what}:\n    {finding.fix}")
    return int(any(finding.state == PROBLEM for finding in found))
