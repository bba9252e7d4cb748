"""What ``gnnfast doctor`` finds: what is installed, compiled and patched, and what to do about what is not."""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
import os
import platform
from collections.abc import Iterator
from dataclasses import fields
from typing import NamedTuple

import torch

import gnnfast
from gnnfast import _native, hardware
from gnnfast.config import settings, unknown_variables, without_effect

OK, PROBLEM, UNUSED = "ok", "problem", "not in use"


class Finding(NamedTuple):
    """``state`` is ``"ok"``, ``"problem"`` (something that should work does not) or ``"not in use"``; ``fix`` is what to type about
    it."""

    what: str
    state: str
    note: str
    fix: str = ""


REBUILD = "pip install --no-build-isolation --force-reinstall --no-deps ."  # in the source tree: gnnfast is not on PyPI
# Extensions of PyG: the distribution, and what PyG says of whether it could import it.
EXTENSIONS = {
    "pyg-lib": "WITH_PYG_LIB",
    "torch-scatter": "WITH_TORCH_SCATTER",
    "torch-sparse": "WITH_TORCH_SPARSE",
    "torch-cluster": "WITH_TORCH_CLUSTER",
}


def findings() -> list[Finding]:
    """The state of the installation. Imports the frameworks that are installed."""
    return [
        *_library(),
        *_devices(),
        *_framework("torch_geometric", "pyg"),
        *_extensions(),
        *_framework("dgl", "dgl"),
        *_settings(),
    ]


def _library() -> Iterator[Finding]:
    yield Finding("python", OK, platform.python_version())
    yield Finding("torch", OK, f"{torch.__version__}, CUDA {torch.version.cuda or 'not built in'}")
    on = gnnfast.is_enabled()
    yield Finding(
        "gnnfast",
        OK if on else UNUSED,
        gnnfast.__version__ + ("" if on else ", off: GNNFAST=0 or disable()"),
        "" if on else "export GNNFAST=1",
    )
    cpu, cuda = _native.cpu, _native.cuda
    if cpu.loaded:
        yield Finding("CPU kernels", OK, f"{hardware.instruction_set()}, {cpu.path}")
    else:
        away = f"cd ..  # out of the source tree; if not installed yet: {_native.INSTALL}"
        upgrade = "upgrade torch" in cpu.reason
        fix = "pip install --upgrade torch" if upgrade else away if _native.from_source else REBUILD
        yield Finding("CPU kernels", PROBLEM, cpu.reason, fix)
    if cuda.loaded:
        yield Finding("CUDA kernels", OK, f"{hardware.architectures(cuda.path)}, {cuda.path}" if cuda.path else "")
    else:
        wanted = torch.cuda.is_available()
        yield Finding("CUDA kernels", PROBLEM if wanted else UNUSED, cuda.reason, REBUILD if wanted and cpu.loaded else "")


def _devices() -> Iterator[Finding]:
    driver = hardware.nvidia_driver()
    if torch.cuda.is_available():
        for index in range(torch.cuda.device_count()):
            yield device_finding(
                f"CUDA device {index}",
                torch.cuda.get_device_name(index),
                torch.cuda.get_device_capability(index),
                hardware.architectures(_native.cuda.path) if _native.cuda.path else None,
                driver,
            )
    elif not driver:
        yield Finding("CUDA device", UNUSED, "none that torch can use")
    elif torch.version.cuda is None:
        note = f"there is an NVIDIA driver ({driver}), and this torch is a build without CUDA"
        yield Finding(
            "CUDA device", UNUSED, note, "pip install --force-reinstall torch --index-url https://download.pytorch.org/whl/cu130"
        )
    elif os.environ.get("CUDA_VISIBLE_DEVICES", "0") in ("", "-1"):
        yield Finding("CUDA device", UNUSED, "hidden by CUDA_VISIBLE_DEVICES", "unset CUDA_VISIBLE_DEVICES")
    else:
        note = f"torch with CUDA {torch.version.cuda} cannot use the driver {driver}: {_why_no_cuda()}"
        yield Finding("CUDA device", PROBLEM, note, "nvidia-smi  # then update the driver, or install a torch for an older CUDA")


def device_finding(
    what: str, name: str, capability: tuple[int, int], compiled: hardware.Architectures | None, driver: str
) -> Finding:
    """Whether the library has kernels for a GPU. ``compiled`` is ``None`` where there is no library."""
    own = f"sm_{capability[0]}{capability[1]}"
    note = f"{name}, {own}{f', driver {driver}' if driver else ''}"
    if compiled is None or not (compiled.cubin or compiled.ptx) or compiled.serve(capability):
        return Finding(what, OK, note)
    return Finding(what, PROBLEM, f"{note}: the kernels are for {compiled}", f"CUDAARCHS={own[3:]} {REBUILD}")


def _why_no_cuda() -> str:
    try:
        torch.cuda.init()
    except Exception as error:
        return str(error).splitlines()[0]
    return "no device was found"


