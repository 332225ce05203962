/* A whole token of Mamba-2 in one launch.

   weights    the embedding (vocab, hidden); where all other matrices and norms lie, counted from there, `places` says
              (token_line.cuh), norm_at and head_at
   constants  (n_layers, CONSTANTS): the convolution's weight and bias, dt_bias, A and D of each layer
   windows    (n_layers, WIDTH - 1, CHANNELS): the convolution's inputs, the oldest first, written in place
   states     (n_layers, HEADS, HEADDIM, DSTATE), written in place
   token      (1,); outside of the vocabulary: NaN
   logits     (vocab,)
   vectors    dated numbers, 0 before the first launch: those of Finisher, one behind another
   turn       [0]: tickets taken, 0 between launches; [1]: launches so far; [2]: blocks that are done, 0 between them

   As chapter 17's one launch: one line of tasks that blocks take by tickets (token_line.cuh), slots that are filled
   long before a task can begin, and vectors whose numbers tell themselves that they are there (llm/dated.cuh). Two
   vectors a layer are waited for by all, the residual stream and y · silu(z), and while they are, slots fill with what
   they will be multiplied with: memory rests only where a wait is longer than that.

   A block has three kinds of warps: those that multiply (token_multiply.cuh), those that make results of sums, the
   states' step among them (token_finish.cuh), and one that copies (token_load.cuh). So a product need not wait for the
   end of the one before, and what a state's step waits for holds up no product.

   Moves the weights once, and the states twice. Compile with SIZES (token_line.cuh). Launch with BLOCK threads on any
   number of blocks, best one for each multiprocessor, and S::SLOTS * SLOT + sizeof(Memory) bytes. */
#include "../device/grid.cuh"
#include "token_finish.cuh"
#include "token_load.cuh"

extern "C" __global__ void __launch_bounds__(BLOCK, 1)
one_launch(const T *weights, const float *constants, const long long *places, T *windows, float *states,
           const long long *token, T *logits, Dated *vectors, unsigned *turn, int n_layers, int vocab, /* all
           as above */ long long norm_at,
           long long head_at, float eps, float lowest, float highest) {
    extern __shared__ __align__(128) unsigned char slots[];
    static_assert(S::SLOTS * SLOT + sizeof(Memory) <= 227 * 1024, "as one_launch.py reckons");
    Memory &memory = *reinterpret_cast<Memory *>(slots + S::SLOTS * SLOT);
    const int thread = threadIdx.x, warp = thread / 32, lane = thread % 32;
    const unsigned launches = *reinterpret_cast<volatile unsigned *>(turn + 1);
    if (thread == 0) {
        memory.taken.ring.init(1, S::WARPS + 1);
        memory.announced.ring.init(1, 1);
        memory.announced.say(false);
        memory.sums.ring.init(S::WARPS, 1);
    }
    __syncthreads(); // behind it nobody needs the number of launches any more

    const Model model = {weights, constants, places, windows, states, norm_at, head_at};
    Dated *mixed = vectors + Spread<8>::size(S::HIDDEN), *shared = mixed + Spread<4>::size(S::INNER);
    const unsigned date = launches * (n_layers + 1) + 1; // of layer 0
    if (warp < S::WARPS) {
        Multiplier multiplier = {model, slots, vectors, mixed, memory, date, vocab, eps, thread, *token};
        multiplier.run();
        return;
    }
    if (warp < S::WARPS + FINISHERS) {
        Finisher finisher = {model, logits, vectors, mixed,  shared,  slots,
                             memory, date,  lowest,  highest, warp - S::WARPS, lane};
        finisher.run();
        return;
    }
    Loader loader = {turn, lane, shared_address(slots), memory.taken, memory.announced, model, {n_layers, vocab}};
    put_by_tickets(loader);
    // The last block leaves the state as the next launch needs it: nobody takes tickets any more
    if (lane == 0 && add_acquire_release(turn + 2, 1) == gridDim.x - 1) {
        turn[0] = turn[2] = 0;
        turn[1] = launches + 1;
    }
}
