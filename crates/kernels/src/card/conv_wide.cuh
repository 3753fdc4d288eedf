// The same products in larger tiles, for images whose channels lie side by side and come by whole vectors of 16 bytes.
//
// A warp has 64 x 32 results. Tiles lie twice in shared memory: while one of them is multiplied the next one is on its way in
// registers. A factor is read by lines, along which its memory runs: the rows of a tile, or its steps.

enum { WARP_ROWS = 64, WARP_COLUMNS = 32 };

// 16 bytes of numbers.
struct Bits { u32 of[4]; };

// Numbers of a vector, vectors of the steps of a tile, steps of a tile, parts of the steps that are multiplied one after the other,
// and results of a lane that lie side by side.
template <typename S> struct Wide {
    enum { LEN = 16 / sizeof(S), SLOTS = 4, DEPTH = SLOTS * LEN, PARTS = 2, OF_LANE = sizeof(S) == 4 ? 4 : 2 };
};
template <> struct Wide<f32> {
    enum { LEN = 4, SLOTS = 2, DEPTH = SLOTS * LEN, PARTS = 1, OF_LANE = 4 };
};

// Sets number e of a vector of zeros.
__device__ __forceinline__ void set(Bits& bits, u32 e, f32 x) { bits.of[e] = __float_as_uint(x); }
__device__ __forceinline__ void set(Bits& bits, u32 e, tf32 x) { set(bits, e, x.number); }
template <typename S> __device__ __forceinline__ void set(Bits& bits, u32 e, S x) { bits.of[e / 2] |= (u32)x.bits << (e % 2 * 16); }

// Wide tiles are for operands whose vectors can be loaded and stored at once. Others say by their addresses what they allow.
__device__ __forceinline__ bool is_aligned(bool is_wide, const void* at, u32 bytes = 16) {
    return is_wide || (u64)at % bytes == 0;
}

// Vector number `at`, number after number unless it may be loaded at once.
template <typename S> __device__ __forceinline__ Bits load_bits(const S* from, u32 at, bool is_vector) {
    Bits bits = {};
    if (is_vector) {
        uint4 loaded = ((const uint4*)from)[at];
        bits = Bits{loaded.x, loaded.y, loaded.z, loaded.w};
    } else {
        #pragma unroll
        for (u32 e = 0; e < Wide<S>::LEN; ++e) set(bits, e, from[(u64)at * Wide<S>::LEN + e]);
    }
    return bits;
}

// A vector of weights, which become S when they are stored to a tile.
template <typename S> struct Weights {
    Bits of[4 / sizeof(S)];

    __device__ __forceinline__ void load(const f32* w, u32 at, bool is_there, bool is_vector) {
        #pragma unroll
        for (u32 k = 0; k < 4 / sizeof(S); ++k) of[k] = is_there ? load_bits(w, at / 4 + k, is_vector) : Bits{};
    }
    __device__ __forceinline__ Bits bits() const {
        Bits bits = of[0];
        if (sizeof(S) == 2) {
            #pragma unroll
            for (u32 k = 0; k < 4; ++k) {
                bits.of[k] = pair_of((S*)0, __uint_as_float(of[k / 2 * (4 / sizeof(S) - 1)].of[k % 2 * 2]),
                                     __uint_as_float(of[k / 2 * (4 / sizeof(S) - 1)].of[k % 2 * 2 + 1]));
            }
        }
        return bits;
    }

private:
    static __device__ __forceinline__ u32 pair_of(f32*, f32, f32) { return 0; }
    static __device__ __forceinline__ u32 pair_of(tf32*, f32, f32) { return 0; }
    template <typename T> static __device__ __forceinline__ u32 pair_of(T*, f32 x, f32 y) { return Tensor<T>::pair(x, y); }
};

// A vector of the gradient of the output, with the winners beside it if there are some.
template <typename S, bool POOLED> struct Winning {
    Bits of;
    // Zero bytes where the gradient goes to the place.
    u32 others[Wide<S>::LEN / 4];

    __device__ __forceinline__ void clear() {
        of = Bits{};
        for (u32 k = 0; k < Wide<S>::LEN / 4; ++k) others[k] = 0;
    }
    __device__ __forceinline__ void load(const S* dy, const u8* winners, u32 at, u32 place, bool is_vector) {
        of = load_bits(dy, at, is_vector);
        if (!POOLED) return;
        if (is_vector && sizeof(S) == 4) {
            others[0] = ((const u32*)winners)[at];
        } else if (is_vector) {
            uint2 eight = ((const uint2*)winners)[at];
            others[0] = eight.x, others[Wide<S>::LEN / 8] = eight.y;
        } else {
            for (u32 e = 0; e < Wide<S>::LEN; ++e) others[e / 4] |= (u32)winners[(u64)at * Wide<S>::LEN + e] << (e % 4 * 8);
        }
        for (u32 k = 0; k < Wide<S>::LEN / 4; ++k) others[k] ^= place * 0x01010101u;
    }
    __device__ __forceinline__ Bits bits() const {
        Bits bits = of;
        if (!POOLED) return bits;
        #pragma unroll
        for (u32 k = 0; k < 4; ++k) {
            // The highest bit of a byte says whether there is another winner, and then fills the bytes of a number.
            u32 bytes = others[k * Wide<S>::LEN / 16];
            bytes |= (bytes & 0x7f7f7f7fu) + 0x7f7f7f7fu;
            u32 selector = sizeof(S) == 4 ? 0x8888u + 0x1111u * k : 0x9988u + 0x2222u * (k % 2), mask;
            asm("prmt.b32 %0, %1, %1, %2;" : "=r"(mask) : "r"(bytes), "r"(selector));
            bits.of[k] &= ~mask;
        }
        return bits;
    }
};

