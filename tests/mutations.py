"""Planted mistakes, each of which a test on a CPU must see: python -m tests.mutations, or make mutations.

Each mutation is one change of one file, and the tests that must fail with it. A copy of the checkout is made; the tests
pass there first, and then must fail with each change in turn, which is taken back. Nothing here is changed.

    python -m tests.mutations            all of them, some minutes
    python -m tests.mutations PDL ring   those with one of these words in their names or files
    python -m tests.mutations --list     their names

It ends with 1 if a mutation goes unseen, if its text is no longer to be found, or if its tests fail without it. Bugs
that a test has once missed belong in this list; tests/test_mutations.py sees that each still has its place.
"""

import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
LEFT_OUT = shutil.ignore_patterns(
    ".git", ".venv*", ".build", "build", "dist", "*.egg-info", "__pycache__", ".*_cache", ".hypothesis",
    ".ipynb_checkpoints",
)  # fmt: skip
PATIENCE = 600  # seconds for the tests of one mutation
READ_X = "if constexpr (!X_FIRST) load_x(x_words, x_from, left, threads);"
AN_ELEMENT = "    int i = blockIdx.x * blockDim.x + threadIdx.x;\n    if (i < n) out[i] = "


@dataclass(frozen=True)
class Mutation:
    """`old`, which stands once in the file, becomes `new`; `tests` are what pytest is given, and must fail then."""

    name: str
    file: str
    old: str
    tests: str
    new: str = ""


