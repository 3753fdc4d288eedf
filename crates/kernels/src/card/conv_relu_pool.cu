// Convolution, bias, ReLU and 2x2 max-pool. The 4 rows of a thread's results are the 4 places of a window, so a thread pools
// what it has summed.

template <typename S, typename Real = typename As<S>::Real>
__global__ void conv_relu_pool_forward(Conv conv, const void* x, const Real* w, const Real* bias, S* y, u8* winners) {
    u32 positions = conv.positions;
    Patches<S, true> a(conv, x);
    Transposed<Weight<S>> b = {Weight<S>{w, conv.c_out}};
    u32 steps = conv.kernel_height * conv.kernel_width * conv.c_in;
    multiply_tile<S>(a, b, positions, conv.c_out, TILE, 0, steps, conv.has_planes, true,
                  [=](u32 row, u32 column, Real(&sums)[4][4]) {
                      u32 height = conv.out_height() / 2, width = conv.out_width() / 2;
                      Layout layout(conv, height, width, conv.c_out);
                      Position p = position_of<false>(row / 4, height, width);
                      for (u32 j = 0; j < 4 && column + j < conv.c_out; ++j) {
                          Real most = sums[0][j];
                          u8 winner = 0;
                          for (u32 i = 1; i < 4; ++i) {
                              bool wins = sums[i][j] > most || sums[i][j] != sums[i][j];
                              most = wins ? sums[i][j] : most;
                              winner = wins ? i : winner;
                          }
                          Real sum = most + bias[column + j];
                          bool passes = sum > 0 || sum != sum;
                          u64 at = layout.at(p.n, p.i, p.j) + (u64)(column + j) * layout.channel;
                          y[at] = As<S>::store(passes ? sum : 0);
                          winners[at] = passes ? winner : 4;
                      }
                  });
}