// A step that moves on by less than a kernel at a time.
struct MovingStep : Step {
    using Step::Step;

    __device__ __forceinline__ void move(u32 steps, u32 kernel_width, u32 channels) {
        for (channel += steps; channel >= channels; channel -= channels) {
            if (++v == kernel_width) {
                v = 0;
                ++u;
            }
        }
    }
};

// A position of an image as the first place of a kernel's window: its number in a batch, which may be that of padding, its row
// and its column. No step is within an image from nowhere().
struct Pixel {
    u32 at;
    // Both are small numbers, and share a register.
    u32 y_x;

    __device__ __forceinline__ Pixel() {}
    __device__ __forceinline__ Pixel(u32 at, i32 y, i32 x) : at(at), y_x((u32)y << 16 | (u16)x) {}
    static __device__ Pixel nowhere() { return Pixel(0, -(1 << 15), 0); }
    __device__ __forceinline__ i32 y() const { return (i32)y_x >> 16; }
    __device__ __forceinline__ i32 x() const { return (i32)(y_x << 16) >> 16; }
};

// Patches by vectors along the steps.
template <typename S, bool POOLED> struct WidePatches {
    Conv conv;
    Images<S> x;
    // Rows and columns of positions, or of windows.
    u32 height, width;
    bool is_vector;

    __device__ WidePatches(const Conv& conv, const void* x, bool is_wide)
        : conv(conv), x{x, conv.is_f32}, height(conv.out_height() / (POOLED ? 2 : 1)), width(conv.out_width() / (POOLED ? 2 : 1)),
          is_vector(is_wide || (conv.c_in % Wide<S>::LEN == 0 && is_aligned(false, x) &&
                                (sizeof(S) == 4 || !conv.is_f32))) {}

    __device__ __forceinline__ Pixel pixel(u32 n, u32 i, u32 j) const {
        i32 y = (i32)(i * conv.stride) - (i32)conv.padding, x = (i32)(j * conv.stride) - (i32)conv.padding;
        return Pixel((n * conv.height + (u32)y) * conv.width + (u32)x, y, x);
    }
    __device__ Pixel pixel(u32 m) const {
        Position p = position_of<POOLED>(m, height, width);
        return pixel(p.n, p.i, p.j);
    }

    __device__ __forceinline__ Bits load(const Pixel& pixel, MovingStep step) const {
        Bits bits = {};
        if (is_vector) {
            if (is_inside(pixel, step)) {
                u32 vectors = conv.c_in / Wide<S>::LEN;
                bits = load_bits((const S*)x.elems, number(pixel, step) * vectors + step.channel / Wide<S>::LEN, true);
            }
            return bits;
        }
        // The steps of a row of the window are numbers side by side, and so are those of the image's row.
        u32 of_row = conv.kernel_width * conv.c_in, at = step.v * conv.c_in + step.channel, of_image = conv.width * conv.c_in;
        i32 first = pixel.x() * (i32)conv.c_in;
        i64 from = (i64)(i32)(pixel.at + step.u * conv.width) * conv.c_in;
        bool has_row = is_row_inside(pixel, step);
        #pragma unroll
        for (u32 e = 0; e < Wide<S>::LEN; ++e) {
            if (has_row && (u32)(first + (i32)at) < of_image) {
                bool is_narrowed = sizeof(S) == 2 && x.is_f32;
                set(bits, e, is_narrowed ? As<S>::store(((const f32*)x.elems)[from + at]) : ((const S*)x.elems)[from + at]);
            }
            if (++at == of_row) {
                at = 0;
                ++step.u;
                from += of_image;
                has_row = is_row_inside(pixel, step);
            }
        }
        return bits;
    }

private:
    __device__ __forceinline__ bool is_row_inside(const Pixel& pixel, const Step& step) const {
        return step.u < conv.kernel_height && (u32)(pixel.y() + (i32)step.u) < conv.height;
    }
    __device__ __forceinline__ bool is_inside(const Pixel& pixel, const Step& step) const {
        return is_row_inside(pixel, step) && (u32)(pixel.x() + (i32)step.v) < conv.width;
    }
    __device__ __forceinline__ u32 number(const Pixel& pixel, const Step& step) const {
        return pixel.at + step.u * conv.width + step.v;
    }
};

