"""How each exchange is launched: on how many blocks, with which memory."""

from kernels.collective.arguments import in_words
from kernels.collective.group import module

WORDS, WORD = 512, 16  # words of a box (mail.cuh), bytes of a word
NOT_YET = {4: -(1 << 31), 2: -(1 << 31) + (1 << 15)}  # sentinel.cuh's, as int32, by the bytes of a number
FLAG, SITES = 8, 2  # barrier.cuh: numbers of 4 bytes a flag, barriers
THREADS, FEW_BLOCKS, MANY_BLOCKS, SHORT = (
    512,
    16,
    128,
    256 << 10,
)  # of what reads peers' memory; a short message's bytes


def copies(tensors, pdl):
    """Each device gets the others' tensors behind one another, and adds."""
    boxes = [x.new_empty((len(tensors), x.numel())) for x in tensors]
    for rank, box in enumerate(boxes):
        for other, x in enumerate(tensors):
            if other != rank:
                box[other].copy_(x.reshape(-1), non_blocking=True)
    kernel = module("add", tensors[0].dtype, len(tensors), 1).add
    for rank, (x, box) in enumerate(zip(tensors, boxes)):
        kernel(max(1, min(264, -(-x.numel() // 512))), 512, x, box, rank, x.numel())


def words_of(x):
    return -(-x.nbytes // WORD)


def most_bytes(group):
    """Of a message that is pushed into mailboxes."""
    return group.blocks * WORDS * WORD


def push_shape(name, words, blocks):
    """(blocks, threads): a word a thread; `ll` and `sentinel` may have several."""
    threads = next((t for t in (128, 256) if words <= blocks // 4 * t), WORDS)
    return min(-(-words // threads), blocks), threads


def push(name, group, tensors, pdl):
    """ll, sentinel, direct: into the peers' mailboxes."""
    x = tensors[0]
    if x.nbytes > most_bytes(group):
        raise ValueError(
            f"{name}: tensors must have at most {most_bytes(group)} bytes each, what a mailbox holds, got {x.nbytes}; "
            f"two_shot takes any"
        )
    kernel = module(name, x.dtype, len(group), group.blocks)[name]
    box, fill = (2 * WORDS, 0) if name == "ll" else (WORDS, NOT_YET[x.element_size()])
    numbers = 2 * len(group) * group.blocks * box * WORD // 4
    mail = group.mail((name, fill), numbers, group.blocks, fill)
    grid, threads = push_shape(name, words_of(x), group.blocks)
    wide = int(in_words(tensors))
    launches = [
        (kernel, grid, threads,
         (x, mail.boxes[r], mail.peers, mail.numbers[r], group.told_args[r], r, group.limit, x.numel(), wide))
        for r, x in zip(group.ranks, tensors)
    ]  # fmt: skip
    group.launch(name, launches, pdl)


def barrier_shape(group, x):
    """(blocks, threads) of a kernel with barriers: always the same blocks for a kind of message, since each counts."""
    if not group.devices.on_cards:
        return 3, 64
    return (FEW_BLOCKS if x.nbytes <= SHORT else MANY_BLOCKS), THREADS


def flags_of(group, name, grid):
    """The Mail with the flags of a kernel's barriers."""
    return group.mail((name, "flags", grid), SITES * len(group) * grid * FLAG, grid)


def pull(name, group, tensors, pdl, buffers):
    """Between barriers, out of buffers that the peers read."""
    x = tensors[0]
    grid, threads = barrier_shape(group, x)
    kernel = module(name, x.dtype, len(group), group.blocks)[name]
    flags = flags_of(group, name, grid)
    room = max(1 << 16 if group.devices.on_cards else 1, 1 << (words_of(x) - 1).bit_length())  # words of a buffer
    buffer = group.mail((name, grid), buffers * room * WORD // 4, 1)
    room = buffer.boxes[group.ranks[0]].numel() * 4 // WORD // buffers
    wide, more = int(in_words(tensors)), (room,) if buffers == 2 else ()
    launches = [
        (kernel, grid, threads,
         (x, buffer.boxes[r], buffer.peers, flags.boxes[r], flags.peers, flags.numbers[r], group.told_args[r], r,
          group.limit, x.numel(), wide, *more))
        for r, x in zip(group.ranks, tensors)
    ]  # fmt: skip
    group.launch(name, launches, pdl)


def two_shot(group, tensors, pdl):
    x, given = tensors[0], tensors
    tensors, xs = group.reachable(tensors)
    grid, threads = barrier_shape(group, x)
    kernel = module("two_shot", x.dtype, len(group), group.blocks)["two_shot"]
    flags, wide = flags_of(group, "two_shot", grid), int(in_words(tensors))
    launches = [
        (kernel, grid, threads,
         (x, xs, flags.boxes[r], flags.peers, flags.numbers[r], group.told_args[r], r, group.limit, x.numel(), wide))
        for r, x in zip(group.ranks, tensors)
    ]  # fmt: skip
    group.launch("two_shot", launches, pdl, owned=[[x] for x in tensors])
    for x, reached in zip(given, tensors):
        if reached is not x:
            x.copy_(reached.view_as(x))
