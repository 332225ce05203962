/* Launch 3 of the backward pass: all gradients of a chunk, from the states before and behind it.

   A block has a chunk and walks a run of rows (heads, or parts of them) of one group, with a role for each file:
       bring (here)         a warp: tiles of the next heads by TMA
       inputs.cuh           a warpgroup: tokens j, dx, dB and S
       outputs.cuh          a warpgroup: tokens i, dC; and before that the state between two chunks
       step_gradients.cuh   a warp: ddt and dA
       store (here)         one thread: sends dx off by TMA, from where x was

   B, C and B C^T are the same for all heads of a group: they stay in shared memory. dB, dC and S are sums over heads:
   they stay in registers, and nobody adds in memory, so the same numbers come out each time. With L_ij the decay from
   behind token j to behind token i, e_i the decay from the chunk's start, f_j that to its end, for each head

       q_j   = sum over i >= j of (B_j C_i) L_ij dy_i + f_j dh B_j        dx_j = dt_j q_j + D dy_j
       S_ij += (dy_i x_j) L_ij dt_j                                       dB_j = sum over i of S_ij C_i + ...
       dB_j += dt_j f_j dh^T x_j     dC_i += e_i h^T dy_i                 dC_i = sum over j of S_ij B_j + ...

   where the products of S with C and B follow once, behind the last head.

   What decides its speed is less memory than instructions that wait for each other: of a head's chunk each role has
   hundreds, a warp of each on a quarter of a multiprocessor.

   Moves x, dy and dx once, h and dh once for each pair of chunks, whose two blocks read them at about the same time,
   and B and C once for each run. For each chunk and head 64 * 64 * 64 * 2 + 6 * 64 * 64 * STATE multiplications and
   additions. Launch with THREADS on (chunks, runs of all groups, batch) blocks; a run has run_rows rows or, the last of
   a group, fewer. Maps of x, dy, dx, b, c: (1, batch, heads or groups, seqlen, columns), boxes of a tile; of h and dh
   (1, batch * pairs, rows, 64, STATE). b_sums, c_sums (runs of a group, batch, seqlen, groups, dstate). dt_gradients,
   head_sums: of each chunk of each row. slopes: d step / d dt, as lines. */
#include "outputs.cuh"
#include "step_gradients.cuh"

constexpr int THREADS = 384;
constexpr int INPUT_REGISTERS = 240, OUTPUT_REGISTERS = 208, OTHER_REGISTERS = 56; // 3 times 168

/* The run of rows that a block walks: number `run` of all groups. */
__device__ __forceinline__ Run run_of(const Sizes &sizes, int run, int run_rows) {
    const int group_rows = sizes.heads / sizes.groups * sizes.parts, runs = (group_rows + run_rows - 1) / run_rows;
    const int group = run / runs, first = group * group_rows + run % runs * run_rows;
    return {first, min(first + run_rows, (group + 1) * group_rows), group, run % runs};
}

struct Maps {
    const CUtensorMap &x, &dy, &b, &c, &h, &dh;
};

__device__ __forceinline__ void bring(Shared &s, const Sizes &sizes, const Run &run, const Maps &maps,
                                      const Line *lines, int batch, const Half &half, int lane) {
    const int token = half.chunk * CHUNK, other = half.other() * CHUNK;
    const int pair = (batch * sizes.chunks + half.chunk) / 2;
    const CUtensorMap &other_columns = half.second() ? maps.b : maps.c, &other_rows = half.second() ? maps.x : maps.dy;
    if (lane == 0) {
        s.chunk_full.expect(3 * STATE_TILES * TILE);
        for (int i = 0; i < STATE_TILES; i++) {
            load_tile(s.b[i], maps.b, Place{{64 * i, token, run.group, batch, 0}}, s.chunk_full, LEAVES_LAST);
            load_tile(s.c[i], maps.c, Place{{64 * i, token, run.group, batch, 0}}, s.chunk_full, LEAVES_LAST);
            load_tile(s.other_columns[i], other_columns, Place{{64 * i, other, run.group, batch, 0}}, s.chunk_full,
                      LEAVES_LAST);
        }
    }
    Phase<STAGES> phase;
    Phase<STATE_STAGES> state;
    for (int row = run.first; row < run.last; row++, phase.advance(), state.advance()) {
        const int stage = phase.stage, head = sizes.head_of(row), column = sizes.column_of(row);
        s.ring.wait_empty(phase);
        Barrier &full = s.ring.full[stage], &states_full = s.states_ring.full[state.stage];
        if (lane == 0) {
            full.expect(3 * TILE);
            load_tile(s.other_rows[stage], other_rows, Place{{column, other, head, batch, 0}}, full, AS_ANY);
            load_tile(s.x[stage], maps.x, Place{{column, token, head, batch, 0}}, full, AS_ANY);
            load_tile(s.dy[stage], maps.dy, Place{{column, token, head, batch, 0}}, full, AS_ANY);
        }
        copy_line(s.lines[stage], lines + sizes.line_of(batch, head, half.chunk), lane);
        copy_line(s.other_lines[stage], lines + sizes.line_of(batch, head, half.other()), lane);
        full.arrive_with_copies();
        s.states_ring.wait_empty(state);
        if (lane == 0) {
            states_full.expect(2 * STATE_TILES * TILE);
            for (int i = 0; i < STATE_TILES; i++) {
                load_tile(s.dh[state.stage][i], maps.dh, Place{{64 * i, 0, row, pair, 0}}, states_full, AS_ANY);
                load_tile(s.h[state.stage][i], maps.h, Place{{64 * i, 0, row, pair, 0}}, states_full, AS_ANY);
            }
        }
    }
    copy_async_wait<0>();
}

