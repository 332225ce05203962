/* A whole program, without Python: the kernel is that of naive.cu in fp32, and around it stands what the course's
   launchers do for you.

       nvcc -O3 -arch=native program.cu -o program && ./program

   -arch=native compiles for the card of this machine; sm_90 is an H100 or H200, sm_89 an RTX 4090. The course's own
   compiler takes kernels alone, so what runs on the CPU stands behind #ifndef __CUDACC_RTC__. */
extern "C" __global__ void gemv(const float *W, const float *x, float *y, int rows, int cols) {
    int row = blockIdx.x * blockDim.x + threadIdx.x;
    if (row >= rows) return;
    float sum = 0;
    for (int c = 0; c < cols; c++) sum += W[(size_t)row * cols + c] * x[c];
    y[row] = sum;
}

#ifndef __CUDACC_RTC__
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <vector>

/* Every call of CUDA returns an error code, and none is printed unless you look. */
static void check(cudaError_t error, const char *what) {
    if (error == cudaSuccess) return;
    fprintf(stderr, "%s: %s\n", what, cudaGetErrorString(error));
    exit(1);
}

int main() {
    const int rows = 4096, cols = 4096;
    const size_t w_bytes = sizeof(float) * rows * cols, x_bytes = sizeof(float) * cols, y_bytes = sizeof(float) * rows;

    std::vector<float> W(rows * cols), x(cols), y(rows); // 1. in the CPU's memory
    for (float &w : W) w = rand() / (float)RAND_MAX - 0.5f;
    for (float &v : x) v = rand() / (float)RAND_MAX - 0.5f;

    float *W_gpu, *x_gpu, *y_gpu; // 2. room in the GPU's memory: addresses that the CPU must not read
    check(cudaMalloc(&W_gpu, w_bytes), "room for W");
    check(cudaMalloc(&x_gpu, x_bytes), "room for x");
    check(cudaMalloc(&y_gpu, y_bytes), "room for y");

    check(cudaMemcpy(W_gpu, W.data(), w_bytes, cudaMemcpyHostToDevice), "copying W"); // 3. to the GPU
    check(cudaMemcpy(x_gpu, x.data(), x_bytes, cudaMemcpyHostToDevice), "copying x");

    gemv<<<(rows + 255) / 256, 256>>>(W_gpu, x_gpu, y_gpu, rows, cols); // 4. blocks, threads a block; returns at once
    check(cudaGetLastError(), "launching gemv");                       // 5. was the launch itself in order?
    check(cudaDeviceSynchronize(), "running gemv");                    //    wait: did the kernel end well?

    check(cudaMemcpy(y.data(), y_gpu, y_bytes, cudaMemcpyDeviceToHost), "copying y"); // 6. back, and look at it
    double error = 0, norm = 0;
    for (int r = 0; r < rows; r++) {
        double exact = 0;
        for (int c = 0; c < cols; c++) exact += (double)W[(size_t)r * cols + c] * x[c];
        error += (y[r] - exact) * (y[r] - exact);
        norm += exact * exact;
    }
    printf("%d x %d: relative error %.1e\n", rows, cols, std::sqrt(error / norm));

    for (float *p : {W_gpu, x_gpu, y_gpu}) check(cudaFree(p), "freeing memory"); // 7.
    return error > 1e-10 * norm;
}
#endif
