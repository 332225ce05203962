"""How few_rows.cu and many_rows.cu are launched: who takes which part of the matrix, and of a block's shared memory.

A unit is 16 rows × 128 columns. The columns go to the warps of a team, in slices of whole units, and where a block
cannot hold all of x, to several blocks (splits), whose sums merge.cu adds up. The rows go to blocks and teams. What a
slice of x leaves of the shared memory is for the warps' sums, and for rings of weights.
"""

import functools
from functools import cached_property

FEW = 4  # rows of x up to which they become digits
WARPS = 16  # of a block, at most
WIDE_WARPS = 8  # where warps have several units of narrow codes and of 16 rows of x: half the sums, and more registers
X_REGISTERS = 64  # of a lane, that x may take
X_SHARE = 0.6  # of the shared memory that x may take
SUMS_ROOM = {False: 20 * 1024, True: 64 * 1024}  # and the warps' sums, about, of few and of many rows of x
MANY_TILES = 4  # of a team between two barriers, about, for many rows; 1 of splits whose warps have a unit each
STAGE_UNITS = {8: 1, 4: 4, 2: 8}  # units that a warp asks for together, at most
LEAST_SPLITS = 4  # where one block cannot hold x: merging costs as much for two, and each of four has less of x
MUCH_X = 112  # units of x, all rows together: digits of more are made first, where a team has few tiles,
FEW_TILES = 3  # no more than these; else weights are asked for before
SOME_TILES = 8  # of a team: up to so many, a plain launch at 8 bits asks for weights before sixteen rows of x
PLAIN_STAGES = 3  # of the ring of few rows in a plain launch; under PDL it is as deep as there is room
MOST_STAGES = 24
MERGE_ROOM = 1024  # bytes that a block of merge takes beside one of ours


@functools.lru_cache(maxsize=1024)
def plan(rows, cols, m, bits, group, scale_size, multiprocessors, card_room, aligned=True, pdl=False, **chosen):
    """How the product of m rows of x with a (rows, cols) matrix is launched: a Plan.

    group            columns that share a scale; 0: all of a row
    scale_size       bytes of a scale
    multiprocessors  of the card
    card_room        bytes of shared memory that a block may have
    aligned          x may be read in words of 16 bytes
    pdl              launched as a dependent: weights are asked for before x is there
    chosen           properties of Plan that are to be something else
    """
    problem = dict(rows=rows, cols=cols, m=m, bits=bits, group=group, scale_size=scale_size, aligned=aligned, pdl=pdl)
    problem |= {"multiprocessors": multiprocessors, "card_room": card_room}
    for candidate in candidates(problem, chosen):
        if candidate.stages:
            return candidate
    raise ValueError(f"gemv: m = {m} needs more shared memory for a block than this card's {card_room} bytes")