MUTATIONS = [
    # Programmatic dependent launch: a wait that is missing, or comes late.
    Mutation(
        "PDL: gemv does not wait",
        "kernels/gemv/gemv.cu",
        "        wait_for_previous_kernel();\n",
        "tests/test_gemv.py -k test_pdl_gives_the_same",
    ),
    Mutation(
        "PDL: gemv reads x before it waits",
        "kernels/gemv/gemv.cu",
        f"        wait_for_previous_kernel();\n        {READ_X}\n",
        "tests/test_gemv.py -k test_pdl_gives_the_same",
        f"        {READ_X}\n        wait_for_previous_kernel();\n",
    ),
    Mutation(
        "PDL: the ring does not wait",
        "kernels/gemv/ring.cu",
        "    wait_for_previous_kernel();\n",
        "tests/test_gemv.py -k 'test_the_ring_is_right and 529'",
    ),
    Mutation(
        "PDL: gemv of unaligned rows does not wait",
        "kernels/gemv/unaligned.cu",
        "        wait_for_previous_kernel();\n",
        "tests/test_gemv_unaligned.py -k test_pdl_gives_the_same",
    ),
    Mutation(
        "PDL: the ring of unaligned rows does not wait",
        "kernels/gemv/unaligned_ring.cu",
        "    wait_for_previous_kernel();\n",
        "tests/test_gemv_unaligned.py -k 'test_the_ring_is_right and 9119'",
    ),
    Mutation(
        "PDL: rmsnorm does not wait",
        "kernels/fusion/rmsnorm.cu",
        "    wait_for_previous_kernel();\n",
        "tests/test_fusion.py -k test_the_pieces",
    ),
    Mutation(
        "PDL: add does not wait",
        "kernels/fusion/elementwise.cu",
        f"    wait_for_previous_kernel();\n{AN_ELEMENT}(T)((float)a[i]",
        "tests/test_fusion.py -k test_the_pieces",
        f"{AN_ELEMENT}(T)((float)a[i]",
    ),
    Mutation(
        "PDL: silu_mul does not wait",
        "kernels/fusion/elementwise.cu",
        f"    wait_for_previous_kernel();\n{AN_ELEMENT}(T)(silu(",
        "tests/test_fusion.py -k test_the_pieces",
        f"{AN_ELEMENT}(T)(silu(",
    ),
    Mutation(
        "PDL: gemv_residual does not wait",
        "kernels/fusion/gemv_residual.cu",
        "    wait_for_previous_kernel(); // 2\n",
        "tests/test_fusion.py -k test_gemv_residual",
    ),
    Mutation(
        "PDL: gemv_residual_any does not wait",
        "kernels/fusion/gemv_residual.cu",
        "    wait_for_previous_kernel();\n",
        "tests/test_fusion.py -k test_gemv_residual",
    ),
    Mutation(
        "PDL: norm_qkv does not wait",
        "kernels/fusion/norm_qkv.cu",
        "    wait_for_previous_kernel();   // 2\n",
        "tests/test_fusion.py -k test_norm_qkv",
    ),
    Mutation(
        "PDL: norm_qkv_any does not wait",
        "kernels/fusion/norm_qkv.cu",
        "    wait_for_previous_kernel();\n",
        "tests/test_fusion.py -k test_norm_qkv",
    ),
    Mutation(
        "PDL: norm_glu does not wait",
        "kernels/fusion/norm_glu.cu",
        "    wait_for_previous_kernel();   // 2\n",
        "tests/test_fusion.py -k test_norm_glu",
    ),
    Mutation(
        "PDL: norm_glu_any does not wait",
        "kernels/fusion/norm_glu.cu",
        "    wait_for_previous_kernel();\n",
        "tests/test_fusion.py -k test_norm_glu",
    ),
    Mutation(
        "PDL: norm_glu reads x before it waits",
        "kernels/fusion/norm_glu.cu",
        "    wait_for_previous_kernel();   // 2\n    x_part.load(x, cols, thread); // 3\n",
        "tests/test_fusion.py -k test_norm_glu",
        "    x_part.load(x, cols, thread);\n    wait_for_previous_kernel();\n",
    ),
    Mutation(
        "PDL: the layer in one launch does not wait",
        "kernels/fusion/layer.cu",
        "    wait_for_previous_kernel();\n",
        "tests/test_fusion.py -k 'test_the_layer_in_all_its_steps and 64-16'",
    ),
    Mutation(
        "PDL: lowbit does not wait",
        "kernels/lowbit/many_rows.cu",
        "    // 2. wait for the kernel ahead\n    wait_for_previous_kernel();\n",
        "tests/test_lowbit.py -k 'test_right_on_hostile_shapes and 13-2080'",
    ),
    Mutation(
        "PDL: lowbit does not wait, with few rows of x",
        "kernels/lowbit/few_rows.cu",
        "    // 2. wait for the kernel ahead\n    wait_for_previous_kernel();\n",
        "tests/test_lowbit.py -k 'test_right_on_hostile_shapes and 7-4224'",
    ),
    Mutation(
        "PDL: lowbit's merge does not wait",
        "kernels/lowbit/merge.cu",
        "    wait_for_previous_kernel();\n",
        "tests/test_lowbit.py -k test_sums_of_splits_of_any_number_go_anywhere",
    ),
    Mutation(
        "PDL: attention does not wait for q",
        "kernels/attention/decode.cu",
        "    wait_for_previous_kernel(); // once more is over at once\n",
        "tests/test_attention_decode.py -k test_the_same_bits_again_and_with_pdl",
    ),
    Mutation(
        "PDL: attention reads the newest token early",
        "kernels/attention/decode.cu",
        "        if (prefetcher.at_newest_token()) wait_for_previous_kernel();\n",
        "tests/test_attention_decode.py -k test_the_same_bits_again_and_with_pdl",
    ),
    Mutation(
        "PDL: attention's blocks without work do not wait",
        "kernels/attention/decode.cu",
        "        wait_for_previous_kernel(); // who waits for this kernel takes the one before as done, too\n",
        "tests/test_attention_decode.py -k test_blocks_without_work_wait_too",
    ),
    Mutation(
        "PDL: attention's merge does not wait",
        "kernels/attention/merge.cu",
        "    wait_for_previous_kernel();\n",
        "tests/test_attention_decode.py -k test_the_same_bits_again_and_with_pdl",
    ),
    Mutation(
        "PDL: kv_cache does not wait for q",
        "kernels/kv_cache/decode.cu",
        "    wait_for_previous_kernel(); // once more is over at once\n",
        "tests/test_kv_cache.py -k test_lengths_of_their_own",
    ),
    Mutation(
        "PDL: kv_cache reads the newest group early",
        "kernels/kv_cache/decode.cu",
        "        if (prefetcher.at_newest_group()) wait_for_previous_kernel();\n",
        "tests/test_kv_cache.py -k test_lengths_of_their_own",
    ),
    Mutation(
        "PDL: kv_cache takes a tile for the newest group",
        "kernels/kv_cache/cache.cuh",
        "newest / TOKENS_STILL_CHANGING * TOKENS_STILL_CHANGING",
        "tests/test_kv_cache.py -k 'test_right_on_hostile_shapes and 8-channel-None-torch.float16'",
        "newest / TILE * TILE",
    ),
    Mutation(
        "PDL: kv_cache's blocks without work do not wait",
        "kernels/kv_cache/decode.cu",
        "        wait_for_previous_kernel(); // who waits for this kernel takes the one before as done, too\n",
        "tests/test_kv_cache.py -k test_blocks_without_work_wait_too",
    ),
    # Rings: who still reads a slot when it is filled again, and who has copied it.
    Mutation(
        "ring: fusion counts only groups that there are",
        "kernels/fusion/stream.cuh",
        "        }\n        ring.filled(); // with nothing, too",
        "tests/test_fusion.py -k test_more_rows_than_one_round",
        "            ring.filled();\n        }",
    ),
    Mutation(
        "ring: fusion fills the slot that is read next",
        "kernels/fusion/stream.cuh",
        "            prefetch(ring.slot);\n            ring.advance();",
        "tests/test_fusion.py -k test_more_rows_than_one_round",
        "            ring.advance();\n            prefetch(ring.slot);",
    ),
    Mutation(
        "ring: attention fills a slot that lanes still read",
        "kernels/attention/decode.cu",
        "lane);\n            sync_team(team);\n\n            // 6.",
        "tests/test_attention_decode.py -k 'test_no_race and stages'",
        "lane);\n\n            // 6.",
    ),
    Mutation(
        "ring: kv_cache fills a slot that lanes still read",
        "kernels/kv_cache/decode.cu",
        "v_scales), lane);\n    __syncwarp();\n}",
        "tests/test_kv_cache.py -k test_a_short_ring_has_no_race",
        "v_scales), lane);\n}",
    ),
    Mutation(
        "ring: lowbit fills a slot that lanes still read",
        "kernels/lowbit/unit.cuh",
        "        __syncwarp();\n        prefetch(lane_slot",
        "tests/test_lowbit.py -k 'test_the_ring_goes_round and 14336'",
        "        prefetch(lane_slot",
    ),
    Mutation(
        "ring: lowbit reads what other lanes still copy",
        "kernels/lowbit/unit.cuh",
        "        ring.wait_full();\n        __syncwarp();\n",
        "tests/test_lowbit.py -k 'test_the_ring_goes_round and 14336'",
        "        ring.wait_full();\n",
    ),
    Mutation(
        "ring: lowbit's digits are overwritten while lanes still read them",
        "kernels/lowbit/digits.cu",
        "        __syncwarp();\n#pragma unroll\n        for (int k = 0; k < DIGITS; k++)\n",
        "tests/test_lowbit_rungs.py -k test_digits_on_its_shapes",
        "#pragma unroll\n        for (int k = 0; k < DIGITS; k++)\n",
    ),
    # A kernel of several phases.
    Mutation(
        "phases: sums are read without a barrier",
        "kernels/fusion/stream.cuh",
        "        __syncthreads();\n",
        "tests/test_fusion.py -k test_no_kernel_races",
    ),
    Mutation(
        "phases: h is read without a barrier of the grid",
        "kernels/fusion/layer.cu",
        "    weight.load(ffn_norm, hidden, thread);\n    grid_barrier(barrier);",
        "tests/test_fusion.py -k test_no_kernel_races",
        "    weight.load(ffn_norm, hidden, thread);",
    ),
    Mutation(
        "phases: every one begins with the same groups",
        "kernels/fusion/stream.cuh",
        "        group -= phase_groups; // now the block's first in the next phase",
        "tests/test_fusion.py -k test_the_layer_in_all_its_steps",
        "        group = blockIdx.x;",
    ),
    # Sums over many segments, and how far back one looks.
    Mutation(
        "merge: the sums of earlier segments keep their old maximum",
        "kernels/attention/merge.cu",
        ", total *= scale;",
        "tests/test_attention_decode.py -k test_scores_that_rise_fall_and_jump",
        ";",
    ),
    Mutation(
        "look-back: fused.cu stops where 2^-16 is left",
        "kernels/ssd/chain.cuh",
        "if (log < sizes.log2_negligible) return;",
        "tests/test_ssd_fused.py -k test_a_large_state_is_seen_through_two_pieces",
        "if (log < -16) return;",
    ),
    # Several sequences in a row: what goes from one to the next.
    Mutation(
        "sequences: scores between two of them stay",
        "kernels/ssd/scores.cuh",
        "if (S::SEQUENCES && by0.sequence_begins) blank_scores(s.scores[place], s.begins[stage], block, own);",
        "tests/test_ssd_fused_sequences.py -k test_sequences_do_not_meet",
    ),
    Mutation(
        "sequences: a chunk's decay stays",
        "kernels/ssd/decays.cuh",
        "if (begins.any()) log_chunk = __int_as_float(0xff800000);",
        "tests/test_ssd_fused_sequences.py -k test_sequences_do_not_meet",
    ),
    Mutation(
        "sequences: pass 1 multiplies what has no weights",
        "kernels/ssd/multiply.cuh",
        "if (S::SEQUENCES && by.sequence_begins) return add_last_sequence(state, weighted, begins, b, thread % 32);",
        "tests/test_ssd_fused_sequences.py -k test_sequences_do_not_meet",
    ),
    Mutation(
        "sequences: y from a state that is not finite",
        "kernels/ssd/multiply.cuh",
        "if (S::SEQUENCES && by.sequence_begins) drop_from_state(y.from_state, begins, lane);",
        "tests/test_ssd_fused_sequences.py -k test_what_is_not_finite_stays",
    ),
    Mutation(
        "sequences: no state is made again",
        "kernels/ssd/multiply.cuh",
        "by.sequence_begins && __any_sync(~0u, not_finite(state))",
        "tests/test_ssd_fused_sequences.py -k test_what_is_not_finite_stays",
        "by.sequence_begins && false",
    ),
    Mutation(
        "sequences: x of an earlier one is added",
        "kernels/ssd/rare.cuh",
        " || (S::SEQUENCES && j + 1 < begins.of[n / 2 * 8 + own + n % 2])",
        "tests/test_ssd_fused_sequences.py -k test_what_is_not_finite_stays",
    ),
    # Offsets in 32 bits.
    Mutation(
        "offsets: attention's cache",
        "kernels/attention/decode.cu",
        "const long long at = ((long long)next.b * schedule.kv_len + first) * token_stride +",
        "tests/test_offsets.py -k 'test_a_long_cache and decode'",
        "const int at = (next.b * schedule.kv_len + first) * token_stride +",
    ),
    Mutation(
        "offsets: the cache of split",
        "kernels/attention/split.cu",
        "const long long at = ((b * kv_len + t) * n_kv_heads + kv_head) * HEAD_DIM;",
        "tests/test_offsets.py -k 'test_a_long_cache and split'",
        "const int at = ((b * kv_len + t) * n_kv_heads + kv_head) * HEAD_DIM;",
    ),
    Mutation(
        "offsets: the cache of online",
        "kernels/attention/online.cu",
        "const long long at = ((b * kv_len + t) * n_kv_heads + kv_head) * HEAD_DIM;",
        "tests/test_offsets.py -k 'test_a_long_cache and online'",
        "const int at = ((b * kv_len + t) * n_kv_heads + kv_head) * HEAD_DIM;",
    ),
    Mutation(
        "offsets: rows of gemv_residual",
        "kernels/fusion/products.cuh",
        "W + (long long)min(group * ROWS + r, rows - 1) * cols",
        "tests/test_offsets.py -k test_a_large_matrix",
        "W + min(group * ROWS + r, rows - 1) * cols",
    ),
    Mutation(
        "offsets: rows of norm_glu",
        "kernels/fusion/products.cuh",
        "(long long)min(group * HALF + r % HALF, rows - 1) * cols",
        "tests/test_offsets.py -k test_large_matrices_behind_a_norm",
        "min(group * HALF + r % HALF, rows - 1) * cols",
    ),
    Mutation(
        "offsets: rows of norm_qkv",
        "kernels/fusion/products.cuh",
        "return W + (long long)row * cols;",
        "tests/test_offsets.py -k test_large_matrices_behind_a_norm",
        "return W + row * cols;",
    ),
    # Benches: what is timed.
    Mutation(
        "bench: gemv reads one copy of W, from the cache",
        "kernels/gemv/bench.py",
        "return cuda_timing.cold_copies(torch.randn(shape, device=DEVICE).to(dtype))",
        "tests/test_gemv_bench.py -k test_the_ladder_of_gemv_reads_cold_weights",
        "return [torch.randn(shape, device=DEVICE).to(dtype)]",
    ),
    Mutation(
        "bench: every call of gemv reads the same copy of W",
        "kernels/gemv/bench.py",
        "functools.partial(call, W, x, y) for W, y in zip(weights, outs)",
        "tests/test_gemv_bench.py -k test_the_ladder_of_gemv_reads_cold_weights",
        "functools.partial(call, weights[0], x, y) for y in outs",
    ),
    Mutation(
        "bench: the layer has one set of weights",
        "kernels/fusion/bench.py",
        "for _ in range(max(1, cuda_timing.COLD // work[0]))",
        "tests/test_gemv_bench.py -k test_the_ladder_of_the_layer_reads_cold_weights",
        "for _ in range(0)",
    ),
    Mutation(
        "bench: a graph replays its first call alone",
        "lab/cuda_timing.py",
        "            for call in calls:\n                call()\n    return graph.replay",
        "tests/test_lab_cuda_timing.py -k test_every_copy_has_its_turn",
        "            for _ in calls:\n                calls[0]()\n    return graph.replay",
    ),
    Mutation(
        "bench: as called, the first call alone is timed",
        "lab/as_called.py",
        "        for call in calls:\n            call()\n    wait()\n    return",
        "tests/test_lab_as_called.py -k test_every_copy_has_its_turn_and_the_queue_never_fills",
        "        for _ in calls:\n            calls[0]()\n    wait()\n    return",
    ),
    Mutation(
        "bench: of a peer the last mode counts, not the fastest",
        "kernels/benching.py",
        "yield from rows[:1]",
        "tests/test_attention_bench.py -k test_of_a_peer_the_fastest_mode_counts",
        "yield from rows[-1:]",
    ),
    Mutation(
        "bench: of a peer's ways the one that is fastest as called has no row",
        "kernels/benching.py",
        "            yield best\n",
        "tests/test_attention_bench.py -k test_of_a_peer_the_fastest_mode_counts",
        "            pass\n",
    ),
    Mutation(
        "prepared calls: a stream's scratch goes to two calls at a time",
        "lab/prepared/memory.h",
        "if (!space || space->busy) return NULL;",
        "tests/test_lab_prepared_faults.py -k test_two_calls_of_one_stream_at_a_time_have_scratch_of_their_own",
        "if (!space) return NULL;",
    ),
    Mutation(
        "prepared calls: a number that changes is launched as it was noted",
        "lab/prepared/launch.h",
        "else if (p[3] == NUMBER) memcpy(values + p[0], &numbers[p[1]], (size_t)p[2]);",
        "tests/test_lab_prepared_faults.py -k test_a_number_that_changes",
        "else if (p[3] == NUMBER) continue;",
    ),
    Mutation(
        "prepared calls: what belongs to a stream goes to a graph",
        "lab/prepared/launch.h",
        "== 1 && !capturing;",
        "tests/test_lab_prepared_faults.py -k test_what_a_stream_has_is_asked_for_once",
        "== 1;",
    ),
    Mutation(
        "prepared calls: tensors that are negated as they are read pass for plain ones",
        "lab/prepared/look.h",
        "if (api.negative(tensor) || api.layout",
        "tests/test_lab_prepared_faults.py -k test_numbers_negated_only_when_they_are_read_are_refused_every_time",
        "if (api.layout",
    ),
    Mutation(
        "quantised decode: the kind does not know how many tiles are in use",
        "kernels/kv_cache/decoding.py",
        "(batch, -(-kv_len // TILE), n_kv_heads, head_dim), *how",
        "tests/test_kv_cache_prepared.py -k test_caches_that_grow_between_right_and_wrong_calls",
        "(batch, n_kv_heads, head_dim), *how",
    ),
    Mutation(
        "bench: as called, a row always follows the same one",
        "lab/as_called.py",
        "itertools.cycle([names, names[::-1]])",
        "tests/test_lab_as_called.py -k test_rows_take_turns_there_and_back_again",
        "itertools.cycle([names])",
    ),
    Mutation(
        "bench: the processor's part holds the wait for the card",
        "lab/as_called.py",
        "        taken = time.thread_time() - begin\n        wait()\n",
        "tests/test_lab_as_called.py -k test_the_larger_of_the_processors_time_and_the_cards_counts",
        "        wait()\n        taken = time.thread_time() - begin\n",
    ),
    Mutation(
        "bench: of compiles that were timed ahead the slowest is made again",
        "kernels/compiling.py",
        "return compiled(way, mode, min(timed, key=timed.get))",
        "tests/test_compiling.py -k test_of_compiles_that_were_timed_ahead_only_the_fastest_is_made_again",
        "return compiled(way, mode, max(timed, key=timed.get))",
    ),
    Mutation(
        "results: times as called stand whatever becomes of the Python that a call runs",
        "lab/stored_called.py",
        'for s, then in item[KEY]["sources"].items() if hash_of(s) != then',
        "tests/test_bench_run.py -k test_python_that_a_call_runs_is_what_its_time_rests_on",
        'for s, then in item[KEY]["sources"].items() if False',
    ),
    Mutation(
        "results: times as called are put beside rows that another run lacks",
        "lab/stored_called.py",
        '            raise KeyError(raw["name"])\n',
        "tests/test_bench_run.py -k test_a_row_that_is_missing_keeps_the_times_of_all",
        "            pass\n",
    ),
    # The SIMT machine itself: what the above rests on.
    Mutation(
        "machine: a block that waits gives its place to another",
        "simt/execute/scheduler.py",
        "self.places - sum(p.running() for p in waiting)",
        "tests/test_simt_places.py -k test_a_chain_by_block_number_hangs",
        "self.places",
    ),
    Mutation(
        "machine: any barrier counts as a wait for the launch ahead",
        "simt/memory/ahead.py",
        "self.passed |= here & (know if axes == 2 else know | self.told)",
        "tests/test_simt_ahead.py -k test_who_has_not_waited_knows_nothing",
        "self.passed |= here",
    ),
    Mutation(
        "machine: what one warp has settled is settled for all",
        "simt/memory/settled.py",
        "            self.mark_again(marks, self.warps)\n\n",
        "tests/test_simt_asides.py -k test_behind_steps_of_warps",
        "\n",
    ),
    Mutation(
        "machine: no warp owns the words that an atomic comes to",
        "simt/memory/settled.py",
        "        if self.apart:\n            self.noted += 1",
        "tests/test_simt_asides.py -k test_behind_steps_of_warps",
        "        if False:\n            self.noted += 1",
    ),
    # A token that is quantised as it is written.
    Mutation(
        "llm forgets the half of another token's byte",
        "kernels/kv_cache/put_head.cuh",
        "at.upper ? (was & 15) | code << 4 :",
        "tests/test_llm_quantized.py -k 'test_the_codes_are_those_of_quantize and 16-4-torch.float16'",
        "at.upper ? code << 4 :",
    ),
    Mutation(
        "llm reads a head before its warp has written it",
        "kernels/llm/rope_append_quantized.cu",
        "    __syncwarp();\n",
        "tests/test_llm_quantized.py -k test_no_race",
    ),
    Mutation(
        "llm divides by the rounded reciprocal of a scale",
        "kernels/kv_cache/put_head.cuh",
        "rintf(__fdiv_rn(x[n], unit))",
        "tests/test_llm_quantized.py -k test_numbers_between_two_codes_go_where_quantize_puts_them",
        "rintf(x[n] * (1 / unit))",
    ),
    # Pages of 8 and 4 bits.
    Mutation(
        "PDL: pages of codes read the newest unit early",
        "kernels/paged/decode_codes.cu",
        "        if (prefetcher.at_newest_token()) wait_for_previous_kernel();\n",
        "tests/test_paged_codes.py -k test_a_dependent_launch_waits",
    ),
    Mutation(
        "pages of codes: what is behind a length is weighed by 0",
        "kernels/paged/decode_codes.cu",
        "        clear_behind(slot + K_WORDS, v_scales, tokens, lane);\n",
        "tests/test_paged_codes.py -k test_right_for_all_bits",
    ),
    Mutation(
        "pages of codes: a window is kept for the next 32 pages",
        "kernels/paged/code_prefetch.cuh",
        "first_page = next_first, window = next_window;",
        "tests/test_paged_codes.py -k test_more_than_a_window",
        "first_page = next_first;",
    ),
    Mutation(
        "pages of codes: the pages of a unit's scales are the first one's",
        "kernels/paged/code_prefetch.cuh",
        "unit = t == other ? units[other] : unit;",
        "tests/test_paged_codes.py -k test_right_however",
        "unit = units[0];",
    ),
    Mutation(
        "pages of codes: a fork's copy has no scales",
        "kernels/paged/cache.py",
        "*([] if self.scales is None else [self.scales])",
        "tests/test_paged_codes.py -k test_fork",
        "",
    ),
    # A token's launches.
    Mutation(
        "attend sends before the other blocks have begun",
        "kernels/llm/attend.cu",
        "    cluster_wait(); // all blocks have begun, and can be sent something\n",
        "tests/test_llm_attend.py -k test_no_race",
    ),
    Mutation(
        "attend adds up before all have sent",
        "kernels/llm/attend.cu",
        "    cluster_arrive();\n    cluster_wait();\n",
        "tests/test_llm_attend.py -k test_no_race",
    ),
    Mutation(
        "attend leaves the newest token's key out",
        "kernels/llm/attend.cu",
        "            tiles.lay_down(here_in_ring, key[0], key[1], lane);\n",
        "tests/test_llm_attend.py -k test_it_is_the_reference",
    ),
    Mutation(
        "lowbit's fused norm leaves out the other warps' squares",
        "kernels/lowbit/fused_row.cu",
        "for (int w = 0; w < B::WARPS_PER_TEAM; w++) total",
        "tests/test_lowbit_fused.py -k test_each_is_what_its_parts_make",
        "for (int w = 0; w < 1; w++) total",
    ),
    Mutation(
        "lowbit's GLU takes another row's partner",
        "kernels/lowbit/fused_row.cu",
        "product_of(sum_of(n) + 8, sums",
        "tests/test_lowbit_fused.py -k test_each_is_what_its_parts_make",
        "product_of(sum_of(n) + 7, sums",
    ),
    Mutation(
        "greedy takes the last of equal logits",
        "kernels/llm/greedy.cu",
        "order << 32 | ~place",
        "tests/test_llm_kernels.py -k test_greedy",
        "order << 32 | place",
    ),
    # States that one piece of a text hands to the next.
    Mutation(
        "a convolution's state is one token old",
        "models/mamba2_torch.py",
        "seen[:, xBC.shape[1] :]",
        "tests/test_models_mamba2.py -k test_a_prompt_in_pieces",
        "seen[:, xBC.shape[1] - 1 : -1]",
    ),
    Mutation(
        "a piece begins without the state before it",
        "models/mamba2.py",
        "initial_states=ssm_state,",
        "tests/test_models_mamba2.py -k test_a_prompt_in_pieces",
        "initial_states=None,",
    ),
    Mutation(
        "a step's convolution keeps what the oldest token was",
        "kernels/cpu_mamba2/step.py",
        "    conv[:-1] = conv[1:].copy()\n",
        "tests/test_models_mamba2.py -k test_steps_behind_a_prompt",
    ),
    Mutation(
        "a text begins with another one's states",
        "models/mamba2_cpu.py",
        "        self.state.clear()\n",
        "tests/test_models_mamba2.py -k test_a_prompt_of_many_pieces",
    ),
    Mutation(
        "a state that is kept goes on with the text",
        "models/mamba2.py",
        "self.ssm.clone()",
        "tests/test_models_mamba2.py -k test_a_text_goes_on",
        "self.ssm",
    ),
    Mutation(
        "a token in one call: the oldest input stays",
        "kernels/cpu_mamba2/token.c",
        "conv + (w + 1) * t->channels + from",
        "tests/test_cpu_mamba2.py -k test_a_token_in_one_call_is",
        "conv + w * t->channels + from",
    ),
    Mutation(
        "a token in one call: one norm for all groups",
        "kernels/cpu_mamba2/token.c",
        "each = t->d_inner / t->s.ngroups;",
        "tests/test_cpu_mamba2.py -k test_a_token_in_one_call_is",
        "each = t->d_inner;",
    ),
    Mutation(
        "a token in one call: a pair's streams both walk along gate",
        "kernels/cpu_llm/phases.h",
        "p->W[1] + row * p->cols",
        "tests/test_cpu_llm.py -k test_windows",
        "p->W[0] + row * p->cols",
    ),
    Mutation(
        "a token in one call: the last rows are forgotten where streams are not of one length",
        "kernels/cpu_llm/phases.h",
        "rows.end - rows.begin + p->unit - 1",
        "tests/test_cpu_llm.py -k test_windows",
        "rows.end - rows.begin",
    ),
    Mutation(
        "a team: two threads take the same rows",
        "kernels/cpu_llm/team.h",
        "return span(first + taken, count, all);",
        "tests/test_cpu_llm.py -k test_windows",
        "return span(first, count, all);",
    ),
    Mutation(
        "heads read another group's B and C",
        "kernels/cpu_mamba2/state.c",
        "B + head / (nheads / ngroups) * dstate",
        "tests/test_cpu_mamba2.py -k test_the_step_is_the_reference",
        "B + head % ngroups * dstate",
    ),
    Mutation(
        "rows of a hybrid's queries stay in their order",
        "models/mamba2_weights.py",
        "self.taken(*names)[0][self.order]",
        "tests/test_models_mamba2.py -k test_logits_and_greedy",
        "self.taken(*names)[0]",
    ),
    Mutation(
        "the gate comes behind the norm",
        "models/mamba2_torch.py",
        "gated = (y.float() * F.silu(z.float()))",
        "tests/test_models_mamba2.py -k test_logits_and_greedy",
        "weight, gated = weight * F.silu(z.float()), (y.float())",
    ),
]

