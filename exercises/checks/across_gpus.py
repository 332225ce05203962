"""The checks of chapter 19: a token over several cards, and exchanges between two devices of the SIMT machine."""

import numpy as np

import simt
from exercises.checks import call_text, close, counted, number_from, shown, time_limit
from exercises.checks.exchanges import (
    HELPERS,
    by_turns,
    numbers,
    over_link,
    run_together,
    sectors,
    turn_text,
)
from exercises.checks.launches import STEPS, compare, compiled, whole_numbers
from lab.check import unset
from lab.exercise import Exercise, Wrong

THREADS = 64

# Exercise 1: tokens a second


def _token(cards, layers, kernels, last, read, exchanges, way, message, link):
    each = sum(fixed + 1e6 * size / cards / read for size, fixed in kernels)
    moved = way + 1e6 * (cards - 1) * message / link if cards > 1 else 0
    return layers * (each + exchanges * moved) + last[1] + 1e6 * last[0] / cards / read


def _draw_model(rng):
    kernels = [(int(rng.integers(1, 240)) << 20, float(rng.uniform(1, 6))) for _ in range(int(rng.integers(1, 6)))]
    last = int(rng.integers(50, 600)) << 20, float(rng.uniform(1, 6))
    rates = {"read": float(rng.uniform(1e12, 5e12)), "exchanges": int(rng.integers(1, 5))}
    rates |= {"way": float(rng.uniform(0.5, 20)), "message": int(rng.integers(1, 64)) << 10}
    return {
        "layers": int(rng.integers(1, 90)),
        "kernels": kernels,
        "last": last,
        **rates,
        "link": rng.uniform(2e10, 4e11),
    }


def exercise_1(tokens_per_second, slowest_exchange):
    """tokens_per_second(cards, ...) and slowest_exchange(cards, speedup, ...) -> numbers, or None"""
    exercise = Exercise("Exercise 1: tokens a second")
    rng = np.random.default_rng()
    example = {  # the statement's: the smallest one comes first
        "layers": 1, "kernels": [(4_000_000_000, 10.0)], "last": (0, 0.0), "read": 4e12, "exchanges": 2, "way": 2.0,
        "message": 16384, "link": 4e11,
    }  # fmt: skip
    mistral = {
        "layers": 32,
        "kernels": [(50331648, 1.5), (16777216, 4.0), (33554432, 1.2), (234881024, 2.3), (117440512, 1.9)],
        "last": (262144000, 1.3), "read": 4.7e12, "exchanges": 2, "way": 1.7, "message": 16384, "link": 3.7e11,
    }  # fmt: skip
    models = [example, mistral] + [_draw_model(rng) for _ in range(7)]
    with exercise, time_limit():
        for model in models:
            for cards in (1, 2, 4, 8):
                got, right = number_from(tokens_per_second, cards, **model), 1e6 / _token(cards, **model)
                call = call_text(tokens_per_second, cards, **model)
                exercise.require(close(got, right, 1e-6), f"{call} gave {got:.6g}, expected {right:.6g}")
        for model in models:
            named = {key: model[key] for key in ("layers", "kernels", "last", "read", "exchanges")}
            for cards in (2, 4, 8):
                alone = _token(1, **model)
                free = _token(cards, **{**model, "way": 0, "message": 0})
                for share in (0.3, 0.9, 1.3):
                    speedup = 1 + share * (alone / free - 1)
                    call = call_text(slowest_exchange, cards, speedup, **named)
                    if share > 1:
                        got = slowest_exchange(cards, speedup, **named)
                        exercise.require(
                            got is None,
                            f"{call} gave {shown(got)}, expected None: even with exchanges that take nothing it is "
                            f"{alone / free:.4g} times as fast",
                        )
                        continue
                    right = (alone / speedup - free) / (model["layers"] * model["exchanges"])
                    got = number_from(slowest_exchange, cards, speedup, **named)
                    exercise.require(close(got, right, 1e-6), f"{call} gave {got:.6g}, expected {right:.6g}")
    return exercise.report(f"right for {len(models)} models on 1 to 8 cards")


# Exercise 2: find the bugs


def exercise_2(source):
    """CUDA source of push."""
    exercise = Exercise("Exercise 2: find the bugs")
    rng = np.random.default_rng(19)  # the stub's verdict is the same on every run
    with exercise, time_limit(60):
        kernel = compiled(source, "push")
        for turns, n, count in by_turns((1, 2), (64, 3), (150, 3)):
            _push(kernel, rng, n, count, turns)
        _peer_has_gone_on(kernel)
        for turns in np.random.default_rng().integers(100, 1000, 2):
            _push(kernel, np.random.default_rng(), 96, 6, int(turns))
    return exercise.report("right, whoever is ahead, without a race; one flag an exchange goes over the link")