// A factor's tile in shared memory, in 16 bits: vectors of lines. Vectors of a line change places so that 8 of them at the same
// place of neighboring lines are in different banks.
template <typename S, u32 SIDE, bool IS_BY_STEPS> struct WideTile {
    enum { SLOTS = IS_BY_STEPS ? SIDE / 8 : 4, LINES = IS_BY_STEPS ? 32 : SIDE };
    uint4 of[LINES * SLOTS];

    // The number of a vector.
    static __device__ __forceinline__ u32 at(u32 line, u32 slot) {
        return line * SLOTS + (slot ^ (IS_BY_STEPS ? line % 8 : line / 2 % 4));
    }
    __device__ __forceinline__ void put(u32 line, u32 slot, const Bits& bits) {
        of[at(line, slot)] = make_uint4(bits.of[0], bits.of[1], bits.of[2], bits.of[3]);
    }
};
// The same in f32: rows lie side by side.
template <u32 SIDE, bool IS_BY_STEPS> struct WideTile<f32, SIDE, IS_BY_STEPS> {
    f32 of[8][SIDE + 4];

    __device__ __forceinline__ void put(u32 line, u32 slot, const Bits& bits) {
        if (IS_BY_STEPS) {
            *(uint4*)&of[line][4 * slot] = make_uint4(bits.of[0], bits.of[1], bits.of[2], bits.of[3]);
        } else {
            #pragma unroll
            for (u32 e = 0; e < 4; ++e) of[4 * slot + e][line] = __uint_as_float(bits.of[e]);
        }
    }
};
// Where the 4 rows (or columns) of 32 begin that a lane has in the fragments of TF32 if its row of a fragment is g: fragments
// take turns, so that a lane loads and writes 4 at once. Those of neighboring g at 4 steps are in different banks.
__device__ __forceinline__ u32 four(u32 g) { return g % 2 * 16 + g / 2 * 4; }

__device__ __forceinline__ uint4 rounded(const Bits& bits) {
    return make_uint4(Tensor<tf32>::rounded(bits.of[0]), Tensor<tf32>::rounded(bits.of[1]), Tensor<tf32>::rounded(bits.of[2]),
                      Tensor<tf32>::rounded(bits.of[3]));
}

// The same in TF32. Lines of steps lie as in f32, and are loaded as two vectors: rows at a step and at the one 4 after it.
template <u32 SIDE> struct WideTile<tf32, SIDE, true> {
    u32 of[16][SIDE + 4];

    __device__ __forceinline__ void put(u32 line, u32 slot, const Bits& bits) { *(uint4*)&of[line][4 * slot] = rounded(bits); }

    // 2 fragments of a, with the 32 rows from `first` on, from a tile at this address of shared memory.
    static __device__ __forceinline__ void load_rows(u32 (&to)[2][4], u32 tile, u32 part, u32 first) {
        uint4 x = load(tile, part, 0, first), y = load(tile, part, 4, first);
        to[0][0] = x.x, to[0][1] = x.y, to[0][2] = y.x, to[0][3] = y.y;
        to[1][0] = x.z, to[1][1] = x.w, to[1][2] = y.z, to[1][3] = y.w;
    }
    // 4 fragments of b, two and two, with the 32 columns from `first` on.
    static __device__ __forceinline__ void load_columns(u32 (&to)[2][4], u32 tile, u32 part, u32 first) {
        uint4 x = load(tile, part, 0, first), y = load(tile, part, 4, first);
        to[0][0] = x.x, to[0][1] = y.x, to[0][2] = x.y, to[0][3] = y.y;
        to[1][0] = x.z, to[1][1] = y.z, to[1][2] = x.w, to[1][3] = y.w;
    }

private:
    static __device__ __forceinline__ uint4 load(u32 tile, u32 part, u32 step, u32 first) {
        u32 lane = threadIdx.x % 32, at = (8 * part + step + lane % 4) * (SIDE + 4) + first + four(lane / 4);
        uint4 to;
        // In the order of the text, so that the registers suffice.
        asm volatile("ld.shared.v4.u32 {%0,%1,%2,%3}, [%4];" : "=r"(to.x), "=r"(to.y), "=r"(to.z), "=r"(to.w)
                     : "r"(tile + 4 * at) : "memory");
        return to;
    }
};
// Lines of rows lie as in 16 bits, with 4 steps to a vector.
template <u32 SIDE> struct WideTile<tf32, SIDE, false> : WideTile<bf16, SIDE, false> {
    __device__ __forceinline__ void put(u32 line, u32 slot, const Bits& bits) { this->of[at(line, slot)] = rounded(bits); }

    static __device__ __forceinline__ void load_rows(u32 (&to)[2][4], u32 tile, u32 part, u32 first) {
        u32 lane = threadIdx.x % 32;
        #pragma unroll
        for (u32 i = 0; i < 2; ++i) load_matrices(to[i], tile + 16 * at(first + 16 * i + lane % 16, 2 * part + lane / 16));
    }
    static __device__ __forceinline__ void load_columns(u32 (&to)[2][4], u32 tile, u32 part, u32 first) {
        u32 lane = threadIdx.x % 32;
        #pragma unroll
        for (u32 j = 0; j < 2; ++j) {
            load_matrices(to[j], tile + 16 * at(first + 16 * j + lane / 16 * 8 + lane % 8, 2 * part + lane / 8 % 2));
        }
    }

private:
    using WideTile<bf16, SIDE, false>::at;
};

