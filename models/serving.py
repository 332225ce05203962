"""A server over time: requests come, steps take what measured steps take, and tokens go out. No kernel runs.

    report = simulate(requests, POLICIES["pages, fair shares"], stored_times(), room=120_000)

What happens, in order, until all requests are answered:

    1. arrive   who has arrived by now waits, first come first served
    2. enter    the first who waits enters, if there is a place and its prompt has room
    3. prompt   its tokens go through at once, and it has its first token; or, in chunks, some of them with each step
    4. step     each of the others gets a token, and needs room for one more; with pages, whoever came last gives up
                its room if there is none, and begins again later with what it has written as part of its prompt
    5. leave    who has all of its tokens leaves, and its room is free

Static batches have no 2 to 5 for one request: all enter together, padded to the longest, and leave together.
The same requests give the same report: nothing is drawn here. models/traffic.py makes requests, models/serving_times.py
says how long a step takes.
"""

from collections import deque
from dataclasses import dataclass

import numpy as np

from lab.arguments import expect_count
from models.serving_report import Report


@dataclass(frozen=True)
class Policy:
    """How a server works.

    continuous  True: a request leaves when it is done, and another enters; False: a batch ends with its longest answer
    page        tokens of a page; None: each request has room for the longest that there may be
    fair        whether blocks share the caches' bytes evenly; False: the longest decides
    shared      whether a beginning that prompts share is kept once, computed once, and read once for all
    chunk       tokens of prompts in a step, beside the others' tokens; None: a prompt is a step of its own
    """

    continuous: bool = True
    page: int | None = 16
    fair: bool = True
    shared: bool = False
    chunk: int | None = None


POLICIES = {
    "static batches": Policy(continuous=False, page=None),
    "room for the longest": Policy(page=None),
    "pages, a block a row": Policy(fair=False),
    "pages, fair shares": Policy(),
    "and prompts in chunks": Policy(chunk=512),
    "and a shared prefix": Policy(chunk=512, shared=True),
}


def simulate(requests, policy, times, *, room, most=64, context=16384):
    """The Report of a server with these requests.

    requests  models.traffic.Request, by arrival
    times     .step(lens, prompts, fair=, shared=) → s, as models.serving_times.StepTimes has it
    room      tokens that the cache has room for, in all
    most      requests that run at a time, at most
    context   tokens of a request, prompt and answer, at most: so many are kept for each where there are no pages

    ValueError names what cannot be served.
    """
    _expect(requests, policy, room, most, context)
    server = (_Continuous if policy.continuous else _Static)(requests, policy, times, room, most, context)
    server.run()
    steps = np.array(server.steps).reshape(-1, 6)
    return Report(list(requests), [np.array(t) for t in server.tokens], steps, server.begun_again)


def how_many_fit(requests, policy, room, context=16384):
    """How many of these requests, in order, have room at a time when their answers are whole."""
    taken, many = 0, 0
    for request in requests:
        tokens = request.prompt + request.answer
        if policy.page is None:
            taken += context
        else:
            kept = request.shared // policy.page * policy.page if policy.shared else 0
            taken += _up(tokens - kept, policy.page) + (kept if not many else 0)
        if taken > room:
            break
        many += 1
    return many


