// Convolution, bias, ReLU and pool in large tiles. See conv_relu_pool.cu.

template <typename S, u32 ROWS, u32 COLUMNS>
__global__ void WIDE_BOUNDS(ROWS, COLUMNS)
conv_relu_pool_forward(Conv conv, const void* x, const f32* w, const f32* bias, S* y, u8* winners) {
    ForwardLoader<S, true, ROWS, COLUMNS> loader(conv, x, w);
    u32 c_out = conv.c_out, positions = conv.positions;
    bool is_vector = is_aligned(IS_WIDE(COLUMNS), y) && is_aligned(IS_WIDE(COLUMNS), winners, Wide<S>::OF_LANE);
    multiply_wide<S, ROWS, COLUMNS>(loader, loader.steps, positions, [=](u32 row, u32, u32 column, f32(&sums)[4][Wide<S>::OF_LANE]) {
        enum { COUNT = Wide<S>::OF_LANE };
        if (column >= c_out || row >= positions) return;
        f32 results[COUNT];
        u32 places = 0;
        #pragma unroll
        for (u32 j = 0; j < COUNT; ++j) {
            f32 most = sums[0][j];
            u32 winner = 0;
            #pragma unroll
            for (u32 i = 1; i < 4; ++i) {
                bool wins = sums[i][j] > most || sums[i][j] != sums[i][j];
                most = wins ? sums[i][j] : most;
                winner = wins ? i : winner;
            }
            f32 sum = most + bias[column + j];
            bool passes = sum > 0 || sum != sum;
            results[j] = passes ? sum : 0;
            places |= (passes ? winner : 4) << (8 * j);
        }
        u64 at = (u64)(row / 4) * c_out + column;
        write(y + at, results, is_vector);
        if (is_vector && COUNT == 4) {
            *(u32*)(winners + at) = places;
        } else if (is_vector && COUNT == 2) {
            *(u16*)(winners + at) = places;
        } else {
            for (u32 j = 0; j < COUNT; ++j) winners[at + j] = places >> (8 * j);
        }
    });
}
