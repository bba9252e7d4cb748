"""``python -m fuzz``: many cases."""

from __future__ import annotations

import argparse
import sys
import time

import pytest
import thresholds
import torch

from fuzz.cases import FRAMEWORKS, run_case


def main() -> int:
    parser = argparse.ArgumentParser(description="Random programs over PyG's and DGL's layers, with gnnfast and without.")
    parser.add_argument("--cases", type=int, default=2000)
    parser.add_argument("--seed", type=int, default=0, help="of the first case; a failure prints the seed of its own")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--framework", choices=[*FRAMEWORKS, "both"], default="both")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="stop after")
    arguments = parser.parse_args()
    frameworks = list(FRAMEWORKS) if arguments.framework == "both" else [arguments.framework]
    torch.set_num_threads(1)  # the graphs are tiny
    thresholds.nothing_is_too_small(pytest.MonkeyPatch())
    begin, failures, done = time.time(), 0, 0
    for seed in range(arguments.seed, arguments.seed + arguments.cases):
        if time.time() - begin > arguments.seconds:
            break
        difference = run_case(frameworks[seed % len(frameworks)], seed, arguments.device)
        done += 1
        if difference:
            failures += 1
            print(difference, flush=True)
    print(f"{done} cases, {failures} failed, {time.time() - begin:.0f} s")
    return min(failures, 1)


if __name__ == "__main__":
    sys.exit(main())
