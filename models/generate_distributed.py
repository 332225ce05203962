"""One text from processes that have a card each, as torchrun starts them, on one host or on several:

torchrun --nproc-per-node 2 -m models.generate FOLDER --distributed --prompt "..."

All run the same steps, and choose the same tokens; the first one prints, and says what a token's exchanges must cost.
"""

import contextlib
import io
import os
import sys

import torch
import torch.distributed as dist

from models.config import BadModel, read_config
from models.exchange_costs import predict
from models.exchanges import Processes

NEEDED = "RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"


def run(args, show):
    """The command's exit code. show(args, gpus) is what one process does."""
    if missing := [name for name in NEEDED if name not in os.environ]:
        print(
            f"generate: --distributed wants torchrun, which sets {missing[0]}: "
            "torchrun --nproc-per-node 2 -m models.generate FOLDER --distributed",
            file=sys.stderr,
        )
        return 2
    if args.gpus != 1:
        print(f"generate: --gpus must be 1 with --distributed, got {args.gpus}", file=sys.stderr)
        return 2
    simulated = args.device in ("cpu", "simt") or not torch.cuda.is_available()
    if not simulated:
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", 0)) % torch.cuda.device_count())
    dist.init_process_group("gloo" if simulated else "cpu:gloo,cuda:nccl")
    try:
        return _show(args, show, simulated)
    finally:
        dist.destroy_process_group()


def _show(args, show, simulated):
    first = dist.get_rank() == 0
    try:
        processes = Processes("cpu" if simulated else None, args.exchange)
    except (BadModel, ValueError) as error:
        if first:
            print(error, file=sys.stderr)
        return 2
    if args.seed is None:  # all draw the same
        seed = [torch.seed() % 2**62]
        dist.broadcast_object_list(seed, 0)
        args.seed = seed[0]
    quiet = contextlib.nullcontext() if first else contextlib.redirect_stdout(io.StringIO())
    with quiet:
        code = show(args, processes)
        if code == 0:
            print(predict(read_config(args.folder), processes.count, processes.exchange))
    return code
