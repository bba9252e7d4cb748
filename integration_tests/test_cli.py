"""The command line as a newcomer meets it: each in its own process."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import forked
import pytest
import torch

import gnnfast
from gnnfast.cli import main

ELSEWHERE = tempfile.gettempdir()  # in a source tree its package, which has no libraries, would be found before the installed one


def _gnnfast(*arguments, cwd=ELSEWHERE, **environment):
    env = {k: v for k, v in os.environ.items() if not k.startswith("GNNFAST")} | environment
    if "PYTHONIOENCODING" in env:  # which an interpreter reads when it starts
        command = [sys.executable, "-m", "gnnfast", *arguments]
        return subprocess.run(command, cwd=cwd, env=env, capture_output=True, text=True, timeout=300)
    return forked.run(["-m", "gnnfast", *arguments], cwd, env)


def _python(code, folder, **environment):
    script = folder / "script.py"
    script.write_text(code)
    return forked.run([str(script)], folder, os.environ | environment)


def test_unknown_variables_are_named(tmp_path):
    done = _python("import gnnfast", tmp_path, GNNFAST_SAMPEL="random", GNNFAST_DATA="/nowhere")
    assert "GNNFAST_SAMPEL" in done.stderr and "did you mean GNNFAST_SAMPLE?" in done.stderr and "GNNFAST_DATA" not in done.stderr


def test_unknown_variables_are_warned_of_at_the_users_line(tmp_path):
    script = tmp_path / "mine.py"
    script.write_text("\nimport gnnfast\n")
    done = subprocess.run(
        [sys.executable, str(script)], env=os.environ | {"GNNFAST_SAMPEL": "1"}, cwd=ELSEWHERE, capture_output=True, text=True
    )
    assert "mine.py:2: UserWarning: gnnfast knows no environment variable GNNFAST_SAMPEL" in done.stderr


def test_doctor_names_what_has_no_effect():
    done = _gnnfast("doctor", GNNFAST_SAMPLE_WIDTH="8", GNNFAST_SAMPEL="1", COLUMNS="200")
    assert "nothing is sampled" in done.stdout
    assert sum(line.startswith("GNNFAST_SAMPLE_WIDTH") for line in done.stdout.splitlines()) == 1
    assert "there is no such setting" in done.stdout and done.returncode == 1


def test_doctor_as_json():
    done = _gnnfast("doctor", "--json", GNNFAST_KERNEL="sampled", GNNFAST_SAMPLE="off", GNNFAST_SAMPEL="1")
    found = {row["what"]: row for row in json.loads(done.stdout)}
    assert found["CPU kernels"]["state"] == "ok" and found["torch"]["note"].startswith(torch.__version__)
    assert done.returncode == 1 and found["GNNFAST_SAMPEL"]["state"] == "problem"
    assert "which samples by fastrand" in done.stdout


def test_version():
    assert _gnnfast("--version").stdout.split() == ["gnnfast", gnnfast.__version__]


def test_doctor_ends_in_no_traceback():
    done = _gnnfast("doctor", GNNFAST_KERNEL="fast")
    assert done.returncode == 1 and "Traceback" not in done.stderr
    assert "GNNFAST_KERNEL is 'fast'; it accepts auto, gas, gar or sampled" in done.stderr
    done = _gnnfast("doctor", PYTHONIOENCODING="ascii", COLUMNS="40")
    assert "Traceback" not in done.stderr and "torch" in done.stdout


def test_run(tmp_path):
    (tmp_path / "beside.py").write_text("VALUE = 7\n")
    script = tmp_path / "script.py"
    script.write_text("import sys, beside\nprint(beside.VALUE, sys.argv[1:], __name__)\n")
    assert _gnnfast("run", str(script), "--flag", "x").stdout == "7 ['--flag', 'x'] __main__\n"
    assert _gnnfast("run", "-m", "script", "y", cwd=tmp_path).stdout == "7 ['y'] __main__\n"
    done = _gnnfast("run", str(tmp_path / "missing.py"))
    assert done.returncode == 2 and "there is no file" in done.stderr and "Traceback" not in done.stderr


def test_a_profile_of_a_script_shows_both_sides(tmp_path, capfd):
    script = tmp_path / "script.py"
    script.write_text("""