// The tiles of both factors, and how they are multiplied in 16 bits. If the rows are lines of a, 4 rows that follow each other
// are those of one lane; otherwise, rows with a distance of 8.
template <typename S, u32 ROWS, u32 COLUMNS, bool IS_A_BY_STEPS, bool IS_B_BY_STEPS> struct WideTiles {
    typedef Sums Results[4][4];
    WideTile<S, ROWS, IS_A_BY_STEPS> a[2];
    WideTile<S, COLUMNS, IS_B_BY_STEPS> b[2];

    // The row that lies in a line of a: the row of place p of window w is in matrix p of those that have 8 windows each.
    static __device__ __forceinline__ u32 row_of(u32 line) {
        u32 window = line % 8 + line / 32 % 2 * 8, place = line / 8 % 4;
        return line / WARP_ROWS * WARP_ROWS + 4 * window + place;
    }
    static __device__ __forceinline__ u32 column_of(u32 line) { return line; }

    __device__ __forceinline__ void multiply(u32 of, u32 part, u32 row, u32 column, u32, Results& sums) {
        u32 lane = threadIdx.x % 32, k = 16 * part;
        u32 of_a = shared_address(a) + of * (u32)sizeof(*a), of_b = shared_address(b) + of * (u32)sizeof(*b);
        u32 x[4], y[2][4];
        #pragma unroll
        for (u32 j = 0; j < 2; ++j) {
            if (IS_B_BY_STEPS) {
                load_transposed(y[j], of_b + 16 * b->at(k + lane % 16, column / 8 + 2 * j + lane / 16));
            } else {
                load_matrices(y[j], of_b + 16 * b->at(column + 16 * j + lane / 16 * 8 + lane % 8, k / 8 + lane / 8 % 2));
            }
        }
        #pragma unroll
        for (u32 i = 0; i < 4; ++i) {
            if (IS_A_BY_STEPS) {
                load_transposed(x, of_a + 16 * a->at(k + lane / 16 * 8 + lane % 8, row / 8 + 2 * i + lane / 8 % 2));
            } else {
                load_matrices(x, of_a + 16 * a->at(row + 16 * i + lane % 16, k / 8 + lane / 16));
            }
            #pragma unroll
            for (u32 j = 0; j < 4; ++j) Tensor<S>::multiply(sums[i][j], x, y[j / 2][j % 2 * 2], y[j / 2][j % 2 * 2 + 1]);
        }
    }

    // Calls finish(row, distance, column, sums) for 4 rows and 2 columns at a time.
    template <typename Finish> static __device__ __forceinline__ void finish_with(u32 row, u32 column, Results& sums, Finish finish) {
        u32 lane = threadIdx.x % 32;
        #pragma unroll
        for (u32 i = 0; i < 2; ++i) {
            u32 first = row + 32 * i + lane / 4 * (IS_A_BY_STEPS ? 1 : 4);
            #pragma unroll
            for (u32 j = 0; j < 4; ++j) {
                f32 results[4][2];
                #pragma unroll
                for (u32 p = 0; p < 4; ++p) {
                    for (u32 c = 0; c < 2; ++c) results[p][c] = sums[2 * i + p / 2][j][p % 2 * 2 + c];
                }
                finish(first, IS_A_BY_STEPS ? 8 : 1, column + 8 * j + lane % 4 * 2, results);
            }
        }
    }
};
// The same in f32: a thread has 4 x 4 results four times.
template <u32 ROWS, u32 COLUMNS, bool IS_A_BY_STEPS, bool IS_B_BY_STEPS>
struct WideTiles<f32, ROWS, COLUMNS, IS_A_BY_STEPS, IS_B_BY_STEPS> {
    typedef f32 Results[2][2][4][4];
    WideTile<f32, ROWS, IS_A_BY_STEPS> a[2];
    WideTile<f32, COLUMNS, IS_B_BY_STEPS> b[2];

    static __device__ __forceinline__ u32 row_of(u32 line) { return line; }
    static __device__ __forceinline__ u32 column_of(u32 line) { return line; }

    __device__ __forceinline__ void multiply(u32 of, u32, u32 row, u32 column, u32 rows, Results& sums) const {
        u32 lane = threadIdx.x % 32;
        row += lane / 4 * 4;
        column += lane % 4 * 4;
        #pragma unroll
        for (u32 k = 0; k < 8; ++k) {
            f32 x[2][4], y[2][4];
            #pragma unroll
            for (u32 half = 0; half < 2; ++half) {
                float4 rows_of = *(const float4*)&a[of].of[k][row + 32 * half];
                float4 columns_of = *(const float4*)&b[of].of[k][column + 16 * half];
                x[half][0] = rows_of.x, x[half][1] = rows_of.y, x[half][2] = rows_of.z, x[half][3] = rows_of.w;
                y[half][0] = columns_of.x, y[half][1] = columns_of.y, y[half][2] = columns_of.z, y[half][3] = columns_of.w;
            }
            #pragma unroll
            for (u32 m = 0; m < 2; ++m) {
                // A small tile of a first layer has fewer rows.
                if (ROWS == WARP_ROWS && m == 1 && rows <= 32) continue;
                #pragma unroll
                for (u32 n = 0; n < 2; ++n) {
                    #pragma unroll
                    for (u32 i = 0; i < 4; ++i) {
                        #pragma unroll
                        for (u32 j = 0; j < 4; ++j) sums[m][n][i][j] = fused(x[m][i], y[n][j], sums[m][n][i][j]);
                    }
                }
            }
        }
    }