def _up(tokens, page):
    return -(-tokens // page) * page


@dataclass
class _Running:
    """A request that has entered. held: tokens in the cache, of which the first `kept` are in pages of all."""

    number: int
    to_read: int  # tokens of its prompt that are still to come
    held: int
    kept: int


class _Server:
    def __init__(self, requests, policy, times, room, most, context):
        self.requests, self.policy, self.times = requests, policy, times
        self.room, self.most, self.context = room, most, context
        self.now, self.steps, self.begun_again = 0.0, [], 0
        self.tokens = [[] for _ in requests]
        self.coming, self.waiting, self.running = deque(range(len(requests))), deque(), []

    def arrive(self):
        """1. Who has arrived by now waits; where nobody is here, time goes on until somebody comes."""
        if self.coming and not (self.waiting or self.running):
            self.now = max(self.now, self.requests[self.coming[0]].arrives)
        while self.coming and self.requests[self.coming[0]].arrives <= self.now:
            self.waiting.append(self.coming.popleft())

    def pass_time(self, seconds, held, taken):
        self.steps.append((self.now, self.now + seconds, len(self.running), len(self.waiting), held, taken))
        self.now += seconds


class _Continuous(_Server):
    def __init__(self, *args):
        super().__init__(*args)
        page = self.policy.page
        self.page, self.prefix = page or self.context, 0  # tokens of the shared beginning in pages of all
        self.free = self.room // self.page  # pages; without them a request's whole room is one

    def run(self):
        while self.coming or self.waiting or self.running:
            self.arrive()  # 1
            if self.policy.chunk is None:
                entered = self.enter()  # 2
                if entered is not None:
                    self.step([], [(entered, entered.to_read)])  # 3
                    continue
            else:  # 2, as many as the chunk has tokens for
                while sum(one.to_read for one in self.running) < self.policy.chunk and self.enter():
                    pass
            self.make_room()  # 4
            left, pieces = self.policy.chunk or 0, []  # 3, in chunks
            for one in self.running:
                if one.to_read and left:
                    pieces.append((one, min(one.to_read, left)))
                    left -= pieces[-1][1]
            self.step([one for one in self.running if not one.to_read], pieces)  # 4, 5

    def enter(self):
        """2. The first who waits, if it can. Who runs keeps a page each to grow into. Returns it, or None."""
        if not self.waiting or len(self.running) == self.most:
            return None
        number = self.waiting[0]
        request, written = self.requests[number], len(self.tokens[number])
        kept = request.shared // self.page * self.page if self.policy.shared else 0
        prompt = request.prompt + written  # what it had written, if it begins again
        first = max(0, kept - self.prefix) // self.page  # pages for all, if it is the first that has them
        spare = len(self.running) if self.policy.page else 0
        if -(-(prompt + 1 - kept) // self.page) + first + spare > self.free:
            return None
        self.waiting.popleft()
        self.free -= -(-(prompt - kept) // self.page) + first
        behind, self.prefix = min(kept, self.prefix), max(kept, self.prefix)  # what is there need not be computed
        entered = _Running(number, prompt - behind, behind, kept)
        self.running.append(entered)
        return entered

    def make_room(self):
        """4. A page for each that has none left for the next token; who came last gives up its own."""
        for one in list(self.running):
            if one.to_read or one not in self.running or (one.held - one.kept) % self.page:
                continue
            while not self.free:
                last = self.running[-1]
                self.leave(last)
                self.waiting.appendleft(last.number)
                self.begun_again += 1
                if last is one:
                    break
            else:
                self.free -= 1

    def leave(self, one):
        self.running.remove(one)
        tokens = one.held + one.to_read - one.kept
        self.free += -(-tokens // self.page)

    def step(self, decoding, pieces):
        """3 to 5."""
        for one in decoding:
            one.held += 1
        shared = self.policy.shared and min((self.requests[one.number].shared for one in decoding), default=0)
        prompts = [(new, one.held) for one, new in pieces]
        lens = [one.held for one in decoding]
        seconds = self.times.step(lens, prompts, fair=self.policy.fair, shared=int(shared))
        for one, new in pieces:
            one.held, one.to_read = one.held + new, one.to_read - new
        held = sum(one.held - one.kept for one in self.running) + self.prefix
        self.pass_time(seconds, held, (self.room // self.page - self.free) * self.page)
        for one in [*decoding, *(one for one, _ in pieces if not one.to_read)]:
            self.tokens[one.number].append(self.now)
            if len(self.tokens[one.number]) == self.requests[one.number].answer:
                self.leave(one)


class _Static(_Server):
    def run(self):
        while self.coming or self.waiting:
            self.arrive()
            many = min(len(self.waiting), self.most, self.room // self.context)
            self.running = [self.waiting.popleft() for _ in range(many)]
            batch, taken = [self.requests[number] for number in self.running], many * self.context
            prompt, answer = max(r.prompt for r in batch), max(r.answer for r in batch)
            for count in range(answer):
                lens, prompts = ([prompt + count] * many, ()) if count else ([], [(prompt, 0)] * many)
                held = sum(r.prompt + min(count, r.answer - 1) for r in batch)
                self.pass_time(self.times.step(lens, prompts, fair=self.policy.fair), held, taken)
                for number, request in zip(self.running, batch):
                    if count < request.answer:
                        self.tokens[number].append(self.now)
                self.arrive()
            self.running = []


def _expect(requests, policy, room, most, context):
    for name, value in (("room", room), ("most", most), ("context", context)):
        expect_count("simulate", name, value)
    for name in ("page", "chunk"):
        if getattr(policy, name) is not None:
            expect_count("simulate", f"policy.{name}", getattr(policy, name))
    if not policy.continuous and (policy.page, policy.chunk) != (None, None):
        raise ValueError(f"simulate: static batches have no pages and no chunks, got {policy}")
    if policy.page is None and (policy.shared or room < context):
        why = "shared beginnings need pages" if policy.shared else f"room must hold one context, {context}, got {room}"
        raise ValueError(f"simulate: {why}")
    page, before = policy.page or 1, 0.0
    prefix = max((r.shared for r in requests), default=0) // page if policy.shared else 0
    whole = (room // page - prefix) * page  # what a request alone may have beside a shared beginning
    for number, r in enumerate(requests):
        if r.prompt < 1 or r.answer < 1 or not 0 <= r.shared < r.prompt:
            raise ValueError(f"simulate: request {number} needs a prompt of its own and an answer, got {r}")
        if r.prompt + r.answer > min(context, whole):
            most = f"more tokens than context, {context}, or room, {room}"
            raise ValueError(f"simulate: request {number} has {most}: {r}")
        if r.arrives < before:
            raise ValueError(f"simulate: requests must come by arrival, got {r.arrives} s behind {before} s")
        before = r.arrives
    if len({r.shared for r in requests} - {0}) > 1:
        raise ValueError("simulate: requests must share one beginning, got several lengths of it")