def candidates(problem, chosen):
    """Plans for ever smaller cards: with half the teams, down to one, and then with the columns split further."""
    while True:
        candidate = Plan(**problem | chosen)
        yield candidate
        if candidate.teams > 1:
            chosen = chosen | {"teams": candidate.teams // 2}
        elif candidate.block_units > 1:
            chosen = chosen | {"splits": candidate.splits + 1}
        else:
            return


class Plan:
    """A launch, size by size. A size that is given stands in its property's place."""

    def __init__(self, **given):
        self.__dict__.update(given)  # where cached_property looks first

    # x

    @cached_property
    def many(self):
        """Whether x stays as it is: many_rows.cu."""
        return self.m > FEW

    @cached_property
    def x_rows(self):
        """A power of two."""
        return 1 << (self.m - 1).bit_length()

    @cached_property
    def columns(self):
        """Of the operand that x makes: a row of x is one, or four of digits."""
        return self.x_rows if self.many else 4 * self.x_rows

    @cached_property
    def eights(self):
        return -(-self.columns // 8)

    @cached_property
    def unit_x_bytes(self):
        """Of digits of a unit, in shared memory."""
        return 0 if self.many else 128 * self.eights * min(8, self.columns)

    @cached_property
    def unit_x_registers(self):
        return (16 if self.many else 8) * self.eights

    @cached_property
    def x_in_registers(self):
        return self.unit_x_registers * self.units <= X_REGISTERS

    # Who has which columns

    @cached_property
    def splits(self):
        most = int(X_SHARE * self.card_room) // (self.unit_x_bytes or 1)
        if self.many or self.bits == 8:  # and that all of it fits the registers, where a merge costs less than that
            most = min(most, WARPS * (X_REGISTERS // self.unit_x_registers))
        splits = -(-self.cols // (128 * most))
        return splits if splits == 1 else max(splits, min(LEAST_SPLITS, self.multiprocessors))

    @cached_property
    def block_units(self):
        return -(-self.cols // (128 * self.splits))

    @cached_property
    def most_warps(self):
        wide = self.many and self.bits < 8 and self.eights == 2 and self.splits > 1 and self.block_units > WARPS
        return WIDE_WARPS if wide else WARPS

    @cached_property
    def units(self):
        """Of a warp."""
        return -(-self.block_units // self.most_warps)

    @cached_property
    def warps_per_team(self):
        return -(-self.block_units // self.units)

    @cached_property
    def whole(self):
        """Whether every warp has so many columns."""
        return self.cols == 128 * self.warps_per_team * self.units * self.splits

    # Who has which rows

    @cached_property
    def teams(self):
        of_x = int(X_SHARE * self.room) // max(1, self.warps_per_team * self.units * self.unit_x_bytes)
        return max(1, min(self.most_warps // self.warps_per_team, of_x))

    @cached_property
    def warps(self):
        return self.warps_per_team * self.teams

    @cached_property
    def tiles(self):
        return -(-self.rows // 16)

    @cached_property
    def blocks(self):
        """Of the tiles; there are so many for each split."""
        return min(self.tiles, max(1, self.multiprocessors // self.splits))

    @cached_property
    def team_tiles(self):
        return -(-self.tiles // (self.blocks * self.teams))

    # The shared memory of a block

    @cached_property
    def room(self):
        return self.card_room - MERGE_ROOM * (self.splits > 1)

    @cached_property
    def groups(self):
        """Of a unit."""
        return 128 // self.group if self.group else 0

    @cached_property
    def x_bytes(self):
        """Of digits, and of what is made of x: sums over groups and slices, and units. (Many rows have no units; their
        room stays free.)"""
        group_sums = 32 * max(1, self.groups) if self.many else 16 * self.groups
        of_slice = self.units * (self.unit_x_bytes + self.eights * group_sums)
        return self.warps * (of_slice + 8 * max(2, self.x_rows))

    @cached_property
    def tile_sums(self):
        """Bytes of the warps' sums of a tile of each team (team_sums.cuh)."""
        wide = 16 * max(4, 1 << (self.warps_per_team - 1).bit_length())
        return 4 * self.teams * self.x_rows * (wide if self.many else 16 * (self.warps_per_team | 1) + 4)

    def sums(self, tiles):
        """Bytes of the warps' sums, if there are so many tiles in a phase: two sets, unless one is enough."""
        return self.tile_sums * tiles * (2 if self.team_tiles > tiles else 1)

    @cached_property
    def tiles_in_phase(self):
        most = (1 if self.splits > 1 and self.units == 1 else MANY_TILES) if self.many else self.team_tiles
        tiles = min(self.team_tiles, max(1, SUMS_ROOM[self.many] // self.tile_sums), most)
        if self.team_tiles <= 2 * tiles:  # all of them take no more room than two sets of half, and one barrier
            tiles = self.team_tiles
        room = self.room - self.x_bytes - 2 * self.unit_bytes * min(self.units, 3)  # two tiles of weights are under way
        while self.many and tiles > 1 and self.sums(tiles) > room:
            tiles -= 1
        return tiles

    @cached_property
    def fixed(self):
        """Bytes of all but the ring."""
        return self.x_bytes + self.sums(self.tiles_in_phase)

    # The ring

    @cached_property
    def unit_bytes(self):
        """Of a unit of each warp: codes, scales and zeros."""
        return self.warps * (256 * self.bits + 32 * self.groups * self.scale_size)

    @cached_property
    def stage_units(self):
        """Of a warp, asked for together: a tile's in equal stages."""
        x_registers = self.unit_x_registers * self.units * self.x_in_registers
        spills = x_registers > X_REGISTERS - 8 and (self.groups > 1 or not self.many)  # with longer stages
        fine = self.many and self.bits == 4 and self.eights == 2 and self.team_tiles <= 2  # little else is under way
        stages = self.units if spills or fine else -(-self.units // STAGE_UNITS[self.bits])
        units = -(-self.units // stages)
        while units > 1 and (self.room - self.fixed) // (self.unit_bytes * units) < 2:
            units -= 1
        return units

    @cached_property
    def stage_bytes(self):
        return self.unit_bytes * self.stage_units

    @cached_property
    def most_stages(self):
        return MOST_STAGES if self.pdl or self.many else PLAIN_STAGES

    @cached_property
    def stages(self):
        """0 where there is no room for one."""
        of_matrix = self.team_tiles * -(-self.units // self.stage_units)
        return max(0, min((self.room - self.fixed) // self.stage_bytes, of_matrix, MOST_STAGES, self.most_stages))

    @cached_property
    def stages_before_wait(self):
        """Asked for ahead of x, which then waits behind them."""
        if not self.pdl:
            early = self.many and self.bits == 8 and (self.eights == 1 or self.team_tiles <= SOME_TILES)
        elif self.many:
            early = 2 if self.bits == 8 and self.eights == 1 else 1
        else:
            early = self.x_rows * self.block_units <= MUCH_X or self.team_tiles > FEW_TILES
        return min(self.stages_beside_x, int(early))

    # x on its way into registers, over what comes later

    @cached_property
    def through_bytes(self):
        return 256 * 8 * self.eights * self.units * self.warps

    @cached_property
    def x_through_shared(self):
        return self.many and self.aligned and self.through_bytes <= self.room

    @cached_property
    def stages_beside_x(self):
        """Asked for before x is in registers."""
        beside = (self.shared - self.through_bytes) // self.stage_bytes
        return min(self.stages, beside) if self.x_through_shared else self.stages

    # What is compiled and launched

    @cached_property
    def shared(self):
        """Bytes of shared memory."""
        shared = self.fixed + self.stages * self.stage_bytes
        if self.x_through_shared:
            shared = max(shared, min(self.room, self.through_bytes + self.stages * self.stage_bytes))
        return shared

    @cached_property
    def grid(self):
        return self.blocks, self.splits

    @cached_property
    def block(self):
        return 32 * self.warps

    @cached_property
    def source(self):
        return "many_rows.cu" if self.many else "few_rows.cu"

    def options(self, x_type, scale_type):
        """What the source is compiled with, for these types of CUDA."""
        options = {
            "MATRIX": f"Matrix<{scale_type}, {self.bits}, {self.group}>",
            "INPUT": f"Input<{x_type}, {self.x_rows}, {str(self.aligned).lower()}>",
            "BLOCK": f"Block<{self.warps_per_team}, {self.teams}, {self.units}, {str(self.whole).lower()}>",
            "RING": f"Ring<{self.stage_units}, {self.stages}, {self.stages_before_wait}>",
            "TILES_IN_PHASE": self.tiles_in_phase,
            "Y": "float" if self.splits > 1 else x_type,
        }
        if self.many:
            options |= {"X_THROUGH_SHARED": str(self.x_through_shared).lower(), "STAGES_BESIDE_X": self.stages_beside_x}
        else:
            options["X_IN_REGISTERS"] = str(self.x_in_registers).lower()
        return tuple(f"-D{name}={value}" for name, value in options.items())
