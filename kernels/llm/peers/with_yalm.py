"""yalm (github.com/andrewkchan/yalm): its engine by a main of ours, on a file of its layout of random weights. Greedy.

YALM=<its checkout, built> python with_yalm.py '{"hidden": 4096, …, "dtype": "fp16", "length": 128}'
"""

import glob
import json
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

from turns import say
from with_calm import TOKENS, write

MAIN = r"""
// yalm's engine, asked for tokens one after another from a position on: its own program would run a prompt of
// thousands of tokens first. Usage: steps FILE FIRST COUNT TURNS; prints the seconds of a token, a line a turn.
#include <chrono>
#include <cstdio>
#include <cstdlib>

#include "model.h"
#include "sampler.h"

int main(int argc, char **argv) {
    if (argc != 5) return 2;
    const int first = atoi(argv[2]), count = atoi(argv[3]), turns = atoi(argv[4]);
    YALMData data;
    if (data.from_file(argv[1]) != 0) return 1;
    Model model(data, 4096);
    InferenceState state(model.config);
    Sampler sampler(model.config, 1);
    model.cuda();
    state.cuda();
    for (int turn = -1; turn < turns; turn++) { // the first one warms up
        const auto begin = std::chrono::steady_clock::now();
        int token = 1;
        for (int i = 0; i < count; i++) {
            model.forward(state, token, first + i);
            token = sampler.sample(state, 0.0f);
        }
        const std::chrono::duration<double> taken = std::chrono::steady_clock::now() - begin;
        if (turn >= 0) printf("token %.9f\n", taken.count() / count);
    }
}
"""


def program_of(folder):
    """The program, compiled against yalm's objects: all but its own main."""
    home, main = Path(os.environ["YALM"]), Path(folder) / "steps.cpp"
    main.write_text(MAIN)
    # (as quoted headers only: yalm has a time.h)
    objects = [path for path in glob.glob(f"{home}/build/**/*.o", recursive=True) if "main.cpp.o" not in path]
    command = ["g++", "-O2", "-std=c++20", "-fopenmp", "-mf16c", "-mavx2", "-mfma", f"-iquote{home}/src"]
    command += [f"-I{home}/vendor", "-I/usr/local/cuda/include", str(main), *objects]
    command += ["-L/usr/local/cuda/lib64", "-lcudart", "-lm", "-o", f"{folder}/steps"]
    subprocess.run(command, check=True)
    return f"{folder}/steps"


def main(case):
    with tempfile.TemporaryDirectory() as folder:
        program, path = program_of(folder), os.path.join(folder, "random.yalm")
        write(case, path, {"bos_token_id": "1", "eos_token_id": "2"})
        say(ready={"name": "yalm, fp16"})
        sys.stdin.readline()
        first = max(0, case["length"] - TOKENS)
        command = [program, path, str(first), str(TOKENS), "5"]
        done = subprocess.run(command, capture_output=True, text=True, errors="replace")
    taken = [float(found) for found in re.findall(r"^token ([\d.]+)$", done.stdout, re.M)]
    if not taken:
        raise SystemExit(f"yalm said nothing of its speed: {done.stderr[-300:]!r}")
    say(seconds=taken)


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
