/* Rung 6: the same with fewer loads that wait for one another.

   x (n,): this device's message, and the sum. mail: this device's mailbox, mails: those of all (mail.cuh).

   New since the sentinel: a thread has one word, and asks for it before it knows the number of the exchange. A load
   from L2 takes 0.2 µs; two of them stood in a row before anything was sent (which exchange, which words), and now they
   are on their way together. A loop would put the next word behind this one's arrival: blocks take its place. And the
   block's count goes on while the words are on their way.

   Moves: (devices - 1) * n numbers over the link from each device. In a row: message, send, receive. */
#include "sentinel.cuh"

extern "C" __global__ void __launch_bounds__(WORDS)
direct(T *x, uint4 *mail, Peers mails, uint2 *numbers, Told told, int rank, int limit, long long n, int wide) {
    let_next_kernel_start();
    const Message message = {x, n, wide};
    const long long k = (long long)blockIdx.x * blockDim.x + threadIdx.x;
    const bool has_word = k < message.words();
    wait_for_previous_kernel();
    const uint4 own = sendable(message.load(k));
    const Exchange now = next_exchange(numbers);
    bool failed = now.failed;
    if (has_word && !failed)
#pragma unroll
        for (int r = 0; r < DEVICES; r++)
            if (r != rank) send((uint4 *)mails.of[r] + box_of(now.number, rank, WORDS) + threadIdx.x, own);
    count_exchange(numbers, now.number);
    if (has_word && !failed) {
        uint4 words[DEVICES];
#pragma unroll
        for (int r = 0; r < DEVICES; r++) {
            words[r] = own;
            if (r != rank) failed |= !take(mail + box_of(now.number, r, WORDS) + threadIdx.x, words[r], r, limit, told);
        }
        if (!failed) message.store(k, sum_of(words));
    }
    note_failure(numbers, failed);
}
