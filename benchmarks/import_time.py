"""How long `import qpt` and `qpt --help` take in a fresh Python: `python benchmarks/import_time.py [--runs 11]`."""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import time

CASES = {
    "python alone": "pass",
    "import qpt": "import qpt",
    "qpt --help": "from qpt.cli import main; main(['--help'])",
    "import torch": "import torch",
}


def seconds(code: str, runs: int) -> float:
    """Median of several runs, after one that fills the caches."""
    times = []
    for _ in range(runs + 1):
        began = time.perf_counter()
        subprocess.run([sys.executable, "-c", code], check=True, stdout=subprocess.DEVNULL)
        times.append(time.perf_counter() - began)
    return statistics.median(times[1:])


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--runs", type=int, default=11)
    runs = parser.parse_args().runs
    for name, code in CASES.items():
        print(f"{name:<14} {seconds(code, runs):.3f} s", flush=True)


if __name__ == "__main__":
    main()
