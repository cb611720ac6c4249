"""Seconds until ``import kvlens`` and ``kvlens --help`` are done, as whole processes.

python tests/benchmarks/bench_import.py
"""

import subprocess
import sys
from statistics import median
from time import perf_counter

from timing import verdict

COMMANDS = {"import kvlens": ["-c", "import kvlens"], "kvlens --help": ["-m", "kvlens", "--help"], "python alone": ["-c", ""]}


def seconds(arguments: list[str], repeats: int) -> float:
    """Median wall time of a Python process."""
    times = []
    for _ in range(repeats):
        start = perf_counter()
        subprocess.run([sys.executable, *arguments], check=True, stdout=subprocess.DEVNULL)
        times.append(perf_counter() - start)
    return median(times)


def main(repeats: int = 5) -> None:
    taken = {name: seconds(arguments, repeats) for name, arguments in COMMANDS.items()}
    print(f"python alone: {taken['python alone']:.3f} s")
    print(verdict("import kvlens beyond that, s", taken["import kvlens"] - taken["python alone"], 0.2))
    print(verdict("kvlens --help, s", taken["kvlens --help"], 0.5))


if __name__ == "__main__":
    main()