    template <typename Finish> static __device__ __forceinline__ void finish_with(u32 row, u32 column, Results& sums, Finish finish) {
        u32 lane = threadIdx.x % 32;
        #pragma unroll
        for (u32 m = 0; m < 2; ++m) {
            #pragma unroll
            for (u32 n = 0; n < 2; ++n) finish(row + 32 * m + lane / 4 * 4, 1, column + 16 * n + lane % 4 * 4, sums[m][n]);
        }
    }
};
// The same in TF32: a lane has 4 x 4 results four times, as in f32.
template <u32 ROWS, u32 COLUMNS, bool IS_A_BY_STEPS, bool IS_B_BY_STEPS>
struct WideTiles<tf32, ROWS, COLUMNS, IS_A_BY_STEPS, IS_B_BY_STEPS> {
    typedef Sums Results[4][4];
    WideTile<tf32, ROWS, IS_A_BY_STEPS> a[2];
    WideTile<tf32, COLUMNS, IS_B_BY_STEPS> b[2];

    // The row, or column, that lies in a line.
    static __device__ __forceinline__ u32 row_of(u32 line) { return line / 32 * 32 + four(line % 8) + line / 8 % 4; }
    static __device__ __forceinline__ u32 column_of(u32 line) { return row_of(line); }

    __device__ __forceinline__ void multiply(u32 of, u32 part, u32 row, u32 column, u32 rows, Results& sums) {
        u32 x[2][4], y[2][4];
        u32 of_a = shared_address(a) + of * (u32)sizeof(*a), of_b = shared_address(b) + of * (u32)sizeof(*b);
        b->load_columns(y, of_b, part, column);
        #pragma unroll
        for (u32 m = 0; m < 2; ++m) {
            if (ROWS == WARP_ROWS && m == 1 && rows <= 32) continue;
            a->load_rows(x, of_a, part, row + 32 * m);
            #pragma unroll
            for (u32 i = 0; i < 2; ++i) {
                #pragma unroll
                for (u32 j = 0; j < 4; ++j) {
                    Tensor<tf32>::multiply(sums[2 * m + i][j], x[i], y[j / 2][j % 2 * 2], y[j / 2][j % 2 * 2 + 1]);
                }
            }
        }
    }

    template <typename Finish> static __device__ __forceinline__ void finish_with(u32 row, u32 column, Results& sums, Finish finish) {
        u32 lane = threadIdx.x % 32;
        #pragma unroll
        for (u32 m = 0; m < 2; ++m) {
            #pragma unroll
            for (u32 n = 0; n < 2; ++n) {
                f32 results[4][4];
                #pragma unroll
                for (u32 i = 0; i < 4; ++i) {
                    #pragma unroll
                    for (u32 j = 0; j < 4; ++j) results[i][j] = sums[2 * m + i / 2][j][i % 2 * 2 + n];
                }
                finish(row + 32 * m + four(lane / 4), 1, column + four(lane % 4 * 2 + n), results);
            }
        }
    }
};

// The threads of a tile, each of which has 64 results, and how many blocks of them a multiprocessor should hold: a thread may
// have 128 registers, or 168 if it loads numbers that may be no whole vectors.
#define IS_WIDE(COLUMNS) ((COLUMNS) == 128)
#define WIDE_THREADS(ROWS, COLUMNS) ((ROWS) * (COLUMNS) / 64)
#define WIDE_BOUNDS(ROWS, COLUMNS) \
    __launch_bounds__(WIDE_THREADS(ROWS, COLUMNS), (IS_WIDE(COLUMNS) ? 512 : 384) / WIDE_THREADS(ROWS, COLUMNS))

// The lines of a tile that a thread loads: `VECTORS` lie in a line, and `COUNT` lines in a tile.
template <u32 VECTORS, u32 COUNT, u32 THREADS_OF_TILE> struct Lines {
    enum { DISTANCE = THREADS_OF_TILE / VECTORS, OWN = COUNT / DISTANCE };
    static_assert(COUNT % DISTANCE == 0, "each thread loads as many lines");
    static __device__ __forceinline__ u32 slot() { return threadIdx.x % VECTORS; }
    static __device__ __forceinline__ u32 line(u32 k) { return threadIdx.x / VECTORS + k * DISTANCE; }
};

