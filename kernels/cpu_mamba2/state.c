/* Mamba-2's step of one token, on the CPU: every state is read once and written once, with threads over heads.

       h = decay · h + (dt · x) Bᵀ        y = h C + D · x

   state (nheads, headdim, dstate), x, y (nheads, headdim), dt, decay, D (nheads), B, C (ngroups, dstate); head h reads
   group h / (nheads / ngroups). decay is exp(A · dt). */
#include "state.h"

void state_step(float *state, const float *x, const float *dt, const float *decay, const float *B, const float *C,
                const float *D, float *y, int64_t nheads, int64_t headdim, int64_t dstate, int64_t ngroups,
                int threads) {
#pragma omp parallel for schedule(static) num_threads(threads)
    for (int64_t head = 0; head < nheads; head++) {
        const float *own_B = B + head / (nheads / ngroups) * dstate, *own_C = C + (own_B - B);
        for (int64_t p = 0; p < headdim; p++) {
            int64_t at = head * headdim + p;
            y[at] = row(state + at * dstate, own_B, own_C, dstate, decay[head], dt[head] * x[at]) + D[head] * x[at];
        }
    }
}