# Every ordering of the fused kernel, one after another: (where, what it says, the text, what takes its place).
FUSED, SHARED, SHARES, CHAIN, BRING, DECAYS, SCORES, MULTIPLY, STORE = (
    f"kernels/ssd/{name}"
    for name in ("fused.cu", "shared.cuh", "shares.cuh", "chain.cuh", "bring.cuh", "decays.cuh", "scores.cuh",
                 "multiply.cuh", "store.cuh")
)  # fmt: skip
RELEASE = "if (thread == 0) store_release(flag, value);"
TILES_CAME = "        s.ring.wait_full(phase);\n"
STEP_NOW = "        const Step &step = s.steps[stage];\n"
SCORES_DONE = "            __syncwarp();\n            if (lane == 0) s.scores_ring.full"
SCORES_READ = "    if (lane == 0) s.scores_ring.release"
Y_SEEN = "fence_async_proxy(); // of y, and of what has been read of z"
Z_READ = "        load_fragments(z, shared_address(s.z[turn.stage][side]), thread);\n"
Z_DONE = "        if constexpr (S::GATED) s.z_ring.release(turn);\n"
DECAYS_THERE = "        if (lane == 0) s.ring.full[phase.stage].arrive();\n"
ORDERINGS = [
    ("kernels/device/grid.cuh", "a flag is read without acquiring", "ld.acquire.gpu.global.u32",
     "ld.relaxed.gpu.global.u32"),
    (CHAIN, "a flag is set without releasing", RELEASE, RELEASE.replace("release", "relaxed")),
    (CHAIN, "a flag for the block alone", RELEASE,
     "__threadfence_block();\n    " + RELEASE.replace("release", "relaxed")),
    (CHAIN, "a flag is set before all have stored", "thread) {\n    named_barrier<128>(1 + side);\n    if (thread",
     "thread) {\n    if (thread"),
    (CHAIN, "one thread alone waits for a flag", "value) continue;\n    named_barrier<128>(1 + side);",
     "value) continue;"),
    (BRING, "tiles are brought to places in use", "        s.ring.wait_empty(phase);\n", ""),
    (STORE, "y leaves before the step is known", f"{TILES_CAME}{STEP_NOW}", STEP_NOW),
    (STORE, "y leaves before it is there", "            s.y_full[stage].wait(y_parities >> stage & 1);\n", ""),
    (STORE, "y's place is given back while it is read", "            store_wait_read();\n", ""),
    (SCORES, "scores are made of tiles on their way", TILES_CAME, ""),
    (SCORES, "scores are written where some are read", "            s.scores_ring.wait_empty(turn);\n", ""),
    (SCORES, "scores are not shown to wgmma", f"            fence_async_proxy();\n{SCORES_DONE}", SCORES_DONE),
    (SCORES, "scores are announced for lanes not done", SCORES_DONE, SCORES_DONE.split("\n")[1]),
    (MULTIPLY, "scores are read before they are there", "    s.scores_ring.wait_full(turn);\n", ""),
    (MULTIPLY, "scores are given back for lanes not done", f"    __syncwarp();\n{SCORES_READ}", SCORES_READ),
    (MULTIPLY, "products are made of tiles on their way", TILES_CAME, ""),
    (MULTIPLY, "y is not shown to TMA", f"    {Y_SEEN}\n", ""),
    (MULTIPLY, "y is announced for lanes not done", f"{Y_SEEN}\n    __syncwarp();", Y_SEEN),
    (BRING, "z is brought to a place in use", "        s.z_ring.wait_empty(turn);\n", ""),
    (MULTIPLY, "z is read before it is there", "        s.z_ring.wait_full(turn);\n", ""),
    (MULTIPLY, "z is given back by a warp for another", Z_DONE,
     Z_DONE.replace("s.z", "if (thread == 0)\n            for (int i = 0; i < 4; i++) s.z")),
    (SHARED, "z's place is free for one arrival too few", "z_ring.init(1, 8)", "z_ring.init(1, 7)"),
    (SHARED, "a stage is full for one arrival too few", "ring.init(1 + ROWS, 13)", "ring.init(ROWS, 13)"),
    (SHARED, "a stage is empty for one arrival too few", "ring.init(1 + ROWS, 13)", "ring.init(1 + ROWS, 12)"),
    (SHARED, "y is there for one arrival too few", "y_full[i].init(8)", "y_full[i].init(7)"),
    (SHARED, "scores are there for one arrival too few", "scores_ring.init(4, 8)", "scores_ring.init(3, 8)"),
    (SHARED, "scores are free for one arrival too few", "scores_ring.init(4, 8)", "scores_ring.init(4, 7)"),
    (FUSED, "shares are read before they are cut", "share_out(s, sizes, a, dt_bias);\n    __syncthreads();",
     "share_out(s, sizes, a, dt_bias);"),
    (DECAYS, "decays are made for a step that is not known", "            s.planned[phase.stage].wait(phase.parity);\n",
     ""),
    (DECAYS, "decays are announced for lanes not done", f"        __syncwarp();\n{DECAYS_THERE}", DECAYS_THERE),
]  # fmt: skip
MUTATIONS += [
    Mutation(f"fused: {says}", file, old, "tests/test_ssd_fused.py -k test_no_race", new)
    for file, says, old, new in ORDERINGS
]
MUTATIONS += [
    Mutation(f"shares: {says}", SHARES, f"    __syncthreads();\n    {then}", "tests/test_ssd_shares.py", f"    {then}")
    for says, then in [
        ("rows are ranked before all are measured", "order_rows(s"),
        ("costs are summed up before all are known", "if (thread < 32)\n"),
        ("shares are cut before costs are summed up", "if (thread <= sizes.share_of(sizes.tickets))"),
    ]
]
MUTATIONS += [
    Mutation(f"bundles: {says}", file, old, f"tests/test_ssd_{test}", new)
    for says, file, old, new, test in [
        ("a share takes all pairs of one", BRING, "pair -= sizes.together()", "pair--",
         "fused.py -k test_bundles_do_not_race"),
        ("a state comes from a neighbour", CHAIN, "ticket -= sizes.together()", "ticket--",
         "fused.py -k test_bundles_do_not_race"),
        ("they are cut as their last pair needs it", SHARES, "if (place % (ROWS * sizes.together()) > 0) continue;",
         "if (place % ROWS > 0) continue;", "shares.py"),
        ("a ticket has its neighbour's pair, too", SHARES, "sizes.together() + ticket % sizes.together()",
         "sizes.together()", "shares.py"),
    ]
]  # fmt: skip
HAND, CHUNK, RING = (f"kernels/ssd/by_hand/{name}" for name in ("one_head.cuh", "chunk.cu", "ring.cu"))
MUTATIONS += [
    Mutation(f"by hand: {says}", file, old, "tests/test_ssd_fused_by_hand.py -k test_no_race", new)
    for file, says, old, new in [
        (HAND, "scores are not shown to wgmma", "    fence_async_proxy(); // wgmma reads them next\n", ""),
        (HAND, "y is not shown to TMA", "    fence_async_proxy(); // TMA reads y next\n", ""),
        (CHUNK, "tiles are read before they come", "        s.full.wait(parity);\n", ""),
        (CHUNK, "decays are read before they are made", "        __syncthreads(); // decays are there\n", ""),
        (CHUNK, "y leaves before it is there", "        __syncthreads(); // y is there", "        // y is there"),
        (RING, "x is brought to where y is read", "            store_wait_read();\n", ""),
        (RING, "scores are read before they are made", "        __syncthreads(); // scores are there\n", ""),
    ]
]
ONE_LAUNCH = "tests/test_llm_one_launch.py -k test_"
NOTHING_RACES, A_STEP = ONE_LAUNCH + "nothing_races", ONE_LAUNCH + "a_step_is_what_the_processor_computes"
ANY_NUMBER = ONE_LAUNCH + "any_number_of_blocks_ends"
MUTATIONS += [
    Mutation(f"one launch: {says}", f"kernels/llm/{name}", old, tests, new)
    for name, says, tests, old, new in [
        ("token_tasks.cuh", "a slot is filled while it is read", NOTHING_RACES,
         "        taken.ring.wait_empty(phase);\n", ""),
        ("token_attention.cuh", "a team does not wait for its queries", NOTHING_RACES,
         "    sync_team(team.team);\n    if (last", "    if (last"),
        ("one_launch.cu", "squares are read before they are there", NOTHING_RACES,
         "            sync_multipliers(); // what", "            // what"),
        ("one_launch.cu", "sums are added up before they are laid down", NOTHING_RACES,
         "        sync_multipliers();\n        return thread", "        return thread"),
        ("one_launch.cu", "no residual", A_STEP, "before + sums.at[n]", "sums.at[n]"),
        ("token_vectors.cuh", "the last group of tokens counts twice", NOTHING_RACES,
         "            if (group + t == groups) break; // the last one twice\n", ""),
        ("token_attention.cuh", "a merge leaves groups out", NOTHING_RACES,
         "group < groups; group += MERGE_DEPTH", "group < groups / 2; group += MERGE_DEPTH"),
        ("one_launch.cu", "tickets begin anew too early", ANY_NUMBER, "== gridDim.x - 1) {", "== 0) {"),
    ]
]  # fmt: skip


