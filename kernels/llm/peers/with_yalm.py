"""yalm (github.com/andrewkchan/yalm): its engine by yalm_steps.cpp, on a file of its layout of random weights. Greedy.

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


def program_of(folder):
    """The program, compiled against yalm's objects: all but its own main."""
    home, here = Path(os.environ["YALM"]), Path(__file__).resolve().parent
    objects = [path for path in glob.glob(f"{home}/build/**/*.o", recursive=True) if "main.cpp.o" not in path]
    command = ["g++", "-O2", "-std=c++20", "-fopenmp", "-mf16c", "-mavx2", "-mfma", f"-I{home}/src", f"-I{home}/vendor"]
    command += ["-I/usr/local/cuda/include", str(here / "yalm_steps.cpp"), *objects]
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
