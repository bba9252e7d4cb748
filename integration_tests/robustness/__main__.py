"""``python -m robustness NAME --seconds 3600 --device cuda``; without a name, all. The fuzzer is ``python -m fuzz --cases 100000``."""

from __future__ import annotations

import argparse
import time

from robustness.runs import RUNS

if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="What must hold for hours.")
    parser.add_argument("name", nargs="?", choices=[*RUNS])
    parser.add_argument("--seconds", type=float, default=60, help="of each run")
    parser.add_argument("--device", default="cpu")
    arguments = parser.parse_args()
    for name in [arguments.name] if arguments.name else RUNS:
        begin = time.time()
        print(f"{name}: {RUNS[name](arguments.seconds, arguments.device)} ({time.time() - begin:.0f} s)", flush=True)
