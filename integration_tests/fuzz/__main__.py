"""``python -m fuzz``: many cases."""

from __future__ import annotations

import argparse
import multiprocessing
import sys
import time
from concurrent.futures import ProcessPoolExecutor

from fuzz.cases import CASES, FRAMEWORKS, prepare, run_cases


def main() -> int:
    parser = argparse.ArgumentParser(description="Random programs over PyG's and DGL's layers, with gnnfast and without.")
    parser.add_argument("--cases", type=int, default=2000)
    parser.add_argument("--seed", type=int, default=0, help="of the first case; a failure prints the seed of its own")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--framework", choices=[*FRAMEWORKS, "both"], default="both")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="stop after")
    parser.add_argument("--processes", type=int, default=1, help="that share the cases")
    arguments = parser.parse_args()
    frameworks = list(FRAMEWORKS) if arguments.framework == "both" else [arguments.framework]
    begin, end = arguments.seed, arguments.seed + arguments.cases
    started = time.time()
    rest = arguments.device, started + arguments.seconds
    if arguments.processes == 1:
        prepare()
        results = [run_cases(frameworks, range(begin, end), *rest)]
    else:
        context = multiprocessing.get_context("spawn")
        with ProcessPoolExecutor(arguments.processes, context, prepare) as pool:
            parts = [pool.submit(run_cases, frameworks, range(at, min(at + CASES, end)), *rest) for at in range(begin, end, CASES)]
            results = [part.result() for part in parts]
    done, failures = (sum(numbers) for numbers in zip(*results))
    print(f"{done} cases, {failures} failed, {time.time() - started:.0f} s")
    return min(failures, 1)


if __name__ == "__main__":
    sys.exit(main())
