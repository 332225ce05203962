/* The best rung of the Mamba-2 SSD layer: one launch, for Hopper (sm_90a: TMA, mbarriers, wgmma).

   New since tuned:
   - A block has two rows of a group, a pair, and roles, a file for each. A step is a chunk of a pair; it goes from hand
     to hand through mbarriers, STAGES steps deep (shared.cuh):
         bring.cuh     one thread: says what is next, and brings its tiles by TMA
         decays.cuh    a warp for each row: dt into decays (step 1)
         scores.cuh    a warpgroup: C B^T, once for both rows, as it is the same for all heads of a group (2)
         multiply.cuh  a warpgroup for each row: the state (3, 4) and y (5)
         store.cuh     one thread: sends y off by TMA, from where x was
   - The state stays in registers, transposed: (headdim, dstate). So it is the left operand of y^T = state C^T and the
     accumulator of state += (x w)^T B, and never passes through shared memory. Two of more than 128 columns do not fit:
     then what is called a pair is one row, and each warpgroup has half of its state (halves.cuh).
   - Sums of A dt begin at each multiple of 16 tokens. Between blocks of 16 the decay is a number of the row times one
     of the column, so that only blocks on the diagonal take an exponential for each pair of tokens, and no difference
     of long sums loses digits.
   - All multiprocessors have work of about equal cost, which need not be whole segments (shares.cuh).

   Two passes, as in segments: a share whose last piece of a pair goes on in another share first walks it backwards for
   its end state (pass 1; it ends where what is left has decayed by log2_negligible), publishes that (chain.cuh), and
   then walks all its chunks (pass 2).

   What log2_negligible leaves out. Beyond 2^-127 a decay is 0 in these registers, as results below 2^-126 are flushed
   to 0. So one of -127 or less leaves out products with 0 alone: the same numbers as without, with the same shares, for
   whatever is finite. Infinity and NaN times 0 would be NaN. A share that hands on a state with one of these marks the
   pair; its block waits until all tickets are done, which it may, having none left itself, and walks marked pairs anew
   as one piece.

   Several sequences may stand in a row of tokens: nothing of one reaches the next (sequences.cuh). A program for one
   sequence knows nothing of it.

   What decides its speed is a chain: state to y to the next state, some 3,000 cycles a chunk, in which the tensor cores
   work half of the time. So warps do what they can before they wait; what does not need the state is made by others;
   and descriptors of tiles lie in uniform registers, for which the compiler must see that all lanes agree on the stage
   (warp_uniform), and may meet no branch behind which they could not.

   Symbols: x, y, z (batch, seqlen, nheads, headdim), B, C (batch, seqlen, ngroups, dstate); a chunk is 64 tokens. A row
   is 64 columns of x: a head, or a part of one, filled up with zeros. Numbering as in ref/ssd.py: 1 decays, 2 C B^T, 3
   and 4 the state, 5 y.

   Moves, besides pass 1, x, z and y once, B and C once for each pair (from L2 while they fit there; beyond that from
   DRAM about once for each bundle of pairs), dt a sector for each token and row, and 4 * 64 * STATE bytes of state a
   few times for each share. For each chunk and row STATE * 64 * (64 + 64 + 32) + 64 * 64 * 64 * 3 / 4 multiplications
   and additions; one row alone takes 32 * 64 * STATE more.

   Compile with SHAPE (shape.cuh) and SHARED_BYTES. Launch with THREADS on as many blocks as there are multiprocessors,
   or as tickets if these are fewer. Maps of x, y and z: arrays (batch, heads, HEAD_PARTS, seqlen, 64), boxes of a tile;
   of B and C (batch, groups, STATE_TILES, seqlen, 64), boxes of STATE_TILES tiles. Where columns fill no tile, or no
   STATE, (1, batch, heads or groups, seqlen, columns), boxes of a tile. counters: the tickets taken, those done, and
   the flags; zeros at the first launch, then left alone. log2_negligible: negative; for never -infinity, or with
   several sequences a finite number below NEVER, as the decay between two of them is infinite. seq_idx (batch, seqlen):
   what sequence a token is of; where it changes, another begins. ends (sequences, heads, HEADDIM, DSTATE): states
   before the chunks in which they end, or null; batch is 1 then. */
#include "bring.cuh"
#include "decays.cuh"
#include "multiply.cuh"
#include "scores.cuh"

constexpr int THREADS = 512;
static_assert(THREADS >= MOST_ROWS && THREADS > MOST_TICKETS, "share_out has a thread for each");
constexpr int MULTIPLY_REGISTERS = 192, SCORE_REGISTERS = S::SEQUENCES ? 64 : 72;
constexpr int BRING_REGISTERS = 512 - 2 * MULTIPLY_REGISTERS - SCORE_REGISTERS; // 2, 1 and 1 times: 512
// Of the last warpgroup: two warps make decays, in front, where the warps that make scores have least to do.
constexpr int BRINGER = 14, STORER = 15;

extern "C" __global__ void __launch_bounds__(THREADS, 1)
fused(const __grid_constant__ CUtensorMap x, const __grid_constant__ CUtensorMap b,
      const __grid_constant__ CUtensorMap c, const __grid_constant__ CUtensorMap z,
      const __grid_constant__ CUtensorMap y, const Dt *dt, const float *a, const Bias *dt_bias, const D *d_skip,
      const Initial *initial, float *final_states, float *scratch, Count *counters, int seqlen, int heads, int groups,
      int pairs, int chunks, int tickets, int rows, int pairs_of_group, int sort, int side_by_side,
      float log2_negligible, float dt_low, float dt_high, long long dt_batch, long long dt_token, long long dt_head,
      const int *seq_idx, float *ends, int sequences) {
    extern __shared__ __align__(1024) unsigned char memory[];
    Shared &s = *reinterpret_cast<Shared *>(memory);
    const Sizes sizes{seqlen, heads,        groups,          pairs,  chunks,  tickets,  rows,     pairs_of_group,
                      sort,   side_by_side, log2_negligible, dt_low, dt_high, dt_batch, dt_token, dt_head};
    const Chain chain(sizes, scratch, counters);
    if (threadIdx.x == THREADS / 2) s.init(); // the first warps have rows to ask for
    Count taken = 0;
    if (threadIdx.x == 32 * BRINGER) taken = chain.take_ticket(); // early: it takes a while
    if (threadIdx.x == 32 * STORER) {
        prefetch(x), prefetch(b), prefetch(c), prefetch(y);
        if (S::GATED) prefetch(z);
    }
    share_out(s, sizes, a, dt_bias);
    __syncthreads();
    const int warpgroup = warp_uniform(threadIdx.x / 128), warp = threadIdx.x / 32;
    if (warpgroup < 2) {
        take_registers<MULTIPLY_REGISTERS>();
        multiply(s, sizes, chain, warpgroup, d_skip, initial, final_states, {ends, sequences, seq_idx},
                 threadIdx.x % 128);
    } else if (warpgroup == 2) {
        give_registers<SCORE_REGISTERS>();
        make_scores(s, d_skip, threadIdx.x % 128);
    } else {
        give_registers<BRING_REGISTERS>();
        if (warp < 12 + ROWS) make_decays(s, sizes, warp - 12, dt, a, dt_bias, seq_idx, threadIdx.x % 32);
        else if (threadIdx.x == 32 * BRINGER) bring_tiles(s, sizes, chain, {x, b, c, z}, taken);
        else if (threadIdx.x == 32 * STORER) store_tiles(s, y);
    }
}