def chosen(words):
    """The mutations with one of the words in their names or files; all without words."""
    return [m for m in MUTATIONS if not words or any(w.lower() in f"{m.name} {m.file}".lower() for w in words)]


def run(checkout, tests):
    """Run pytest with a selection. Returns (how many passed, which failed and why, other trouble)."""
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", *shlex.split(tests)]
    wide = os.environ | {"COLUMNS": "160"}  # for pytest's last lines
    try:
        done = subprocess.run(command, cwd=checkout, env=wide, capture_output=True, text=True, timeout=PATIENCE)
    except subprocess.TimeoutExpired:
        return 0, [], f"no verdict in {PATIENCE} s"
    failed = re.findall(r"^FAILED (.*)$", done.stdout, re.M)
    passed = re.search(r"(\d+) passed", done.stdout)
    trouble = "" if done.returncode in (0, 1) else (done.stdout + done.stderr).strip().splitlines()[-1]
    return int(passed[1]) if passed else 0, failed, trouble


def see(checkout, mutation, sound):
    """(is the mutation seen, what was seen) in a copy of the checkout. sound: what is known of tests without it."""
    if mutation.tests not in sound:
        passed, failed, trouble = run(checkout, mutation.tests)
        without = f"{failed[0]} fails without it" if failed else "" if passed else f"no test runs: {mutation.tests}"
        sound[mutation.tests] = trouble or without
    if sound[mutation.tests]:
        return False, sound[mutation.tests]
    path = checkout / mutation.file
    text = path.read_text()
    if text.count(mutation.old) != 1:
        return False, f"its text stands {text.count(mutation.old)} times in {mutation.file}, not once"
    path.write_text(text.replace(mutation.old, mutation.new))
    try:
        _, failed, trouble = run(checkout, mutation.tests)
    finally:
        path.write_text(text)
    if failed and not re.search(r"CompileError|SyntaxError|NameError", failed[0]):
        return True, failed[0]
    return False, trouble or (f"is no program: {failed[0]}" if failed else f"goes unseen by {mutation.tests}")


def main(words):
    found = chosen([w for w in words if w != "--list"])
    if "--list" in words or not found:
        print("\n".join(m.name for m in found) or f"no mutation has {' or '.join(words)} in its name or file")
        return 0 if found else 1
    unseen, sound = 0, {}
    width = max(len(m.name) for m in found)
    with tempfile.TemporaryDirectory(prefix="mutations-") as folder:
        checkout = Path(folder) / "checkout"
        shutil.copytree(ROOT, checkout, ignore=LEFT_OUT, symlinks=True)
        for mutation in found:
            begin = time.monotonic()
            seen, what = see(checkout, mutation, sound)
            unseen += not seen
            taken = f"{time.monotonic() - begin:4.0f} s"
            print("seen  " if seen else "UNSEEN", mutation.name.ljust(width), taken, what, sep="  ", flush=True)
    print(f"{len(found) - unseen} of {len(found)} are seen")
    return 1 if unseen else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
