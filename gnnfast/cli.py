"""The command line: ``gnnfast doctor``, ``gnnfast run`` and ``gnnfast bench``."""

from __future__ import annotations

import argparse
import importlib
import importlib.metadata
import importlib.util
import os
import platform
import sys
from dataclasses import fields
from pathlib import Path
from types import ModuleType


def main(arguments: list[str] | None = None) -> int:
    """Entry point. Returns the exit status."""
    parser = argparse.ArgumentParser(prog="gnnfast", description="Existing graph-neural-network code, fast.")
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("doctor", help="what is installed, compiled and patched, and what to do about what is not")
    run = commands.add_parser("run", help="run a script with gnnfast, without changing it")
    run.add_argument("--report", action="store_true", help="print what ran where when the script ends")
    run.add_argument("-m", dest="module", action="store_true", help="SCRIPT is the name of a module")
    run.add_argument("script", metavar="SCRIPT")
    run.add_argument("arguments", nargs=argparse.REMAINDER)
    bench = commands.add_parser("bench", help="a benchmark on this machine; without a name, lists what there is")
    bench.add_argument("name", nargs="?")
    bench.add_argument("arguments", nargs=argparse.REMAINDER, help="the benchmark's own; --help lists them")
    for stream in (sys.stdout, sys.stderr):  # what a terminal cannot show must not end in a traceback
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="replace")
    parsed = parser.parse_args(arguments)
    if parsed.command == "bench":
        return run_benchmark(parsed.name, parsed.arguments)
    if parsed.command == "run":
        return run_script(parsed.script, parsed.arguments, parsed.report, parsed.module)
    return doctor()


def run_benchmark(name: str | None, arguments: list[str]) -> int:
    """Runs a benchmark by name. An unknown name, or none, lists what there is and returns 2."""
    package = benchmarks()
    if name not in package.BENCHMARKS:
        print("" if name is None else f"gnnfast bench: there is no benchmark {name!r}", end="" if name is None else "\n")
        print("usage: gnnfast bench NAME [arguments], where NAME is")
        for known, about in package.BENCHMARKS.items():
            print(f"  {known:10} {about}")
        return 2
    return importlib.import_module(f"{package.__name__}.{name}").main(arguments)


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
            try:
                print(gnnfast.report(), flush=True)
            except BrokenPipeError:  # as in `| head`: nobody reads on
                os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return 0


def doctor() -> int:
    """Prints the state of the installation. Returns 1 if something that should work does not."""
    import torch
    from rich.console import Console
    from rich.table import Table

    import gnnfast
    from gnnfast import _native
    from gnnfast.config import settings, unknown_variables, without_effect

    table = Table("what", "state", "note", title="gnnfast doctor", title_justify="left")
    healthy = True

    def row(what: str, good: bool | None, note: str) -> None:
        nonlocal healthy
        healthy &= good is not False
        table.add_row(what, {True: "[green]ok[/]", False: "[red]problem[/]", None: "[yellow]not in use[/]"}[good], note)

    row("python", True, platform.python_version())
    row("torch", True, f"{torch.__version__}, CUDA {torch.version.cuda or 'not built in'}")
    row(
        "gnnfast",
        gnnfast.is_enabled() or None,
        f"{gnnfast.__version__}" + ("" if gnnfast.is_enabled() else ", off: GNNFAST=0 or disable()"),
    )
    row("CPU kernels", _native.cpu.loaded, str(_native.cpu.path) if _native.cpu.loaded else _native.cpu.reason)
    has_device = torch.cuda.is_available()
    note = str(_native.cuda.path) if _native.cuda.loaded else _native.cuda.reason
    row("CUDA kernels", True if _native.cuda.loaded else (False if has_device else None), note)
    row("CUDA device", has_device or None, torch.cuda.get_device_name() if has_device else "none that torch can use")
    for name, (distribution, backend) in {
        "torch_geometric": ("torch_geometric", "pyg"),
        "dgl": ("dgl", "dgl"),
    }.items():
        _framework(row, name, distribution, backend, settings().backends)
    for text in without_effect(settings()):
        row(text.split()[0].split("=")[0], None, text)
    for name, hint in unknown_variables().items():
        row(name, False, f"there is no such setting: {hint}")
    for setting in fields(settings()):
        variable = setting.metadata["variable"]
        if variable in os.environ:
            row(variable, True, f"{os.environ[variable]} (accepts {setting.metadata['accepts']})")
    Console().print(table)
    return 0 if healthy else 1


def _framework(row, name: str, distribution: str, backend: str, backends: tuple[str, ...]) -> None:  # type: ignore[no-untyped-def]
    import gnnfast

    if importlib.util.find_spec(name) is None:
        row(name, None, "not installed")
        return
    version = importlib.metadata.version(distribution)
    if backend not in backends:
        row(name, None, f"{version}, not named in GNNFAST_BACKENDS")
        return
    try:
        importlib.import_module(name + ".nn" if backend == "pyg" else name)
    except Exception as error:
        row(name, False, f"{version} cannot be imported: {type(error).__name__}: {error}")
        return
    patches = gnnfast.report().patches.get(backend, {})
    alone = {k: v for k, v in patches.items() if v.startswith("left alone")}
    if alone:
        row(name, False, f"{version}; " + "; ".join(f"{k} {v}" for k, v in alone.items()))
    elif patches:
        row(name, True, f"{version}; patched: {', '.join(patches)}")
    else:
        row(name, None, f"{version}; not patched: gnnfast is off")
    if backend == "dgl":
        from gnnfast.dgl import bridge
        from gnnfast.dgl.startup import _gnnfast_dgl_shim

        absent = bridge.absent()
        row("DGL's graphs on a GPU", None if absent else True, absent or "their structure stays in DGL on the host")
        reason = _gnnfast_dgl_shim.installed_reason()
        if reason:
            row("dgl.graphbolt", None, f"replaced by a stub: {reason}")
