// How many steps each point of the plane takes to leave the circle of radius 2.

__global__ void mandelbrot(int* steps, int width, int height, double left, double top, double scale, int most) {
    int x = blockIdx.x * blockDim.x + threadIdx.x, y = blockIdx.y * blockDim.y + threadIdx.y;
    if (x >= width || y >= height) return;
    double cr = left + x * scale, ci = top - y * scale, zr = 0.0, zi = 0.0;
    int n = 0;
    while (n < most && zr * zr + zi * zi <= 4.0) {
        double next = zr * zr - zi * zi + cr;
        zi = 2.0 * zr * zi + ci;
        zr = next;
        n++;
    }
    steps[y * width + x] = n;
}
