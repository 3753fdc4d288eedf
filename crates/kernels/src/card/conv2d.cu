// Convolutions, and the sums of gradients that belong to a bias.

template <typename S>
__device__ void conv2d_forward(const Conv& conv, Images<S> x, const typename As<S>::Real* w,
                               const typename As<S>::Real* bias, S* y, u32 positions) {
    typedef typename As<S>::Real Real;
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

// The sums over the positions of each part: partials is (parts, channels). There are `positions` in the batch and
// `positions_of_image` in an image. Where the winner is 4, if there are winners, the gradient is not counted. A block has 32
// channels and 8 rows of threads, each of which sums every 8th position, in order; the 8 sums are added in order.
template <typename S>
__device__ void sum_channels(const S* dy, const u8* winners, u32 channels, u32 has_planes, u32 positions,
                             u32 positions_of_image, u32 positions_of_part, typename As<S>::Real* partials) {
    typedef typename As<S>::Real Real;
    __shared__ Real sums[8][32];
    u32 channel = blockIdx.x * 32 + threadIdx.x;
    u32 begin = blockIdx.y * positions_of_part, end = min(begin + positions_of_part, positions);
    Real sum = 0;
    if (channel >= channels) end = begin;
    #pragma unroll 4
    for (u32 m = begin + threadIdx.y; m < end; m += 8) {
        u64 at = (u64)m * channels + channel;
        if (has_planes) {
            u64 n = m / positions_of_image, place = m % positions_of_image;
            at = (n * channels + channel) * positions_of_image + place;
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

#define FOR_STORED(S, R)                                                                                                \
    extern "C" __global__ void conv2d_forward_##S(CONV_ARGUMENTS, const void* x, u32 is_f32, const R* w,                \
                                                  const R* bias, S* y, u32 positions) {                                 \
        conv2d_forward<S>(CONV, Images<S>{x, is_f32}, w, bias, y, positions);                                           \
    }                                                                                                                   \
    extern "C" __global__ void conv2d_backward_weight_##S(CONV_ARGUMENTS, const void* x, u32 is_f32, const S* dy,       \
                                                          u32 positions, u32 positions_of_part, R* partials) {           \
        weight_gradient<S, false>(CONV, Images<S>{x, is_f32}, dy, 0, positions, positions_of_part, partials);           \
    }                                                                                                                   \
    extern "C" __global__ void conv2d_backward_input_##S(CONV_ARGUMENTS, const R* w, const S* dy,                       \
                                                         u32 positions, void* dx, u32 is_f32) {                         \
        input_gradient<S, false>(CONV, w, dy, 0, positions, dx, is_f32);                                                \
    }                                                                                                                   \
    extern "C" __global__ void sum_channels_##S(const S* dy, const u8* winners, u32 channels, u32 has_planes,           \
                                                u32 positions, u32 positions_of_image, u32 positions_of_part,           \
                                                R* partials) {                                                          \
        sum_channels<S>(dy, winners, channels, has_planes, positions, positions_of_image, positions_of_part, partials); \
    }

STORED_TYPES(FOR_STORED)