// Loads patches by rows, and the weight by steps.
template <typename S, bool POOLED, u32 ROWS, u32 COLUMNS> struct ForwardLoader {
    typedef WideTiles<S, ROWS, COLUMNS, false, true> Tiles;
    typedef Lines<Wide<S>::SLOTS, ROWS, WIDE_THREADS(ROWS, COLUMNS)> OfA;
    typedef Lines<COLUMNS / Wide<S>::LEN, Wide<S>::DEPTH, WIDE_THREADS(ROWS, COLUMNS)> OfB;
    static_assert(OfB::OWN == Wide<S>::PARTS, "a thread loads a line of the weight for each part");
    WidePatches<S, POOLED> patches;
    const f32* w;
    u32 steps, column;
    bool is_vector;
    MovingStep step;
    Pixel pixels[OfA::OWN];
    Bits a[OfA::OWN];
    Weights<S> b;

    __device__ ForwardLoader(const Conv& conv, const void* x, const f32* w)
        : patches(conv, x, IS_WIDE(COLUMNS)), w(w), steps(conv.kernel_height * conv.kernel_width * conv.c_in),
          column(blockIdx.y * COLUMNS + OfB::slot() * Wide<S>::LEN), is_vector(is_aligned(IS_WIDE(COLUMNS), w)),
          step(OfA::slot() * Wide<S>::LEN, conv.kernel_width, conv.c_in) {
        #pragma unroll
        for (u32 k = 0; k < OfA::OWN; ++k) {
            u32 m = blockIdx.x * ROWS + Tiles::row_of(OfA::line(k));
            pixels[k] = m < conv.positions ? patches.pixel(m) : Pixel::nowhere();
        }
    }

    // Loads what is stored to a tile with the steps from `first` on, part after part, and tile after tile.
    __device__ __forceinline__ void load(u32 first, u32 part) {
        const Conv& conv = patches.conv;
        if (part == 0) {
            #pragma unroll
            for (u32 k = 0; k < OfA::OWN; ++k) a[k] = patches.load(pixels[k], step);
            step.move(Wide<S>::DEPTH, conv.kernel_width, conv.c_in);
        }
        u32 row = first + OfB::line(part);
        b.load(w, row * conv.c_out + column, row < steps && column < conv.c_out, is_vector);
    }

    __device__ __forceinline__ void store(Tiles& tiles, u32 to, u32 part) const {
        tiles.b[to].put(OfB::line(part), OfB::slot(), b.bits());
        if (part + 1 < Wide<S>::PARTS) return;
        #pragma unroll
        for (u32 k = 0; k < OfA::OWN; ++k) tiles.a[to].put(OfA::line(k), OfA::slot(), a[k]);
    }
};

// Loads the gradient of the output as the input meets it, and the weight, both by rows.
template <typename S, bool POOLED, u32 ROWS, u32 COLUMNS> struct InputLoader {
    typedef WideTiles<S, ROWS, COLUMNS, false, false> Tiles;
    typedef Lines<Wide<S>::SLOTS, ROWS, WIDE_THREADS(ROWS, COLUMNS)> OfA;
    typedef Lines<Wide<S>::SLOTS, COLUMNS, WIDE_THREADS(ROWS, COLUMNS)> OfB;
    static_assert(OfB::OWN == Wide<S>::PARTS, "a thread loads a line of the weight for each part");
    Conv conv;
    const f32* w;
    const S* dy;
    const u8* winners;
    // Rows and columns of positions of the gradient, or of windows.
    u32 height, width;
    bool is_w_vector, is_vector;
    MovingStep step;
    // The first position of the image of the gradient, and the position of the input in its image.
    Pixel pixels[OfA::OWN];
    Winning<S, POOLED> a[OfA::OWN];
    Weights<S> b;

    __device__ InputLoader(const Conv& conv, const f32* w, const S* dy, const u8* winners)
        : conv(conv), w(w), dy(dy), winners(winners), height(conv.out_height() / (POOLED ? 2 : 1)),
          width(conv.out_width() / (POOLED ? 2 : 1)), is_w_vector(is_aligned(IS_WIDE(COLUMNS), w)),
          is_vector(is_aligned(IS_WIDE(COLUMNS), dy) && is_aligned(IS_WIDE(COLUMNS), winners, Wide<S>::LEN)),
          step(OfA::slot() * Wide<S>::LEN, conv.kernel_width, conv.c_out) {
        #pragma unroll
        for (u32 k = 0; k < OfA::OWN; ++k) {
            u32 m = blockIdx.x * ROWS + Tiles::row_of(OfA::line(k));
            Position p = position_of<false>(m, conv.height, conv.width);
            pixels[k] = m < conv.positions
                            ? Pixel(p.n * height * width, p.i + conv.padding, p.j + conv.padding)
                            : Pixel::nowhere();
        }
    }

    __device__ __forceinline__ void load(u32, u32 part) {
        bool has_step = step.u < conv.kernel_height;
        #pragma unroll
        for (u32 k = 0; part == 0 && k < OfA::OWN; ++k) {
            i32 y = pixels[k].y() - (i32)step.u, x = pixels[k].x() - (i32)step.v;
            u32 i = y, j = x, place = 0;
            bool is_there = has_step && y >= 0 && x >= 0;
            if (conv.stride > 1) {
                is_there = is_there && i % conv.stride == 0 && j % conv.stride == 0;
                i /= conv.stride;
                j /= conv.stride;
            }
            if (POOLED) {
                place = i % 2 * 2 + j % 2;
                i /= 2;
                j /= 2;
            }
            a[k].clear();
            if (is_there && i < height && j < width) {
                u32 vectors = conv.c_out / Wide<S>::LEN;
                u32 at = (pixels[k].at + i * width + j) * vectors + step.channel / Wide<S>::LEN;
                a[k].load(dy, winners, at, place, is_vector);
            }
        }
        u32 c = blockIdx.y * COLUMNS + Tiles::column_of(OfB::line(part));
        u32 at = ((step.u * conv.kernel_width + step.v) * conv.c_in + c) * conv.c_out + step.channel;
        b.load(w, at, has_step && c < conv.c_in, is_w_vector);
        if (part + 1 == Wide<S>::PARTS) step.move(Wide<S>::DEPTH, conv.kernel_width, conv.c_out);
    }

    __device__ __forceinline__ void store(Tiles& tiles, u32 to, u32 part) const {
        tiles.b[to].put(OfB::line(part), OfB::slot(), b.bits());
        if (part + 1 < Wide<S>::PARTS) return;
        #pragma unroll
        for (u32 k = 0; k < OfA::OWN; ++k) tiles.a[to].put(OfA::line(k), OfA::slot(), a[k].bits());
    }
};