def _push(kernel, rng, n, count, turns):
    at = f"{counted(count, 'exchange')} of {counted(n, 'number')}, {turn_text(turns)}"
    xs = [[whole_numbers(rng, n) for _ in (0, 1)] for _ in range(count)]
    wanted = [a + b for a, b in xs]
    boxes, flags, number = [unset(2 * n) for _ in (0, 1)], numbers(), numbers()
    launches = [
        [
            (kernel, 1, THREADS, (x[r], boxes[r], boxes[1 - r], flags[r], flags[1 - r], number[r], np.int32(n)))
            for x in xs
        ]
        for r in (0, 1)
    ]
    owned = [[boxes[r], flags[r], number[r], *(x[r] for x in xs)] for r in (0, 1)]
    reports = run_together(launches, owned, turns, at)
    _right_sums(xs, wanted, at)
    most = sectors(4 * n) + 32
    for report in reports[0] + reports[1]:
        written, loaded = over_link(report)
        if (written > most and n % 8 == 0) or loaded:  # else a warp's numbers begin within a sector
            raise Wrong(
                f"right, but at {at} an exchange writes {written:,} bytes to the other device's memory and loads "
                f"{loaded:,} from it; wanted: at most {most:,}, the message and a flag, and 0"
            )


def _peer_has_gone_on(kernel):
    """The other device has ended the first exchange, and told its number in the second, before this one looks."""
    at, n = "1 exchange, in which the other device has told its next number already", 8
    x, boxes, flag = np.ones(n, np.float32), [unset(2 * n) for _ in (0, 1)], np.full(1, 2, np.uint32)
    boxes[0][:] = 4
    try:
        args = x, *boxes, flag, np.zeros(1, np.uint32), np.zeros(1, np.uint32), np.int32(n)
        kernel(1, THREADS, *args, step_limit=STEPS)
    except (simt.StepLimit, simt.Deadlock):
        raise Wrong(f"at {at}: the flag is 2, and the kernel waits on and on for a 1") from None
    compare("x", x, np.full(n, 5, np.float32), at)


def _right_sums(xs, wanted, at):
    for e, (pair, sums) in enumerate(zip(xs, wanted), 1):
        for device, x in enumerate(pair):
            compare(f"x of device {device} after exchange {e}", x, sums, at)


# Exercise 3: which meeting can go


def exercise_3(source):
    """CUDA source of pulled and of halves."""
    exercise = Exercise("Exercise 3: which meeting can go")
    rng = np.random.default_rng(19)
    with exercise, time_limit(90):
        kernels = {name: compiled(source, name, behind=HELPERS) for name in ("pulled", "halves")}
        for name, kernel in kernels.items():
            for turns, n, count in by_turns((2, 2), (66, 3)):
                _meetings(name, kernel, rng, n, count, turns)
        for name, kernel in kernels.items():
            turns = int(np.random.default_rng().integers(100, 1000))
            _meetings(name, kernel, np.random.default_rng(), 130, 4, turns)
        written = max(over_link(r)[0] for r in _meetings("pulled", kernels["pulled"], rng, 64, 3, "forward"))
        exercise.require(
            written <= 32,
            f"right, but with 64 numbers an exchange of pulled writes {written} bytes to the other device's memory; "
            "wanted: 32, a single flag",
        )
    return exercise.report("both right, whoever is ahead, without a race; pulled meets once, and halves twice")


def _meetings(name, kernel, rng, n, count, turns):
    """Messages that a launch ahead writes, the exchange, and a launch behind that reads. The exchanges' reports."""
    at = f"{counted(count, 'exchange')} of {counted(n, 'number')} by {name}, {turn_text(turns)}"
    fill = kernel.module["check_fill"]
    given = [[whole_numbers(rng, n) for _ in (0, 1)] for _ in range(count)]
    wanted, got = [a + b for a, b in given], [[unset(n) for _ in (0, 1)] for _ in given]
    xs, boxes = [unset(n) for _ in (0, 1)], [unset(2 * n) for _ in (0, 1)]
    flags, number, launches = numbers(), numbers(), [[], []]
    for r in (0, 1):
        told = flags[r], flags[1 - r], number[r]
        args = (xs[r], boxes[r], boxes[1 - r], *told) if name == "pulled" else (xs[r], xs[1 - r], *told, np.int32(r))
        for message, result in zip(given, got):
            launches[r] += [
                (fill, 1, 32, (xs[r], message[r], np.int32(n))),
                (kernel, 1, THREADS, (*args, np.int32(n))),
                (fill, 1, 32, (result[r], xs[r], np.int32(n))),
            ]
    owned = [[xs[r], boxes[r], flags[r], number[r], *(g[r] for g in got)] for r in (0, 1)]
    reports = run_together(launches, owned, turns, at)
    _right_sums(got, wanted, at)
    return reports[0][1::3] + reports[1][1::3]


