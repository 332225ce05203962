"""Whole programs that the ladder of a model is measured beside, each in a process of its own, on random weights.

    transformers   as it comes (eager), and with a static cache and a compiled step; where it is installed
    gpt-fast       GPT_FAST names a checkout of github.com/pytorch-labs/gpt-fast
    calm           CALM names a checkout of github.com/zeux/calm, built: make CUARCH=sm_90
    yalm           YALM names a checkout of github.com/andrewkchan/yalm, built: make build/main CUARCH=sm_90

A process of its own, as transformers would take the course's package `kernels` for one of the same name that it knows.
Each makes itself ready while others do, which for a compiled model takes most of a minute; then it waits for its turn,
alone on the card (turns.py). What a peer leaves undone is said in a sentence.
"""

import contextlib
import importlib.util
import json
import os
import queue
import subprocess
import sys
import threading
import time
from pathlib import Path

from lab.timing import Timing

HERE = Path(__file__).resolve().parent
LINE = "peer: "  # as in turns.py
PATIENCE = 150, 60  # seconds for a peer to be ready, from its start on; and for its turn


def peers_of(shape, bits, length):
    """[(script, its case)] of the peers that there are for this model and so many tokens."""
    case, found, plain = case_of(shape, bits, length), [], shape.name.startswith("Mistral")
    if bits == 16 and has_transformers():
        theirs = case | {"dtype": str(shape.dtype).removeprefix("torch.")}
        found += [("with_transformers.py", theirs | {"compile": compiled}) for compiled in (False, True)]
    if plain and "GPT_FAST" in os.environ:
        found.append(("with_gpt_fast.py", case))
    if plain and "CALM" in os.environ:
        found.append(("with_calm.py", case | {"dtype": {16: "fp16", 8: "fp8", 4: "gf4"}[bits]}))
    if plain and bits == 16 and "YALM" in os.environ:
        found.append(("with_yalm.py", case | {"dtype": "fp16"}))
    return found


def case_of(shape, bits, length):
    """A model's sizes as scripts take them."""
    sizes = ("hidden", "n_layers", "n_heads", "n_kv_heads", "head_dim", "ffn", "vocab", "tied", "eps")
    return {size: getattr(shape, size) for size in sizes} | {"length": length, "bits": bits}


def has_transformers():
    return importlib.util.find_spec("transformers") is not None


class Peer:
    """A peer's process. `measured()` gives (its name, Timing), or None after a sentence."""

    def __init__(self, script, case):
        compiled = ", compiled" if case.get("compile") else ""
        named = script.removesuffix(".py").removeprefix("with_") + compiled
        self.title = f"{named}, {case['bits']} bits, {case['length']} tokens"
        path = [p for p in os.environ.get("PYTHONPATH", "").split(os.pathsep) if p and Path(p) != HERE.parents[2]]
        environment = os.environ | {"PYTHONPATH": os.pathsep.join(path), "TOKENIZERS_PARALLELISM": "false"}
        self.start([sys.executable, str(HERE / script), json.dumps(case)], environment)

    def start(self, command, environment):
        self.log = open(os.path.join(os.environ.get("PEERS_LOG", os.devnull)), "a")  # noqa: SIM115 - the process has it
        pipe = subprocess.PIPE
        self.process = subprocess.Popen(
            command, stdin=pipe, stdout=pipe, stderr=self.log, text=True, errors="replace", env=environment, cwd="/"
        )
        self.begin, self.said, self.last = time.perf_counter(), queue.Queue(), ""
        threading.Thread(target=self._listen, daemon=True).start()

    def _listen(self):
        for line in self.process.stdout:
            if line.startswith(LINE):
                self.said.put(json.loads(line.removeprefix(LINE)))
            elif line.strip():
                self.last = line.strip()
        self.said.put(None)

    def _next(self, key, seconds):
        try:
            found = self.said.get(timeout=max(0.01, seconds))
        except queue.Empty:
            found = None
        return found and found.get(key)

    def ready(self):
        """Wait until it is; whether it is."""
        if not hasattr(self, "about"):
            self.about = self._next("ready", PATIENCE[0] - (time.perf_counter() - self.begin))
            self.took = time.perf_counter() - self.begin
        return bool(self.about)

    def measured(self):
        found = self.turn()
        return found and (found[0], Timing.of(found[1]))

    def turn(self):
        """(its name, the seconds that it says), or None after a sentence."""
        seconds = None
        if self.ready():
            with contextlib.suppress(OSError):
                self.process.stdin.write("go\n")
                self.process.stdin.flush()
            seconds = self._next("seconds", PATIENCE[1])
        self.end()
        if seconds:
            return self.about["name"], seconds
        print(f"{self.title}: is left out: it was {'too slow' if self.ready() else 'not ready'}; {self.last[-200:]}")
        return None

    def end(self):
        self.process.kill()
        self.process.wait()
        self.log.close()


def wait(started):
    """Until each of these is ready, has given up, or has taken too long."""
    begin, every = time.perf_counter(), [peer for found in started.values() for peer in found]
    ready = sum(peer.ready() for peer in every)
    if every:
        print(f"{ready} of {len(every)} peers ready after {time.perf_counter() - begin:.0f} s", flush=True)


@contextlib.contextmanager
def started(cases):
    """{case: [Peer]} for (shape, bits, length) each; they end with the context."""
    peers = {case: [Peer(*one) for one in peers_of(*case)] for case in cases}
    try:
        yield peers
    finally:
        for peer in (peer for found in peers.values() for peer in found):
            if peer.process.poll() is None:
                peer.end()
