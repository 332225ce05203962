"""The course's pictures: one style, units on every axis, colours that a colour-blind reader can tell apart.

    style       colours, figures                    launches    what shares one, gaps, waves of blocks
    charts      curves, stacked bars, groups        memory      addresses, cache lines, loads on their way
    ladders     rungs and roofs                     numbers     formats, codes in words, shared scales
    warps       shuffles, lanes, instructions       attention   tokens, splits, the online softmax
    packing     panels, and their caches            chunks      the matrix of SSD and its blocks
    schedules   blocks and warps over time          order       from one block's stores to another's loads
    matmul      tiles, banks, phases, roles         fused       decays, roles, the walk of shares
    llm         a token's way, positions, dependent launches, the law of a step
    mamba2      its block, a convolution's window, lists of layers, costs over the context
    serving     padding, pages, who reads how long, a server's requests over time
    paging      what waits for a page's number, two warpgroups over time
    latent      absorption, a tile that is keys and values, turns, where sums lie
    link        a layer over two cards, ways to tell a peer, steps of an exchange
    slim        device code in libraries: shares, places in a file, copies without some of it

Every picture is a function of this package, whatever file draws it: `plots.waves(...)`.
"""

from lab.plots.attention import cache_reads, merge_tree, online_softmax, operand_layout, slices_meet, token_shares
from lab.plots.charts import curves, error_dots, grouped_bars, panels, stacked, stacked_rows
from lab.plots.chunks import DENSE, GONE, STATES, chunk_blocks, chunk_matrix, chunk_steps, token_matrices
from lab.plots.fused import block_decays, role_picture, share_walk
from lab.plots.ladders import bars, roof_over_context, roofline
from lab.plots.latent import latent_forms, latent_tile, latent_turns, sums_at_home
from lab.plots.launches import fused_operations, launch_timeline, waves
from lab.plots.link import exchange_steps, handovers, split_layer
from lab.plots.llm import (
    candidates,
    dependent_launches,
    dependent_runs,
    law,
    model_step,
    rates,
    rope_hands,
    task_line,
    task_schedule,
)
from lab.plots.mamba2 import conv_window, layer_kinds, mamba2_block, memory_of_heads, over_context
from lab.plots.matmul import column_banks, ring_phases, role_timeline, tile_levels, tile_raster
from lab.plots.memory import bytes_in_flight, loads_in_flight, register_block, walk, warp_addresses
from lab.plots.numbers import bit_fields, code_layout, code_values, shared_scales
from lab.plots.order import PIECES, handover, old_and_new, sees_new, two_passes
from lab.plots.packing import cache_blocks, packing_order
from lab.plots.paging import append_timeline, table_walk
from lab.plots.schedules import decode_schedule, decode_timeline, row_stream, tile_shares
from lab.plots.serving import block_loads, lateness, over_rates, padding, page_table, server_over_time
from lab.plots.slim import container_layout, device_code, thin_copies
from lab.plots.style import BLACK, BLUE, COLOURS, GREEN, ORANGE, PURPLE, RED, SKY, figure, finish, rectangle
from lab.plots.warps import INSTRUCTIONS, block_transpose, instruction_order, mma_diagonals, shuffle_reduction

__all__ = [
    "BLACK",
    "BLUE",
    "COLOURS",
    "DENSE",
    "GONE",
    "GREEN",
    "INSTRUCTIONS",
    "ORANGE",
    "PIECES",
    "PURPLE",
    "RED",
    "SKY",
    "STATES",
    "append_timeline",
    "bars",
    "bit_fields",
    "block_decays",
    "block_loads",
    "block_transpose",
    "bytes_in_flight",
    "cache_blocks",
    "cache_reads",
    "candidates",
    "chunk_blocks",
    "chunk_matrix",
    "chunk_steps",
    "code_layout",
    "code_values",
    "column_banks",
    "container_layout",
    "conv_window",
    "curves",
    "decode_schedule",
    "decode_timeline",
    "dependent_launches",
    "dependent_runs",
    "device_code",
    "error_dots",
    "exchange_steps",
    "figure",
    "finish",
    "fused_operations",
    "grouped_bars",
    "handover",
    "handovers",
    "instruction_order",
    "lateness",
    "latent_forms",
    "latent_tile",
    "latent_turns",
    "launch_timeline",
    "law",
    "layer_kinds",
    "loads_in_flight",
    "mamba2_block",
    "memory_of_heads",
    "merge_tree",
    "mma_diagonals",
    "model_step",
    "old_and_new",
    "online_softmax",
    "operand_layout",
    "over_context",
    "over_rates",
    "packing_order",
    "padding",
    "page_table",
    "panels",
    "rates",
    "rectangle",
    "register_block",
    "ring_phases",
    "role_picture",
    "role_timeline",
    "roof_over_context",
    "roofline",
    "rope_hands",
    "row_stream",
    "sees_new",
    "server_over_time",
    "share_walk",
    "shared_scales",
    "shuffle_reduction",
    "slices_meet",
    "split_layer",
    "stacked",
    "stacked_rows",
    "table_walk",
    "task_line",
    "task_schedule",
    "thin_copies",
    "tile_levels",
    "tile_raster",
    "tile_shares",
    "sums_at_home",
    "token_matrices",
    "token_shares",
    "two_passes",
    "walk",
    "warp_addresses",
    "waves",
]
