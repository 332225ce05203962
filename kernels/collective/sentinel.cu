/* Rung 5: the data are their own flag: a number that no message has says "not here yet".

   x (n,): this device's message, and the sum. mail: this device's mailbox, mails: those of all (mail.cuh); a box has
   WORDS words.

   New since words with a flag: half the bytes. What it costs is a store of each word into the own mailbox.

   Moves: (devices - 1) * n numbers over the link from each device. In a row: number, message, send, receive. */
#include "sentinel.cuh"

extern "C" __global__ void __launch_bounds__(WORDS)
sentinel(T *x, uint4 *mail, Peers mails, uint2 *numbers, Told told, int rank, int limit, long long n, int wide) {
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
        const uint4 own = sendable(message.load(k));
#pragma unroll
        for (int r = 0; r < DEVICES; r++)
            if (r != rank) send((uint4 *)mails.of[r] + box_of(now.number, rank, WORDS) + i, own);
#pragma unroll
        for (int r = 0; r < DEVICES; r++) {
            words[r] = own;
            if (r != rank) failed |= !take(mail + box_of(now.number, r, WORDS) + i, words[r], r, limit, told);
        }
        if (!failed) message.store(k, sum_of(words));
    }
    end_exchange(numbers, now.number, failed);
}