import sys, torch, gnnfast
weight = torch.nn.Parameter(torch.rand(16, 16))
optimizer = torch.optim.SGD([weight])
for _ in range(int(sys.argv[1])):
    torch.nn.functional.dropout(torch.rand(64, 16) @ weight).sum().backward()
    optimizer.step()
print("on" if gnnfast.is_enabled() else "off", 7)
""")
    assert main(["run", "--profile", str(script), "40"]) == 0
    printed = capfd.readouterr().out
    assert "  off 7\n" in printed and "  on 7\n" in printed
    assert "Without gnnfast: of " in printed and "With gnnfast: of " in printed and "dropout" in printed
    rows = [line.split() for line in printed.splitlines() if line.startswith(("ms a step", "peak MiB"))]
    assert len(rows) == 2 and all(float(row[-2].replace(",", "")) > 0 for row in rows)
    assert "no ratios: gnnfast saw no message passing" in " ".join(printed.split()) and "ratio\n" not in printed
    script.write_text("raise SystemExit(3)")
    assert main(["run", "--profile", str(script)]) == 3
    errors = capfd.readouterr().err
    assert "without gnnfast ended with status 3" in errors and "Traceback" not in errors


def test_a_users_traceback_is_the_users(tmp_path):
    script = tmp_path / "script.py"
    script.write_text("def f():\n    raise ValueError('mine')\n\nf()\n")
    done = _gnnfast("run", str(script))
    assert done.returncode == 1 and "ValueError: mine" in done.stderr and "script.py" in done.stderr
    assert "cli.py" not in done.stderr and "runpy" not in done.stderr


@pytest.mark.parametrize("arguments", ["run --report {script}", "doctor", "doctor --json", "bench"])
def test_a_reader_that_stops_reading(arguments, tmp_path):
    script = tmp_path / "script.py"
    script.write_text("pass\n")
    command = f"{sys.executable} -m gnnfast {arguments.format(script=script)} | true"  # which ends before anything is printed
    done = subprocess.run(command, shell=True, cwd=ELSEWHERE, capture_output=True, text=True)
    assert "Traceback" not in done.stderr and "BrokenPipe" not in done.stderr


SOURCE = Path(__file__).parents[1]
in_a_source_tree = pytest.mark.skipif(not (SOURCE / "plugin_src").is_dir(), reason="the tests run outside of the source tree")


@in_a_source_tree
def test_sides_are_of_the_installed_package_in_the_source_tree(tmp_path):
    script = tmp_path / "script.py"
    script.write_text("import gnnfast, sys\nprint(gnnfast.__file__, sys.path[0], gnnfast._native.cpu.loaded)\n")
    code = f"import sys; from gnnfast.cli import main; raise SystemExit(main(['run', '--profile', {str(script)!r}]))"
    # As the console script does, this finds the installed package whatever the folder.
    code = f"import sys; sys.path.remove(''); {code}"
    done = subprocess.run([sys.executable, "-c", code], cwd=SOURCE, capture_output=True, text=True)
    assert done.stdout.count(f"{gnnfast.__file__} {tmp_path} True") == 2, done.stdout + done.stderr


@in_a_source_tree
@pytest.mark.parametrize("arguments", [("bench", "layers"), ("bench", "--script", __file__), ("run", "--profile", __file__)])
def test_without_kernels_nothing_is_measured(arguments):
    if not (SOURCE / "gnnfast" / "lib" / "libgnnfast_cpu.so").exists():
        done = _gnnfast(*arguments, cwd=SOURCE)
        assert done.returncode == 2 and "nothing to measure: libgnnfast_cpu.so" in done.stderr and not done.stdout
        assert f"the source folder {SOURCE} was imported instead; run in another folder" in done.stderr


@in_a_source_tree
def test_doctor_finds_one_cause_in_a_source_tree():
    if not (SOURCE / "gnnfast" / "lib" / "libgnnfast_cpu.so").exists():
        problems = [row for row in json.loads(_gnnfast("doctor", "--json", cwd=SOURCE).stdout) if row["state"] == "problem"]
        assert [row["what"] for row in problems] == ["CPU kernels"] and problems[0]["fix"].startswith("cd ..")


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("run",), "the following arguments are required: SCRIPT\n"),
        (("bench", "--script"), "the following arguments are required: SCRIPT\n"),
        (("bench", "nothing"), "there is no benchmark 'nothing'\n"),
    ],
)
def test_errors_name_what_is_missing(arguments, said):
    done = _gnnfast(*arguments)
    assert done.returncode == 2 and said in done.stderr


def test_ratios_are_of_a_script_that_gnnfast_serves(tmp_path, capfd):
    script = tmp_path / "script.py"
    script.write_text("""
