"""How gemv.cu is launched: who takes which part of the matrix, and how the shared memory is shared out.

A unit is 16 rows × 128 columns. The columns go to the warps of a team, in slices of whole units, and where a block
cannot hold all of x, to several blocks (splits), whose sums a second kernel adds up. The rows go to blocks and teams.
"""

import functools
from typing import NamedTuple

WARPS = 16  # of a block
HOLD = 64  # registers of a lane that x may take
X_SHARE = 0.6  # of the shared memory that x may take
SUMS_ROOM = {False: 20 * 1024, True: 64 * 1024}  # and the warps' sums, about, of digits and of more rows of x
MOST_DIGITS = 4  # rows of x up to which they become digits
IN_PHASE = 4  # tiles of a team between two barriers, about, for more rows of x
IN_STAGE = {8: 1, 4: 4, 2: 8}  # units that a warp asks for together, at most
LEAST_SPLITS = 4  # where one block cannot hold x: merging costs as much for two, and each of four has less of x
MUCH_X = 112  # units of x, all rows together: digits of more are made first, where a team has few tiles,
FEW_TILES = 2  # no more than these; else weights are asked for before
PLAIN_DEPTH = 3  # stages of the ring in a plain launch; under PDL it is as deep as there is room


class Plan(NamedTuple):
    """A launch: `grid` and `block`, bytes of shared memory, splits, and the constants of gemv.cu."""

    grid: tuple
    block: int
    shared: int
    splits: int
    constants: tuple  # of (name, value)


@functools.lru_cache(maxsize=1024)
def plan(rows, cols, m, bits, group, scale_size, multiprocessors, room, aligned=True, pdl=False, **chosen):
    """How the product of m rows of x with a (rows, cols) matrix is launched.

    group            columns that share a scale; 0: all of a row
    scale_size       bytes of a scale
    multiprocessors  of the card
    room             bytes of shared memory that a block may have
    aligned          x may be read in words of 16 bytes
    pdl              launched as a dependent: weights are asked for before x is there
    chosen           SPLITS, UNITS, STAGE, DEPTH, EARLY, COPIED, TILES, TEAMS or (of digits) HOLD, to try something
                     else
    """
    tiles, units = -(-rows // 16), -(-cols // 128)
    whole_room = room
    height = 1 << (m - 1).bit_length()  # M
    floats = m > MOST_DIGITS
    columns = height if floats else 4 * height
    eights = -(-columns // 8)
    x_bytes = 0 if floats else 128 * eights * min(8, columns)  # of a unit; FLOATS keeps it in registers
    x_registers = (16 if floats else 8) * eights  # of a lane, for a unit
    most_units = WARPS * (HOLD // x_registers) if floats else int(X_SHARE * room) // x_bytes  # of a block
    splits = -(-units // most_units)
    splits = chosen.get("SPLITS", splits if splits == 1 else max(splits, min(LEAST_SPLITS, multiprocessors)))
    each = -(-units // splits)  # units of a block
    mine = chosen.get("UNITS", -(-each // WARPS))
    wk = -(-each // mine)
    hold = chosen.get("HOLD", int(x_registers * mine <= HOLD))
    room -= 1024 * (splits > 1)  # which a block of merge takes
    teams = chosen.get("TEAMS", max(1, min(WARPS // wk, int(X_SHARE * room) // max(1, wk * mine * x_bytes))))
    groups = 128 // group if group else 0
    tight = x_registers * mine * hold > HOLD - 8 and (groups > 1 or not floats)  # registers spill with longer stages
    stages = mine if tight else -(-mine // IN_STAGE[bits])  # of a tile
    stage = chosen.get("STAGE", -(-mine // stages))
    blocks = min(tiles, max(1, multiprocessors // splits))
    most = -(-tiles // (blocks * teams))  # tiles of a team
    tile_sums = 4 * teams * height * (16 * max(4, 1 << (wk - 1).bit_length()) if floats else 16 * (wk | 1) + 4)
    unit = wk * teams * (256 * bits + 32 * groups * scale_size)
    fixed = wk * teams * (mine * x_bytes + 8 * max(2, height))
    fixed += wk * teams * mine * eights * (32 * max(1, groups) if floats else 16 * groups)
    at_once = min(most, max(1, SUMS_ROOM[floats] // tile_sums), IN_PHASE if floats else most)
    if most <= 2 * at_once:  # all tiles' sums take no more room than two sets of half of them, and one barrier
        at_once = most
    at_once = chosen.get("TILES", at_once)
    while (sums := tile_sums * at_once * (2 if most > at_once else 1)) > room - fixed - 2 * unit * mine:
        if at_once == 1 or "TILES" in chosen or not floats:
            break
        at_once -= 1  # so that two tiles of weights are under way
    fixed += sums
    while stage > 1 and (room - fixed) // (unit * stage) < 2 and "STAGE" not in chosen:
        stage -= 1
    slot = unit * stage
    depth = min((room - fixed) // slot, most * -(-mine // stage), 24)
    depth = min(depth, chosen.get("DEPTH", depth if pdl or floats else PLAIN_DEPTH))
    if depth < 1:  # a small card
        if teams == each == 1:
            raise ValueError(f"gemv: m = {m} needs more shared memory for a block than this card's {room} bytes")
        chosen |= {"TEAMS": teams // 2} if teams > 1 else {"SPLITS": splits + 1}
        return plan(rows, cols, m, bits, group, scale_size, multiprocessors, whole_room, aligned, pdl, **chosen)
    through = 256 * 8 * eights * mine * wk * teams  # bytes of x on their way into registers, over what comes later
    copied = chosen.get("COPIED", int(floats and aligned and through <= room))
    shared = fixed + depth * slot
    if copied:
        shared = max(shared, min(room, through + depth * slot))
    free = min(depth, (shared - through) // slot) if copied else depth  # stages asked for before x is in registers
    ahead = pdl and (floats or height * each <= MUCH_X or most > FEW_TILES)
    early = min(free, chosen.get("EARLY", int(ahead)))  # stages asked for ahead of x, which then waits behind them
    whole = cols == 128 * wk * mine * splits
    constants = {
        "BITS": bits,
        "GROUP": group,
        "M": height,
        "FLOATS": floats,
        "WK": wk,
        "TEAMS": teams,
        "UNITS": mine,
        "STAGE": stage,
        "DEPTH": depth,
        "EARLY": early,
        "COPIED": copied,
        "FREE": free,
        "TILES": at_once,
        "HOLD": hold,
        "WHOLE": whole,
        "ALIGNED": aligned,
        "SPLIT": splits * (splits > 1),
    }
    constants = tuple((name, int(value)) for name, value in constants.items())
    return Plan((blocks, splits), 32 * wk * teams, shared, splits, constants)
