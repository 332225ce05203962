/* Rung 4: each device writes its message into the others' mailboxes, every 4 bytes with the number of the exchange.

   x (n,): this device's message, and the sum. mail: this device's mailbox, mails: those of all (mail.cuh); a box has
   2 * WORDS words.

   New since the barrier: there is none. 4 bytes of data and 4 of flag are one number of 8 bytes, which arrives as a
   whole, so whoever sees the flag has the data: no release, no acquire, no fence, and the way over the link is taken
   once. This is the "low latency" protocol of NCCL (LL). It doubles the bytes: it is for short messages, where latency
   counts.

   Moves: 2 * (devices - 1) * n numbers over the link from each device. In a row: number, send, receive. */
#include "mail.cuh"

/* Two numbers of 4 bytes, each with its flag. */
__device__ __forceinline__ ulonglong2 flagged(unsigned a, unsigned b, unsigned number) {
    return {(u64)number << 32 | a, (u64)number << 32 | b};
}
__device__ __forceinline__ bool has_come(ulonglong2 pair, unsigned number) {
    return (unsigned)(pair.x >> 32) == number && (unsigned)(pair.y >> 32) == number;
}

extern "C" __global__ void __launch_bounds__(WORDS)
ll(T *x, ulonglong2 *mail, Peers mails, uint2 *numbers, Told told, int rank, int limit, long long n, int wide) {
    let_next_kernel_start();
    wait_for_previous_kernel();
    const Exchange now = next_exchange(numbers);
    if (now.failed) return;
    const Message message = {x, n, wide};
    const Part part = part_of(message.words());
    bool failed = false;
    for (long long k = part.first + threadIdx.x; k < part.last; k += blockDim.x) {
        const int i = k - part.first;
        uint4 words[DEVICES];
        const uint4 own = message.load(k);
#pragma unroll
        for (int r = 0; r < DEVICES; r++)
            if (r != rank) {
                ulonglong2 *to = (ulonglong2 *)mails.of[r] + box_of(now.number, rank, 2 * WORDS) + i;
                send(to, flagged(own.x, own.y, now.number));
                send(to + WORDS, flagged(own.z, own.w, now.number)); // so that a warp's words lie side by side
            }
#pragma unroll
        for (int r = 0; r < DEVICES; r++) {
            words[r] = own;
            if (r == rank) continue;
            const ulonglong2 *from = mail + box_of(now.number, r, 2 * WORDS) + i;
            ulonglong2 a, b;
            failed |= !wait_for([&] {
                a = look(from), b = look(from + WORDS);
                return has_come(a, now.number) && has_come(b, now.number);
            }, r, limit, told);
            words[r] = make_uint4(a.x, a.y, b.x, b.y);
        }
        if (!failed) message.store(k, sum_of(words));
    }
    end_exchange(numbers, now.number, failed);
}
