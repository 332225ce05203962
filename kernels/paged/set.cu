/* Lengths and page numbers that the host has changed, into the tensors that kernels read: one launch for all of them,
   behind one copy to the card. words (any,); pairs (2, count): places in words, then values.

   It does not let the next kernel start early: a dependent launch of decode reads lengths and tables at once, without a
   wait. Such a launch may begin when all blocks have ended; that what they wrote is then in L2 is the fence's doing. */
extern "C" __global__ void set(int *words, const long long *pairs, int count) {
    const int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < count) words[pairs[i]] = (int)pairs[count + i];
    __threadfence();
}
