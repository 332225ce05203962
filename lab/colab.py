"""Set up in Google Colab: install what the course needs and Colab lacks. The notebooks' first cell runs this there.

PyTorch, Triton and NumPy stay as Colab has them: they fit its card. `python -m lab.notebooks badge OWNER/NAME` writes
that cell.
"""

import re
import subprocess
import sys
import tomllib
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
STAY = ("torch", "triton", "numpy")


def lacking(project, installed=version):
    """Of what pyproject.toml's [project] asks for, what is not there, as pip takes it."""
    asked = project["dependencies"] + project["optional-dependencies"]["models"]
    found = []
    for requirement in (line.split(";")[0].strip() for line in asked):
        name = re.match(r"[\w.-]+", requirement)[0]
        try:
            there = installed(name)
        except PackageNotFoundError:
            there = ""
        old = requirement.startswith(("nvidia-", "cuda-")) and there.split(".")[0] != "13"
        if name not in STAY and (not there or old):
            found.append(requirement)
    return found


def main():
    wanted = lacking(tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"])
    if wanted:
        print(f"installing {', '.join(wanted)}: this takes a minute", flush=True)
        code = subprocess.call([sys.executable, "-m", "pip", "install", "-q", *wanted])
        if code:
            print(
                "expected pip to install these and it did not (its message is above): run this cell again",
                file=sys.stderr,
            )
            return 1
    import torch

    if torch.cuda.is_available():
        print(f"ready, with an {torch.cuda.get_device_name()}: kernels run there")
    else:
        print("ready, without a GPU: kernels run on the SIMT machine (Runtime → Change runtime type has GPUs)")
    return 0


if __name__ == "__main__":
    sys.path[0] = str(ROOT)  # this folder's modules must not stand in for those of the standard library
    sys.exit(main())
