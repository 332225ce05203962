"""What chapters try beside their ladders: `python -m kernels.trials [topic ...]` (needs an NVIDIA GPU, half a minute).

A trial asks one question, such as whether it is registers that a rung lacks, and answers it by a run. Its figures are
stored like those of ladders, in kernels/<topic>/measured/<card>_trials.json, and `make bench` measures them as well. No
rung changes for a trial: a variant is made from its source, or by an option.
"""

import importlib
import sys
from pathlib import Path

from lab import gpu_roof, results

HERE = Path(__file__).resolve().parent
TOPICS = ["gemv", "fusion", "lowbit", "attention", "kv_cache", "paged", "latent", "ssd", "matmul", "mamba2"]
NAME = "trials"  # of the file


def store(topic, roof, versions):
    """Try all of a topic, print it, and write the file. Returns the paths written."""
    module = importlib.import_module(f"{__package__}.{topic}.trials")
    ladders, tables = module.ladders(), module.tables()
    for found in (*ladders, *tables):
        print(f"\n{found}")
    return [results.save(HERE / topic, ladders, roof, versions, tables=tables, name=NAME)]


def main(arguments):
    """The command, for the topics named (default: all). Returns the exit status."""
    from kernels.bench import versions

    if unknown := [a for a in arguments if a not in TOPICS]:
        print(f"trials: no topic named {', '.join(unknown)}; there are: {', '.join(TOPICS)}")
        return 2
    if gpu_roof() is None:
        print("No NVIDIA GPU on this machine: nothing is tried, and what is stored stays as it is.")
        return 1
    for topic in arguments or TOPICS:
        for path in store(topic, gpu_roof(), versions()):
            print(f"wrote {path.relative_to(results.ROOT)}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
