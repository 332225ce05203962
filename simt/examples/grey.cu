// A picture's colours to grey, one byte each: three bytes a pixel, and four as uchar4.

__global__ void grey(const unsigned char* rgb, unsigned char* out, int width, int height) {
    int column = blockIdx.x * blockDim.x + threadIdx.x, row = blockIdx.y * blockDim.y + threadIdx.y;
    if (column < width && row < height) {
        int pixel = row * width + column;
        unsigned char r = rgb[3 * pixel], g = rgb[3 * pixel + 1], b = rgb[3 * pixel + 2];
        out[pixel] = (unsigned char)(0.21f * r + 0.72f * g + 0.07f * b);
    }
}

__global__ void grey_rgba(const uchar4* rgba, unsigned char* out, int n) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= n) return;
    uchar4 p = rgba[i];
    out[i] = (77 * p.x + 150 * p.y + 29 * p.z) >> 8;
}
