// Convolutions, and the sums of gradients that belong to a bias.

template <typename S, typename Real = typename As<S>::Real>
__global__ void conv2d_forward(Conv conv, const void* x, const Real* w, const Real* bias, S* y) {
    u32 positions = conv.positions;
    Patches<S, false> a(conv, x);
    Transposed<Weight<S>> b = {Weight<S>{w, conv.c_out}};
    u32 steps = conv.kernel_height * conv.kernel_width * conv.c_in;
    multiply_tile<S>(a, b, positions, conv.c_out, TILE, 0, steps, conv.has_planes, true,
                  [=](u32 row, u32 column, Real(&sums)[4][4]) {
                      u32 height = conv.out_height(), width = conv.out_width();
                      Layout layout(conv, height, width, conv.c_out);
                      for (u32 i = 0; i < 4 && row + i < positions; ++i) {
                          Position p = position_of<false>(row + i, height, width);
                          for (u32 j = 0; j < 4 && column + j < conv.c_out; ++j) {
                              u64 at = layout.at(p.n, p.i, p.j) + (u64)(column + j) * layout.channel;
                              y[at] = As<S>::store(sums[i][j] + bias[column + j]);
                          }
                      }
                  });
}

// The sums over the positions of each part: partials is (parts, channels). An image has `of_image`
// positions. Where the winner is 4, if there are winners, the gradient is not counted. A block has 32
// channels and 8 rows of threads, each of which sums every 8th position, in order; the 8 sums are added in order.
template <typename S, typename Real = typename As<S>::Real>
__global__ void sum_channels(Conv conv, const S* dy, const u8* winners, u32 of_image, Real* partials) {
    u32 channels = conv.c_out;
    __shared__ Real sums[8][32];
    u32 channel = blockIdx.x * 32 + threadIdx.x;
    u32 begin = blockIdx.y * conv.of_part, end = min(begin + conv.of_part, conv.positions);
    Real sum = 0;
    if (channel >= channels) end = begin;
    #pragma unroll 4
    for (u32 m = begin + threadIdx.y; m < end; m += 8) {
        u64 at = (u64)m * channels + channel;
        if (conv.has_planes) {
            u64 n = m / of_image, place = m % of_image;
            at = (n * channels + channel) * of_image + place;
        }
        Real x = load(dy[at]);
        sum += winners && winners[at] == 4 ? 0 : x;
    }
    sums[threadIdx.y][threadIdx.x] = sum;
    __syncthreads();
    if (threadIdx.y != 0 || channel >= channels) return;
    for (u32 k = 1; k < 8; ++k) sum += sums[k][threadIdx.x];
    partials[(u64)blockIdx.y * channels + channel] = sum;
}