__device__ __forceinline__ void store(Shared &s, const Sizes &sizes, const Run &run, const CUtensorMap &dx, int batch,
                                      int chunk) {
    Phase<STAGES> phase;
    for (int row = run.first; row < run.last; row++, phase.advance()) {
        s.dx_full[phase.stage].wait(phase.parity);
        store_tile(dx, Place{{sizes.column_of(row), chunk * CHUNK, sizes.head_of(row), batch, 0}}, s.x[phase.stage],
                   LEAVES_FIRST);
        store_commit();
        store_wait_read();
        s.ring.release(phase);
    }
    store_wait();
}

extern "C" __global__ void __launch_bounds__(THREADS, 1)
chunks(const __grid_constant__ CUtensorMap x, const __grid_constant__ CUtensorMap dy,
       const __grid_constant__ CUtensorMap b, const __grid_constant__ CUtensorMap c,
       const __grid_constant__ CUtensorMap h, const __grid_constant__ CUtensorMap dh,
       const __grid_constant__ CUtensorMap dx, const Line *lines, const float *a, const float *d_skip,
       const float *slopes, float *b_sums, float *c_sums, float *dt_gradients, float4 *head_sums, int seqlen,
       int chunks, int heads, int groups, int headdim, int dstate, int parts, int run_rows, int batches) {
    extern __shared__ __align__(1024) unsigned char memory[];
    Shared &s = *reinterpret_cast<Shared *>(memory);
    const Sizes sizes{seqlen, chunks, heads, groups, headdim, dstate, parts};
    const Half half{(int)blockIdx.x};
    const int chunk = half.chunk, batch = blockIdx.z, warp = threadIdx.x / 32;
    const Run run = run_of(sizes, blockIdx.y, run_rows);
    const long long row = ((long long)run.of_group * batches + batch) * seqlen + chunk * CHUNK; // of sums
    const long long first_sum = (row * groups + run.group) * dstate;
    if (threadIdx.x == 0) {
        s.init();
        prefetch(x), prefetch(dy), prefetch(h), prefetch(dh), prefetch(dx);
    }
    __syncthreads();
    const int warpgroup = warp_uniform(threadIdx.x / 128);
    if (warpgroup == 0) {
        take_registers<INPUT_REGISTERS>();
        walk_inputs(s, sizes, d_skip, b_sums + first_sum, chunk, run, threadIdx.x % 128);
    } else if (warpgroup == 1) {
        take_registers<OUTPUT_REGISTERS>();
        walk_outputs(s, sizes, c_sums + first_sum, half, run, threadIdx.x % 128);
    } else {
        give_registers<OTHER_REGISTERS>();
        if (warp == 8) bring(s, sizes, run, {x, dy, b, c, h, dh}, lines, batch, half, threadIdx.x % 32);
        else if (warp == 9)
            make_steps(s, sizes, a, slopes, dt_gradients, head_sums, batch, chunk, run,
                       threadIdx.x % 32);
        else if (threadIdx.x == 32 * 10) store(s, sizes, run, dx, batch, chunk);
    }
}