def _extensions() -> Iterator[Finding]:
    """Compiled extensions that PyG uses where gnnfast steps aside."""
    if importlib.util.find_spec("torch_geometric") is None:
        return
    try:
        typing = importlib.import_module("torch_geometric.typing")
    except Exception:  # which is a finding of PyG's own
        return
    for name, flag in EXTENSIONS.items():
        try:
            version = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
        yield extension_finding(name, version, bool(getattr(typing, flag, True)))


def extension_finding(name: str, version: str, imported: bool) -> Finding:
    """Whether an installed extension works with this torch."""
    if imported:
        return Finding(name, OK, f"{version}; PyG uses it where gnnfast steps aside")
    torch_version, cuda = torch.__version__.split("+")[0], (torch.version.cuda or "").replace(".", "")
    wheels = f"https://data.pyg.org/whl/torch-{torch_version}+{f'cu{cuda}' if cuda else 'cpu'}.html"
    note = f"{version} is for another torch than {torch.__version__}: PyG cannot import it"
    return Finding(name, PROBLEM, note, f"pip install --force-reinstall --no-deps {name} -f {wheels}  # or: pip uninstall {name}")


def dgl_conflict(version: str, torch_cuda: str | None) -> tuple[str, str]:
    """What is wrong with a CUDA build of DGL beside this torch, and what to type; both empty if nothing is."""
    build = version.partition("+cu")[2]
    if not build or (torch_cuda and build.startswith(torch_cuda.split(".")[0])):
        return "", ""
    return (
        f"a build for CUDA {build[:-1]}.{build[-1]}, and torch has {torch_cuda or 'none'}: its graphs on a GPU fail",
        "pip install --force-reinstall --no-deps dgl==2.1.0  # PyPI's has no CUDA: gnnfast puts its graphs on a GPU",
    )


def _settings() -> Iterator[Finding]:
    installed = [b for b, name in (("pyg", "torch_geometric"), ("dgl", "dgl")) if importlib.util.find_spec(name)]
    idle = set()
    for text in without_effect(settings(), _native.cuda.loaded and torch.cuda.is_available(), installed):
        variable = text.split()[0].split("=")[0]
        idle.add(variable)
        yield Finding(variable, UNUSED, text, f"unset {variable}")
    for name, hint in unknown_variables().items():
        near = hint.removeprefix("did you mean ").rstrip("?") if hint.startswith("did you mean") else ""
        yield Finding(
            name,
            PROBLEM,
            f"there is no such setting: {hint}",
            f"export {near}={os.environ[name]}; unset {name}" if near else f"unset {name}",
        )
    for setting in fields(settings()):
        variable = setting.metadata["variable"]
        if variable in os.environ and variable not in idle:
            yield Finding(variable, OK, f"{os.environ[variable]} (accepts {setting.metadata['accepts']})")


def _framework(name: str, backend: str) -> Iterator[Finding]:
    if importlib.util.find_spec(name) is None:
        yield Finding(name, UNUSED, "not installed", f"pip install {name}")
        return
    version = importlib.metadata.version(name)
    if backend not in settings().backends:
        yield Finding(name, UNUSED, f"{version}, not named in GNNFAST_BACKENDS", "unset GNNFAST_BACKENDS")
        return
    try:
        importlib.import_module(name + ".nn" if backend == "pyg" else name)
    except Exception as error:
        fix = f"pip install --upgrade {name.replace('_', '-')}"
        yield Finding(name, PROBLEM, f"{version} cannot be imported: {type(error).__name__}: {error}", fix)
        return
    conflict, fix = dgl_conflict(version, torch.version.cuda) if backend == "dgl" else ("", "")
    if conflict:
        yield Finding(name, PROBLEM, f"{version}; {conflict}", fix)
    patches = gnnfast.report().patches.get(backend, {})
    alone = [f"{what} {state}" for what, state in patches.items() if state.startswith("left alone")]
    if not _native.cpu.loaded:
        yield Finding(name, UNUSED, f"{version}; not patched: there are no CPU kernels")
    elif alone:
        fix = "pip install 'torch_geometric>=2.6,<2.9'" if backend == "pyg" else "pip install dgl==2.1.0"
        yield Finding(name, PROBLEM, f"{version}; {'; '.join(alone)}", fix)
    elif patches:
        yield Finding(name, OK, f"{version}; patched: {', '.join(patches)}")
    else:
        yield Finding(name, UNUSED, f"{version}; not patched: gnnfast is off")
    if backend == "dgl":
        from gnnfast.dgl import bridge
        from gnnfast.dgl.startup import _gnnfast_dgl_shim

        absent = bridge.absent()
        yield Finding("DGL's graphs on a GPU", UNUSED if absent else OK, absent or "their structure stays in DGL on the host")
        reason = _gnnfast_dgl_shim.installed_reason()
        if reason:
            yield Finding("dgl.graphbolt", UNUSED, f"replaced by a stub: {reason}")
