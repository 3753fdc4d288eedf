// Convolutions in large tiles. See conv2d.cu.

template <typename S, u32 ROWS, u32 COLUMNS>
__device__ void conv2d_forward(const Conv& conv, Images<S> x, const f32* w, const f32* bias, S* y, u32 positions) {
    ForwardLoader<S, false, ROWS, COLUMNS> loader(conv, x, w, positions);
    u32 c_out = conv.c_out;
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

#define FOR_FORWARD(S, TILE, ROWS, COLUMNS)                                                                                \
    extern "C" __global__ void WIDE_BOUNDS(ROWS, COLUMNS)                                                                  \
        conv2d_forward_##TILE##_##S(CONV_ARGUMENTS, const void* x, u32 is_f32, const f32* w, const f32* bias, S* y,        \
                                    u32 positions) {                                                                       \
        conv2d_forward<S, ROWS, COLUMNS>(CONV, Images<S>{x, is_f32}, w, bias, y, positions);                               \
    }
#define FOR_INPUT(S, TILE, ROWS, COLUMNS)                                                                                  \
    extern "C" __global__ void WIDE_BOUNDS(ROWS, COLUMNS)                                                                  \
        conv2d_backward_input_##TILE##_##S(CONV_ARGUMENTS, const f32* w, const S* dy, u32 positions, void* dx,             \
                                           u32 is_f32) {                                                                   \
        wide_input_gradient<S, false, ROWS, COLUMNS>(CONV, w, dy, 0, positions, dx, is_f32);                               \
    }
#define FOR_WEIGHT(S, TILE, SIDE_OF_TILE)                                                                                  \
    extern "C" __global__ void WIDE_BOUNDS(SIDE_OF_TILE, SIDE_OF_TILE)                                                     \
        conv2d_backward_weight_##TILE##_##S(CONV_ARGUMENTS, const void* x, u32 is_f32, const S* dy, u32 positions,         \
                                            u32 positions_of_part, f32* partials) {                                        \
        wide_weight_gradient<S, false, SIDE_OF_TILE>(CONV, Images<S>{x, is_f32}, dy, 0, positions, positions_of_part,      \
                                                     partials);                                                            \
    }
WIDE_TYPES(WIDE_TILES)
