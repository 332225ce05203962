"""Make model.safetensors of a folder's pytorch_model.bin:  python -m models.to_safetensors FOLDER

state-spaces' checkpoints come as the latter, a pickle, which nothing can be mapped from and which may hold more than
numbers: it is read as tensors alone.
"""

import argparse
import pickle
import sys
from pathlib import Path

import torch
from safetensors.torch import save_file

from models.config import BadModel, read_config
from models.weights import all_shapes


def convert(folder):
    """Write model.safetensors, with the tensors that the model of the folder's config.json needs, and return its path.
    BadModel says why not, and nothing is written then."""
    folder = Path(folder)
    config = read_config(folder)
    source, target = folder / "pytorch_model.bin", folder / "model.safetensors"
    if target.exists():
        raise BadModel(f"{folder}: model.safetensors is there already")
    if not source.is_file():
        raise BadModel(f"{folder}: expected pytorch_model.bin, found none")
    try:
        found = torch.load(source, map_location="cpu", weights_only=True, mmap=True)
    except (pickle.UnpicklingError, RuntimeError, ValueError, EOFError) as error:
        raise BadModel(f"{source}: does not hold tensors alone: {str(error).splitlines()[0]}") from None
    missing = [name for name in all_shapes(config) if not isinstance(found.get(name), torch.Tensor)]
    if missing:
        raise BadModel(f"{source}: expected a tensor {missing[0]}, found none")
    wanted = {name: found[name].contiguous() for name in all_shapes(config)}
    save_file(wanted, target, metadata={"format": "pt"})
    return target


def main(arguments=None):
    """Run the command. Returns the exit code: 0, or 2 where something was asked for that cannot be."""
    found = argparse.ArgumentParser("python -m models.to_safetensors", description=__doc__.split("\n")[0])
    found.add_argument("folder", help="a checkpoint: config.json and pytorch_model.bin")
    try:
        print(convert(found.parse_args(arguments).folder))
    except BadModel as error:
        print(error, file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
