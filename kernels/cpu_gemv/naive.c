/* Rung 1, naive: the definition, y[r] = sum over c of W[r][c] * x[c], in one thread.

   Each addition waits for the one before it, because all of them go into one sum. */
void gemv(const float *W, const float *x, float *y, int64_t rows, int64_t cols, int threads) {
    for (int64_t r = 0; r < rows; r++) {
        float acc = 0;
        for (int64_t c = 0; c < cols; c++) acc += W[r * cols + c] * x[c];
        y[r] = acc;
    }
    (void)threads; /* this rung uses one */
}