# Exercise 4: half the bytes

NOT_YET = np.float32(-0.0)


def exercise_4(source):
    """CUDA source of sent."""
    exercise = Exercise("Exercise 4: half the bytes")
    rng = np.random.default_rng(19)
    with exercise, time_limit(60):
        kernel, most = compiled(source, "sent", behind=HELPERS), 0
        for turns, words, count, block in by_turns((1, 2, 32), (33, 4, 32), (70, 4, 64)):
            reports = _sent(kernel, rng, words, count, block, turns)
            if words % 2 == 0:  # else a warp's words begin within a sector
                most = max(most, *(sum(over_link(report)) / (16 * words) for report in reports))
        for turns in np.random.default_rng().integers(100, 1000, 2):
            _sent(kernel, np.random.default_rng(), 50, 6, 64, int(turns))
        exercise.require(
            most <= 1,
            f"right, but {16 * most:.3g} bytes go over the link for each word of 16 bytes; wanted: 16",
        )
        for half in (0, 1):
            _waits_for_both_halves(kernel, half)
            _has_put_all_back(kernel, half)
    return exercise.report("right, whoever is ahead, zeros of both signs too; 16 bytes over the link for each word")


def _numbers_with_zeros(rng, n):
    """Numbers of which some are 0 and -0, as whole words, too."""
    x = whole_numbers(rng, n)
    x[rng.random(n) < 0.2], x[rng.random(n) < 0.2] = 0.0, -0.0
    if n >= 8:
        x[4:8] = -0.0
    x[rng.integers(n)] = np.inf
    return x