import torch, gnnfast
gnnfast.spmm(gnnfast.Graph.from_edge_index(torch.tensor([[0, 1], [1, 0]]), 2), torch.ones(2, 4))
print("loss 0.25")
print(gnnfast.report())
""")
    assert main(["bench", "--script", str(script)]) == 0
    printed = capfd.readouterr().out
    assert printed.count("with gnnfast, run") == 2 and printed.count("without gnnfast, run") == 2
    (row,) = [line for line in printed.splitlines() if line.startswith("seconds in all")]
    assert row.endswith("x") and "no ratios" not in printed and "both printed the same last lines" in printed


@pytest.mark.parametrize("arguments", [("--layers", "Foo"), ("--device", "tpu")])
def test_benchmarks_say_what_they_accept(arguments):
    pytest.importorskip("torch_geometric", reason="PyG is not installed")
    done = _gnnfast("bench", "layers", *arguments)
    assert done.returncode == 2 and "invalid choice" in done.stderr and "Traceback" not in done.stderr


def test_a_script_to_sample_keeps_its_folder_and_its_errors(tmp_path):
    pytest.importorskip("torch_geometric", reason="PyG is not installed")
    (tmp_path / "beside.py").write_text("def work():\n    raise ValueError('deep')\n")
    script = tmp_path / "eval.py"
    script.write_text("import beside\nbeside.work()\n")
    done = _gnnfast("bench", "sampled", "--script", str(script))
    assert "ValueError: deep" in done.stderr and "beside.py" in done.stderr
    done = _gnnfast("bench", "sampled", "--script", str(tmp_path / "none.py"))
    assert done.returncode == 2 and "there is no such file" in done.stderr


def test_dgl_can_be_imported_while_gnnfast_is_off(tmp_path):
    pytest.importorskip("dgl")
    code = "import gnnfast, dgl; assert not gnnfast.is_enabled(); print(dgl.__version__)"
    done = _python(code, tmp_path, GNNFAST="0")
    assert done.returncode == 0, done.stderr


def test_plain_models_meet_no_warning(tmp_path):
    pytest.importorskip("torch_geometric", reason="PyG is not installed")
    code = """
import warnings, torch, gnnfast
from torch_geometric.nn import GCNConv
x = torch.zeros(2000, 500)
x[::7, ::9] = 1
edge_index, conv = torch.randint(0, 2000, (2, 8000)), GCNConv(500, 8)
warnings.simplefilter("error")
for _ in range(4):
    conv(x, edge_index).sum().backward()
assert any("sparse" in key[1] for key in gnnfast.report().kernels)
"""
    done = _python(code, tmp_path)
    assert done.returncode == 0, done.stderr
