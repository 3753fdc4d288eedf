// Convolutions in large tiles. See conv2d.cu.

template <typename S, u32 ROWS, u32 COLUMNS>
__global__ void WIDE_BOUNDS(ROWS, COLUMNS)
conv2d_forward(Conv conv, const void* x, const f32* w, const f32* bias, S* y) {
    ForwardLoader<S, false, ROWS, COLUMNS> loader(conv, x, w);
    u32 c_out = conv.c_out, positions = conv.positions;
    bool is_vector = is_aligned(IS_WIDE(COLUMNS), y);
    multiply_wide<S, ROWS, COLUMNS>(loader, loader.steps, positions, [=](u32 row, u32, u32 column, f32(&sums)[4][Wide<S>::OF_LANE]) {
        enum { COUNT = Wide<S>::OF_LANE };
        if (column >= c_out) return;
        for (u32 i = 0; i < 4 && row + i < positions; ++i) {
            f32 results[COUNT];
            for (u32 j = 0; j < COUNT; ++j) results[j] = sums[i][j] + bias[column + j];
            write(y + (u64)(row + i) * c_out + column, results, is_vector);
        }
    });
}