def _sent(kernel, rng, words, count, block, turns):
    n = 4 * words
    at = f"{counted(count, 'exchange')} of {counted(words, 'word')}, {turn_text(turns)}"
    given = [[_numbers_with_zeros(rng, n) for _ in (0, 1)] for _ in range(count)]
    wanted, xs = [a + b for a, b in given], [[x.copy() for x in pair] for pair in given]
    boxes, number = [np.full(4 * n, NOT_YET) for _ in (0, 1)], [np.ones(1, np.uint32) for _ in (0, 1)]
    launches, grid = [[], []], -(-words // block)
    for r in (0, 1):
        for x in xs:
            launches[r] += [
                (kernel, grid, block, (x[r], boxes[r], boxes[1 - r], number[r], np.int32(words))),
                (kernel.module["check_count"], 1, 1, (number[r],)),
            ]
    owned = [[boxes[r], number[r], *(x[r] for x in xs)] for r in (0, 1)]
    reports = run_together(launches, owned, turns, at)
    _right_sums(xs, wanted, at)
    return reports[0][::2] + reports[1][::2]


def _waits_for_both_halves(kernel, half):
    """Of a word only 8 bytes have come: it is not there yet."""
    for box in range(2):
        mail = np.full(16, NOT_YET)
        mail[4 * box + 2 * half : 4 * box + 2 * half + 2] = 3
        try:
            args = np.ones(4, np.float32), mail, np.full(16, NOT_YET), np.array([2 + box], np.uint32), np.int32(1)
            kernel(1, 1, *args, step_limit=STEPS)
        except simt.SimtError:
            continue
        which = "first" if half == 0 else "last"
        raise Wrong(
            f"right here, but it takes a word of which only the {which} 8 bytes have come: no more than 8 are sure to "
            "arrive together"
        )


def _has_put_all_back(kernel, half):
    """A word is taken; of the next one in its place only 8 bytes have come, and the others say what was put back."""
    for box in range(2):
        mail, x, peers = np.full(16, NOT_YET), np.ones(4, np.float32), np.full(16, NOT_YET)
        try:
            for exchange, come in ((2, slice(0, 4)), (4, slice(2 * half, 2 * half + 2))):
                mail[4 * box : 4 * box + 4][come] = 3
                kernel(1, 1, x, mail, peers, np.array([exchange + box], np.uint32), np.int32(1), step_limit=STEPS)
        except simt.SimtError:
            continue
        which, other = ("first", "last") if half == 0 else ("last", "first")
        raise Wrong(
            f"right here, but where only the {which} 8 bytes of a word have come, it takes the {other} 8 of the word "
            "that was there two exchanges before: not all of that was put back"
        )


# Exercise 5: a mailbox for each site


def exercise_5(source):
    """CUDA source of add_sums."""
    exercise = Exercise("Exercise 5: a mailbox for each site")
    rng = np.random.default_rng(19)
    with exercise, time_limit(60):
        kernel = compiled(source, "add_sums", behind=HELPERS)
        for turns, *shape in by_turns((3, 1, 2, 32), (2, 64, 3, 32), (4, 70, 2, 32)):
            _sites(kernel, rng, *shape, turns)
        for turns in np.random.default_rng().integers(100, 1000, 2):
            _sites(kernel, np.random.default_rng(), 3, 33, 3, 64, int(turns))
        _waits_for_each_number(kernel)
    return exercise.report("right for every site and token, whoever is ahead; 8 bytes over the link for each number")


def _sites(kernel, rng, sites, n, tokens, block, turns):
    at = f"{counted(tokens, 'token')} of {sites} sites, {counted(n, 'number')} each, {turn_text(turns)}"
    xs = [[whole_numbers(rng, n) for _ in (0, 1)] for _ in range(tokens * sites)]
    wanted, given = [a + b for a, b in xs], [[x.copy() for x in pair] for pair in xs]
    boxes, token = [np.zeros(sites * n, np.uint64) for _ in (0, 1)], [np.ones(1, np.uint32) for _ in (0, 1)]
    launches, grid = [[], []], -(-n // block)
    for r in (0, 1):
        for e, x in enumerate(xs):
            args = x[r], token[r], boxes[r], boxes[1 - r], np.int32(e % sites), np.int32(n)
            launches[r].append((kernel, grid, block, args))
            if e % sites == sites - 1:
                launches[r].append((kernel.module["check_count"], 1, 1, (token[r],)))
    owned = [[boxes[r], token[r], *(x[r] for x in xs)] for r in (0, 1)]
    reports = run_together(launches, owned, turns, at)
    for e, (pair, was, sums) in enumerate(zip(xs, given, wanted)):
        for device, x in enumerate(pair):
            name = f"x of device {device} at token {e // sites + 1}, site {e % sites}"
            if np.array_equal(x, was[device]) and not np.array_equal(x, sums):
                raise Wrong(f"wrong at {at}: {name} is what it was before: nothing was added")
            compare(name, x, sums, at)
    each = [report for stream in reports for report in stream if report.kernel == "add_sums"]
    most = sectors(8 * n)
    written, loaded = (max(found) for found in zip(*map(over_link, each)))
    if (written > most and n % 4 == 0) or loaded:  # else a mailbox begins within a sector
        raise Wrong(
            f"right, but at {at} an exchange writes {written:,} bytes to the other device's memory and loads "
            f"{loaded:,} from it; wanted: at most {most:,} and 0. Each number goes with its flag in one store of 8 "
            "bytes, and who waits looks at his own memory"
        )


def _waits_for_each_number(kernel):
    """A mailbox that is full but for one number, and then one that is full."""
    n, token, full = 32, np.ones(1, np.uint32), np.zeros(32, np.uint64)

    def run(box, their_box):
        x = np.ones(n, np.float32)
        kernel(1, n, x, token, box, their_box, np.int32(0), np.int32(n), step_limit=STEPS)

    run(full, full)  # its own words, since it is its own peer here
    _expect_only_sums(full.all(), token)
    for missing in (0, 13, n - 1):
        box = full.copy()
        box[missing] = 0
        try:
            run(box, np.zeros(n, np.uint64))
        except simt.SimtError:
            continue
        raise Wrong(
            f"right here, but of a mailbox of {n} numbers it takes number {missing} before it has come: each thread "
            "waits for its own"
        )
    box = full.copy()
    run(box, np.zeros(n, np.uint64))
    _expect_only_sums(np.array_equal(box, full), token)


def _expect_only_sums(box_as_it_was, token):
    if not box_as_it_was or token[0] != 1:
        name = "its own mailbox" if not box_as_it_was else "token"
        raise Wrong(f"right, but it writes {name}; wanted: nothing is written but x and the peer's mailbox")