// Loads patches and the gradient of the output, both by steps, which are positions.
template <typename S, bool POOLED, u32 SIDE_OF_TILE> struct WeightLoader {
    typedef WideTiles<S, SIDE_OF_TILE, SIDE_OF_TILE, true, true> Tiles;
    typedef Lines<SIDE_OF_TILE / Wide<S>::LEN, Wide<S>::DEPTH, WIDE_THREADS(SIDE_OF_TILE, SIDE_OF_TILE)> Of;
    static_assert(Of::DISTANCE % 4 == 0, "the lines of a thread are the same place of windows");
    // The lines that are loaded with a part. In 4 bytes a thread of a wide tile has no registers for those of all parts.
    enum { LOADED = sizeof(S) == 4 && IS_WIDE(SIDE_OF_TILE) ? Of::OWN / Wide<S>::PARTS : Of::OWN };
    WidePatches<S, POOLED> patches;
    const S* dy;
    const u8* winners;
    // Columns after the last one are those of the last vector. Their results are not kept.
    u32 column, count;
    bool is_vector;
    MovingStep step;
    // The next window, or position: the image, and the row and the column, which are small numbers and share a register.
    struct {
        u32 n, i_j;
    } window;
    Bits a[LOADED];
    Winning<S, POOLED> b[LOADED];

    __device__ WeightLoader(const Conv& conv, const void* x, const S* dy, const u8* winners, u32 begin, u32 count)
        : patches(conv, x, IS_WIDE(SIDE_OF_TILE)), dy(dy), winners(winners),
          column(min(blockIdx.y * SIDE_OF_TILE + Of::slot() * Wide<S>::LEN, conv.c_out - Wide<S>::LEN)), count(count),
          is_vector(is_aligned(IS_WIDE(SIDE_OF_TILE), dy) && is_aligned(IS_WIDE(SIDE_OF_TILE), winners, Wide<S>::LEN)),
          step(blockIdx.x * SIDE_OF_TILE + Of::slot() * Wide<S>::LEN, conv.kernel_width, conv.c_in) {
        u32 first = (begin + Of::line(0)) / (POOLED ? 4 : 1), row = first / patches.width;
        window.i_j = row % patches.height << 16 | first % patches.width;
        window.n = row / patches.height;
    }

    __device__ __forceinline__ void load(u32 first, u32 part) {
        if (part * LOADED >= Of::OWN) return;
        #pragma unroll
        for (u32 k = 0; k < LOADED; ++k) {
            a[k] = Bits{};
            b[k].clear();
            if (first + Of::line(part * LOADED + k) < count) {
                u32 i = window.i_j >> 16, j = window.i_j & 0xffff;
                u32 vectors = patches.conv.c_out / Wide<S>::LEN;
                u32 at = ((window.n * patches.height + i) * patches.width + j) * vectors + column / Wide<S>::LEN;
                // Parts begin with whole windows.
                u32 place = POOLED ? Of::line(0) % 4 : 0;
                b[k].load(dy, winners, at, place, is_vector);
                if (POOLED) {
                    i = 2 * i + place / 2;
                    j = 2 * j + place % 2;
                }
                a[k] = patches.load(patches.pixel(window.n, i, j), step);
            }
            window.i_j += Of::DISTANCE / (POOLED ? 4 : 1);
            while ((window.i_j & 0xffff) >= patches.width) {
                window.i_j += 0x10000 - patches.width;
                if (window.i_j >> 16 == patches.height) {
                    window.i_j &= 0xffff;
                    ++window.n;
                }
            }
        }
    }

    __device__ __forceinline__ void store(Tiles& tiles, u32 to, u32 part) const {
        u32 from = LOADED < Of::OWN ? part * LOADED : 0;
        if (LOADED == Of::OWN && part + 1 < Wide<S>::PARTS) return;
        #pragma unroll
        for (u32 k = 0; k < LOADED; ++k) {
            tiles.a[to].put(Of::line(from + k), Of::slot(), a[k]);
            tiles.b[to].put(Of::line(from + k), Of::slot(), b[k].bits());
        }
    }
};

