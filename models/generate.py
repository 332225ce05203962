"""Text from a model on your disk:  python -m models.generate FOLDER --prompt "Once upon a time"

It streams what the model writes, and ends with what that took: tokens a second, the bytes that one token must read, and
the share of this machine's memory speed that they came at. With --prompt several times it writes several texts at once.
"""

import argparse
import contextlib
import io
import sys
import time
from pathlib import Path

from lab.roof import roof
from lab.roof_gpu import gpu_roof
from models.config import BadModel, read_config
from models.llm import load
from models.tokens import Tokens

HERE = Path(__file__).resolve().parent

SHIPPED = {"llama": HERE / "small", "mamba2": HERE / "small_mamba2"}  # by name, where no folder has it
# What a step moves, by the kind of model.
MOVES = {"mamba2": "weights, and states read and written", "bamba": "weights, states, keys and values"}


def parser():
    found = argparse.ArgumentParser("python -m models.generate", description=__doc__.split("\n")[0])
    found.add_argument(
        "folder",
        help="a checkpoint as Hugging Face lays it out: config.json, *.safetensors, tokenizer.json; or one of the "
        "course's own by its name, llama or mamba2",
    )
    found.add_argument(
        "--prompt", default=None, action="append", help="the text to go on from; given several times: several texts"
    )
    found.add_argument("--chat", action="store_true", help="take the prompt as a message, by the checkpoint's template")
    found.add_argument("--max-tokens", type=int, default=200, help="write at most so many; 200 unless given")
    found.add_argument("--temperature", type=float, default=0.0, help="0, the default: always the likeliest token")
    found.add_argument("--top-k", type=int, default=None, help="draw from the so many likeliest tokens alone")
    found.add_argument(
        "--top-p", type=float, default=None, help="draw from the fewest likeliest tokens that make up so much, 0 to 1"
    )
    found.add_argument("--seed", type=int, default=None, help="the same seed gives the same text")
    found.add_argument("--bits", type=int, default=16, help="of a weight: 16; on a card 8 or 4, too")
    found.add_argument("--kv-bits", type=int, default=16, help="of a number of the cache: 16; on a card 8 or 4, too")
    found.add_argument("--engine", default="graph", help="graph, or one_launch: a token in one launch, on newer cards")
    found.add_argument("--device", default=None, help="cpu, cuda, cuda:1 or simt; a card where there is one")
    found.add_argument("--gpus", type=int, default=1, help="over so many cards of this host, by heads and columns")
    found.add_argument(
        "--distributed", action="store_true", help="the same, each process that torchrun starts with a card of its own"
    )
    found.add_argument(
        "--exchange", default=None, help="with --distributed: memory, within one host, or messages (NCCL), also between"
    )
    return found


def main(arguments=None):
    """Run the command. Returns the exit code: 0, or 2 where something was asked for that cannot be."""
    args = parser().parse_args(arguments)
    if args.distributed:
        from models.generate_distributed import run

        return run(args, show)
    return show(args, args.gpus)


def show(args, gpus=1):
    """The command, with models.load's `gpus`."""
    if args.folder in SHIPPED and not Path(args.folder).exists():
        args.folder = SHIPPED[args.folder]
    try:
        prompts = [expect_prompt(prompt) for prompt in args.prompt or [None]]
        read_config(args.folder)  # that a folder is missing is said before what it lacks
        tokens = Tokens(args.folder)
        bits = {"bits": args.bits, "kv_bits": args.kv_bits}
        model = load(args.folder, device=args.device, **bits, engine=args.engine, progress=Bar(), gpus=gpus)
        starts = [tokens.chat(prompt) if args.chat else tokens.encode(prompt) for prompt in prompts]
        sampling = {"temperature": args.temperature, "top_k": args.top_k, "top_p": args.top_p}
        if len(prompts) > 1:
            from models import generate_several

            return generate_several.show(
                model, tokens, prompts, starts, args.max_tokens, args.seed, args.chat, sampling
            )
        (ids,), (prompt,) = starts, prompts
        written = model.generate(ids, args.max_tokens, **sampling, seed=args.seed)
    except (BadModel, ValueError, TypeError) as error:
        print(error, file=sys.stderr)
        return 2
    if not args.chat:
        print(prompt, end="", flush=True)
    clock = Clock(written)
    try:
        for piece in tokens.stream(clock):
            print(piece, end="", flush=True)
    except KeyboardInterrupt:
        print(" (stopped)", end="")
    print("\n")
    print(report(model, len(ids), clock.times))
    return 0


def expect_prompt(prompt):
    """The prompt; ValueError for none, or one without a word."""
    if prompt is None or not prompt.strip():
        raise ValueError('generate: --prompt must hold some text to go on from, such as --prompt "Once upon a time"')
    return prompt


class Clock:
    """Passes on what an iterator gives, and notes when: `times`, the start first."""

    def __init__(self, items):
        self._items, self.times = items, [time.perf_counter()]

    def __iter__(self):
        for item in self._items:
            self.times.append(time.perf_counter())
            yield item


class Bar:
    """A progress bar on one line of a terminal's stderr; call it with (bytes so far, bytes in all)."""

    def __init__(self, file=None):
        self.file, self.shown = file or sys.stderr, None

    def __call__(self, done, total):
        filled = 30 * done // max(total, 1)
        if filled == self.shown or not self.file.isatty():
            return
        self.shown = filled
        rest = "█" * filled + "·" * (30 - filled)
        self.file.write(f"\rloading {rest} {done / 1e6:,.0f} of {total / 1e6:,.0f} MB" + "\n" * (done >= total))
        self.file.flush()


def report(model, prompt_tokens, times):
    """What a text took, in lines: the prompt, and, where two tokens or more were written, a token. The SIMT machine has
    no times."""
    if model.simulated:
        counted = f"{model.step_bytes(prompt_tokens) / 1e6:,.1f} MB"
        counted += f" on each of {model.devices} devices" * (model.devices > 1)
        return f"written     {len(times) - 1} tokens on the SIMT machine, {counted} read for each: it has no times"
    lines = []
    if len(times) > 1:
        first = times[1] - times[0]
        lines.append(f"prompt      {prompt_tokens} tokens, {prompt_tokens / first:,.1f} tokens/s to the first token")
    if len(times) > 2:
        begin = 2 if len(times) > 3 else 1  # behind the first one the step is compiled
        seconds, steps = times[-1] - times[begin], len(times) - begin - 1
        bytes_ = sum(model.step_bytes(prompt_tokens + begin - 1 + i) for i in range(steps)) / steps
        with contextlib.redirect_stdout(io.StringIO()):
            reads = (gpu_roof() if model.device.type == "cuda" else roof()).read
        limit = reads / bytes_
        since = " from the second on" * (begin == 2)
        lines.append(f"written     {len(times) - 1} tokens, {steps / seconds:,.1f} tokens/s{since}")
        moves = MOVES.get(model.config.kind, "weights, keys and values")
        verb = "moves" if model.engine.state_bytes else "reads"
        moves += f", on each of {model.devices} cards" * (model.devices > 1)
        lines.append(f"a token     {verb} {bytes_ / 1e6:,.1f} MB: {moves}")
        lines.append(f"the limit   {limit:,.1f} tokens/s, at the {reads / 1e9:,.1f} GB/s that this machine reads")
        lines.append(f"share       {steps / seconds / limit:.0%}")
    return "\n".join(lines) or "nothing was written"


if __name__ == "__main__":
    sys.exit(main())