// Multiplies the tile of a block, of ROWS x COLUMNS results, and gives its results to `finish`: rows along x, columns along y.
template <typename S, u32 ROWS, u32 COLUMNS, typename Loader, typename Finish>
__device__ __forceinline__ void multiply_wide(Loader& loader, u32 steps, u32 rows, Finish finish) {
    typedef typename Loader::Tiles Tiles;
    __shared__ __align__(16) unsigned char shared[sizeof(Tiles)];
    Tiles& tiles = *(Tiles*)shared;
    u32 warp = threadIdx.x / 32;
    u32 row = warp % (ROWS / WARP_ROWS) * WARP_ROWS, column = warp / (ROWS / WARP_ROWS) * WARP_COLUMNS;
    typename Tiles::Results sums = {};
    #pragma unroll
    for (u32 part = 0; part < Wide<S>::PARTS; ++part) {
        loader.load(0, part);
        loader.store(tiles, 0, part);
    }
    __syncthreads();
    u32 of = 0;
    #pragma unroll 1
    for (u32 k = 0; k < steps; k += Wide<S>::DEPTH, of ^= 1) {
        bool has_next = k + Wide<S>::DEPTH < steps;
        #pragma unroll
        for (u32 part = 0; part < Wide<S>::PARTS; ++part) {
            if (has_next) loader.load(k + Wide<S>::DEPTH, part);
            tiles.multiply(of, part, row, column, rows, sums);
            if (has_next) loader.store(tiles, of ^ 1, part);
        }
        __syncthreads();
    }
    Tiles::finish_with(blockIdx.x * ROWS + row, blockIdx.y * COLUMNS + column, sums, finish);
}

// Writes numbers side by side, at once if they may be.
__device__ __forceinline__ void write(f32* to, const f32 (&from)[4], bool is_vector) {
    if (is_vector) {
        *(float4*)to = make_float4(from[0], from[1], from[2], from[3]);
    } else {
        for (u32 k = 0; k < 4; ++k) to[k] = from[k];
    }
}
__device__ __forceinline__ void write(tf32* to, const f32 (&from)[4], bool is_vector) { write((f32*)to, from, is_vector); }
__device__ __forceinline__ void write(f32* to, const f32 (&from)[2], bool is_vector) {
    if (is_vector) {
        *(float2*)to = make_float2(from[0], from[1]);
    } else {
        to[0] = from[0];
        to[1] = from[1];
    }
}
template <typename S> __device__ __forceinline__ void write(S* to, const f32 (&from)[2], bool is_vector) {
    S first = As<S>::store(from[0]), second = As<S>::store(from[1]);
    if (is_vector) {
        *(u32*)to = (u32)first.bits | (u32)second.bits << 16;
    } else {
        to[0] = first;
        to[1] = second;
    }
}

// As weight_gradient.
template <typename S, bool POOLED, u32 SIDE_OF_TILE>
__global__ void WIDE_BOUNDS(SIDE_OF_TILE, SIDE_OF_TILE)
wide_weight_gradient(Conv conv, const void* x, const S* dy, const u8* winners, f32* partials) {
    u32 steps = conv.kernel_height * conv.kernel_width * conv.c_in, c_out = conv.c_out;
    u32 begin = blockIdx.z * conv.of_part, count = min(conv.of_part, conv.positions - begin);
    WeightLoader<S, POOLED, SIDE_OF_TILE> loader(conv, x, dy, winners, begin, count);
    bool is_vector = is_aligned(IS_WIDE(SIDE_OF_TILE), partials);
    multiply_wide<S, SIDE_OF_TILE, SIDE_OF_TILE>(loader, count, steps, [=](u32 row, u32 distance, u32 column, f32(&sums)[4][Wide<S>::OF_LANE]) {
        if (column >= c_out) return;
        for (u32 i = 0; i < 4; ++i, row += distance) {
            if (row < steps) write(partials + ((u64)blockIdx.z * steps + row) * c_out + column, sums[i], is_vector);
        }
    });
}

// As input_gradient.
template <typename S, bool POOLED, u32 ROWS, u32 COLUMNS>
__global__ void WIDE_BOUNDS(ROWS, COLUMNS)
wide_input_gradient(Conv conv, const f32* w, const S* dy, const u8* winners, void* dx) {
    InputLoader<S, POOLED, ROWS, COLUMNS> loader(conv, w, dy, winners);
    u32 steps = conv.kernel_height * conv.kernel_width * conv.c_out, c_in = conv.c_in, positions = conv.positions;
    bool is_vector = is_aligned(IS_WIDE(COLUMNS), dx), is_f32 = conv.is_f32;
    multiply_wide<S, ROWS, COLUMNS>(loader, steps, positions, [=](u32 row, u32, u32 column, f32(&sums)[4][Wide<S>::OF_LANE]) {
        if (column >= c_in) return;
        for (u32 i = 0; i < 4; ++i, ++row) {
            if (row >= positions) return;
            u64 at = (u64)row * c_in + column;
            if (is_f32) write((f32*)dx + at, sums[i], is_vector);
            else write((S*)dx + at, sums[i], is_vector);
        }
    });
}
