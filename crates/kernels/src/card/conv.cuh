// Convolutions as products of matrices that exist only tile by tile, in shared memory.
//
// A factor is a type with `row(i)`, `column(j)` and `at(row, column)`: what an element needs of its row and of its column is
// computed once for many elements. Positions are numbered through a batch: image, row, column; or, if images are pooled, by
// windows of 2x2 and then the place within the window. Steps are numbered kernel row, kernel column, channel.

struct __align__(16) Conv {
    u32 height, width, c_in, c_out, kernel_height, kernel_width, stride, padding;
    // Whether each channel of an image is a plane, and whether the input's images are f32 whatever they are computed with.
    u32 has_planes, is_f32;
    // Positions of the batch for which a kernel has results, or over which it sums; and those of a part.
    u32 positions, of_part;

    __device__ u32 out_height() const { return (height + 2 * padding - kernel_height) / stride + 1; }
    __device__ u32 out_width() const { return (width + 2 * padding - kernel_width) / stride + 1; }
};

struct Layout {
    u64 image;
    u32 row, position, channel;

    __device__ Layout(const Conv& conv, u32 height, u32 width, u32 channels) {
        image = (u64)height * width * channels;
        row = conv.has_planes ? width : width * channels;
        position = conv.has_planes ? 1 : channels;
        channel = conv.has_planes ? height * width : 1;
    }

    __device__ u64 at(u32 n, u32 i, u32 j) const { return n * image + (u64)i * row + j * position; }
};

// Images that are computed with as S. They may be stored as f32, as those of a first layer are.
template <typename S> struct Images {
    const void* elems;
    u32 is_f32;

    __device__ typename As<S>::Real load_at(u64 at) const {
        return load(is_f32 ? As<S>::store(((const f32*)elems)[at]) : ((const S*)elems)[at]);
    }
};

struct Position {
    u32 n, i, j, window, place;
};

template <bool POOLED> __device__ __forceinline__ Position position_of(u32 m, u32 height, u32 width) {
    Position p;
    p.window = POOLED ? m / 4 : m;
    p.place = POOLED ? m % 4 : 0;
    p.j = p.window % width;
    u32 rest = p.window / width;
    p.i = rest % height;
    p.n = rest / height;
    if (POOLED) {
        p.i = 2 * p.i + p.place / 2;
        p.j = 2 * p.j + p.place % 2;
    }
    return p;
}

// Step k as kernel row, kernel column, channel.
struct Step {
    u32 u, v, channel;

    __device__ Step(u32 k, u32 kernel_width, u32 channels) {
        u32 rest = k / channels;
        channel = k % channels;
        u = rest / kernel_width;
        v = rest % kernel_width;
    }
};

// Patches of the input: (output positions, steps). Positions are those of windows if POOLED.
template <typename S, bool POOLED> struct Patches {
    typedef typename As<S>::Real Real;
    Conv conv;
    Images<S> x;
    Layout layout;
    // Rows and columns of positions, or of windows.
    u32 height, width;

    struct Row {
        u64 image;
        i32 y, x;
    };
    struct Column {
        i32 u, v;
        u64 channel;
    };

    __device__ Patches(const Conv& conv, const void* x)
        : conv(conv), x{x, conv.is_f32}, layout(conv, conv.height, conv.width, conv.c_in), height(conv.out_height()),
          width(conv.out_width()) {
        if (POOLED) {
            height /= 2;
            width /= 2;
        }
    }

    __device__ Row row(u32 m) const {
        Position p = position_of<POOLED>(m, height, width);
        return Row{p.n * layout.image, (i32)(p.i * conv.stride) - (i32)conv.padding,
                   (i32)(p.j * conv.stride) - (i32)conv.padding};
    }

    __device__ Column column(u32 k) const {
        Step step(k, conv.kernel_width, conv.c_in);
        return Column{(i32)step.u, (i32)step.v, (u64)step.channel * layout.channel};
    }

    __device__ Real at(const Row& row, const Column& column) const {
        i32 i = row.y + column.u, j = row.x + column.v;
        if (i < 0 || i >= (i32)conv.height || j < 0 || j >= (i32)conv.width) return 0;
        return x.load_at(row.image + layout.at(0, i, j) + column.channel);
    }
};

// The gradient of the output: (output positions, channels). If POOLED it is that after the pool, and goes to the winners.
template <typename S, bool POOLED> struct Gradients {
    typedef typename As<S>::Real Real;
    const S* dy;
    const u8* winners;
    Layout layout;
    u32 height, width;

    struct Row {
        u64 at;
        u32 place;
    };
    typedef u64 Column;

    __device__ Gradients(const Conv& conv, const S* dy, const u8* winners)
        : Gradients(conv, dy, winners, conv.out_height() / (POOLED ? 2 : 1), conv.out_width() / (POOLED ? 2 : 1)) {}
    __device__ Gradients(const Conv& conv, const S* dy, const u8* winners, u32 height, u32 width)
        : dy(dy), winners(winners), layout(conv, height, width, conv.c_out), height(height), width(width) {}

    __device__ Row row(u32 m) const {
        Position p = position_of<POOLED>(m, height, width);
        return POOLED ? Row{layout.at(p.n, p.i / 2, p.j / 2), p.place} : Row{layout.at(p.n, p.i, p.j), 0};
    }

    __device__ Column column(u32 o) const { return (u64)o * layout.channel; }

    __device__ Real at(const Row& row, Column column) const {
        if (POOLED && winners[row.at + column] != row.place) return 0;
        return load(dy[row.at + column]);
    }
};

// The gradient of the output as the input meets it: (input positions, steps), where steps have channels of the output.
template <typename S, bool POOLED> struct Spread {
    typedef typename As<S>::Real Real;
    Conv conv;
    Gradients<S, POOLED> gradients;

    struct Row {
        u32 n;
        i32 y, x;
    };
    struct Column {
        i32 u, v;
        u64 channel;
    };

    __device__ Spread(const Conv& conv, const S* dy, const u8* winners) : conv(conv), gradients(conv, dy, winners) {}

    __device__ Row row(u32 m) const {
        Position p = position_of<false>(m, conv.height, conv.width);
        return Row{p.n, (i32)(p.i + conv.padding), (i32)(p.j + conv.padding)};
    }

    __device__ Column column(u32 k) const {
        Step step(k, conv.kernel_width, conv.c_out);
        return Column{(i32)step.u, (i32)step.v, gradients.column(step.channel)};
    }

    __device__ Real at(const Row& row, const Column& column) const {
        i32 y = row.y - column.u, x = row.x - column.v;
        if (y < 0 || x < 0) return 0;
        u32 i = y, j = x, place = 0;
        if (conv.stride > 1) {
            if (i % conv.stride != 0 || j % conv.stride != 0) return 0;
            i /= conv.stride;
            j /= conv.stride;
        }
        if (POOLED) {
            place = i % 2 * 2 + j % 2;
            i /= 2;
            j /= 2;
        }
        if (i >= gradients.height || j >= gradients.width) return 0;
        typename Gradients<S, POOLED>::Row at = {gradients.layout.at(row.n, i, j), place};
        return gradients.at(at, column.channel);
    }
};

// The weight, rounded to S: (steps, output channels).
template <typename S> struct Weight {
    typedef typename As<S>::Real Real;
    const Real* w;
    u32 c_out;

    __device__ u64 row(u32 k) const { return (u64)k * c_out; }
    __device__ u32 column(u32 o) const { return o; }
    __device__ Real at(u64 row, u32 column) const { return load(As<S>::store(w[row + column])); }
};

// The weight for the gradient of the input: (steps with channels of the output, input channels).
template <typename S> struct WeightOfSpread {
    typedef typename As<S>::Real Real;
    const Real* w;
    Conv conv;

    __device__ u64 row(u32 k) const {
        u32 kernel = k / conv.c_out, o = k % conv.c_out;
        return (u64)kernel * conv.c_in * conv.c_out + o;
    }
    __device__ u64 column(u32 c) const { return (u64)c * conv.c_out; }
    __device__ Real at(u64 row, u64 column) const { return load(As<S>::store(w[row + column])); }
};

template <typename F> struct Transposed {
    typedef typename F::Real Real;
    F factor;

    __device__ auto row(u32 i) const { return factor.column(i); }
    __device__ auto column(u32 j) const { return factor.row(j); }
    template <typename Row, typename Column> __device__ Real at(const Row& row, const Column& column) const {
        return factor.at(column, row);
    }
};

// Rows and columns of a tile of the result, and steps that are in shared memory at a time. A thread has 4 x 4 results.
enum { SIDE = 64, DEPTH = 16, THREADS = 256 };
// After each row of a tile in shared memory there are 4 elements, which spreads columns over the banks.
enum { PITCH = SIDE + 4 };
// The elements that a thread loads of each factor's tile, and their distance in rows.
enum { OWN = SIDE * DEPTH / THREADS, DISTANCE = THREADS / DEPTH };

// Loads a tile of (SIDE, DEPTH) elements: each thread loads 4 elements of one step. Neighbors load along the rows of the tile,
// or along its steps.
template <typename F> struct Loader {
    typedef typename F::Real Real;
    F factor;
    u32 rows, row, step;
    u32 row_of_tile;
    decltype(factor.row(0)) own[OWN];
    Real elems[OWN];

    __device__ Loader(F factor, u32 rows, u32 first, bool is_along_rows)
        : factor(factor), rows(rows), row_of_tile(is_along_rows ? threadIdx.x % DEPTH : threadIdx.x / DEPTH) {
        row = first + row_of_tile;
        step = is_along_rows ? threadIdx.x / DEPTH : threadIdx.x % DEPTH;
        for (u32 r = 0; r < OWN; ++r) own[r] = factor.row(min(row + r * DISTANCE, rows - 1));
    }

    __device__ void load_from(u32 begin, u32 end) {
        bool is_there = begin + step < end;
        auto column = factor.column(begin + step);
        for (u32 r = 0; r < OWN; ++r) {
            elems[r] = is_there && row + r * DISTANCE < rows ? factor.at(own[r], column) : 0;
        }
    }

    template <typename Tile> __device__ void store_to(Tile& tile) const {
        for (u32 r = 0; r < OWN; ++r) tile.put(row_of_tile + r * DISTANCE, step, elems[r]);
    }
};

// The tiles of both factors in shared memory, and how they are multiplied: each thread has 4 x 4 results.
template <typename S> struct Tiles {
    typedef typename As<S>::Real Real;
    struct Tile {
        Real of[DEPTH][PITCH];
        __device__ void put(u32 row, u32 step, Real x) { of[step][row] = x; }
    };
    Tile a, b;

    __device__ void multiply(u32 i0, u32 j0, bool is_live, Real (&sums)[4][4]) const {
        if (!is_live) return;
        #pragma unroll
        for (u32 k = 0; k < DEPTH; ++k) {
            #pragma unroll
            for (u32 i = 0; i < 4; ++i) {
                #pragma unroll
                for (u32 j = 0; j < 4; ++j) sums[i][j] = fused(a.of[k][i0 + i], b.of[k][j0 + j], sums[i][j]);
            }
        }
    }

    __device__ void collect(u32, u32, Real (&)[4][4]) {}
};

// Older cards have no tensor cores for bf16, and multiply 16 bits as f32.
#if __CUDA_ARCH__ >= 800
// The same in 16 bits, on tensor cores: a warp has 16 rows and 32 columns of results while it multiplies. Numbers of 16 bits lose
// nothing on their way through the loaders.
template <typename S> struct HalfTiles {
    struct Tile {
        // After each row there are 8 elements, which spreads rows over the banks.
        S of[SIDE][DEPTH + 8];
        __device__ void put(u32 row, u32 step, f32 x) { of[row][step] = As<S>::store(x); }
    };
    Tile a, b;
    f32 results[SIDE][PITCH];

    __device__ void multiply(u32, u32, bool, Sums (&sums)[4]) const {
        u32 lane = threadIdx.x % 32, warp = threadIdx.x / 32;
        u32 x[4], y[4];
        load_matrices(x, &a.of[warp % 4 * 16 + lane % 16][lane / 16 * 8]);
        #pragma unroll
        for (u32 j = 0; j < 4; j += 2) {
            load_matrices(y, &b.of[warp / 4 * 32 + 8 * j + lane / 16 * 8 + lane % 8][lane / 8 % 2 * 8]);
            Tensor<S>::multiply(sums[j], x, y[0], y[1]);
            Tensor<S>::multiply(sums[j + 1], x, y[2], y[3]);
        }
    }

    // Gives each thread its 4 x 4 results.
    __device__ void collect(u32 i0, u32 j0, Sums (&sums)[4]) {
        u32 lane = threadIdx.x % 32, warp = threadIdx.x / 32;
        for (u32 j = 0; j < 4; ++j) {
            for (u32 k = 0; k < 4; ++k) {
                results[warp % 4 * 16 + lane / 4 + k / 2 * 8][warp / 4 * 32 + 8 * j + lane % 4 * 2 + k % 2] = sums[j][k];
            }
        }
        __syncthreads();
        for (u32 i = 0; i < 4; ++i) {
            for (u32 j = 0; j < 4; ++j) sums[i][j] = results[i0 + i][j0 + j];
        }
    }
};
static_assert(DEPTH == 16 && SIDE == 64 && THREADS == 256, "a warp has 16 of 64 rows and 32 of 64 columns, and 16 steps");
template <> struct Tiles<f16> : HalfTiles<f16> {};
template <> struct Tiles<bf16> : HalfTiles<bf16> {};
#endif

// c = a b for the tile of the result that begins at (row, column), with steps from begin to end. b comes transposed: both
// factors have the steps as their columns. Sums are in the order of the steps, but for those of tensor cores. `finish` gets the first row and column of a
// thread's 4 x 4 results.
template <typename S, typename A, typename B, typename Finish>
__device__ void multiply_tile(const A& a, const B& b, u32 rows, u32 columns, u32 row, u32 column, u32 begin, u32 end,
                              bool is_a_along_rows, bool is_b_along_rows, Finish finish) {
    typedef typename A::Real Real;
    __shared__ __align__(16) Tiles<S> tiles;
    Loader<A> a_loader(a, rows, row, is_a_along_rows);
    Loader<B> b_loader(b, columns, column, is_b_along_rows);
    u32 i0 = threadIdx.x / (SIDE / 4) * 4, j0 = threadIdx.x % (SIDE / 4) * 4;
    bool is_live = row + i0 < rows && column + j0 < columns;
    Real sums[4][4] = {};
    a_loader.load_from(begin, end);
    b_loader.load_from(begin, end);
    for (u32 k0 = begin; k0 < end; k0 += DEPTH) {
        a_loader.store_to(tiles.a);
        b_loader.store_to(tiles.b);
        __syncthreads();
        // The next elements are on their way while these are multiplied.
        if (k0 + DEPTH < end) {
            a_loader.load_from(k0 + DEPTH, end);
            b_loader.load_from(k0 + DEPTH, end);
        }
        tiles.multiply(i0, j0, is_live, sums);
        __syncthreads();
    }
    tiles.collect(i0, j0, sums);
    if (is_live) finish(row + i0, column + j0, sums);
}

// The tile of a block: rows along x, columns along y.
#define TILE blockIdx.x * SIDE, blockIdx.y * SIDE

// The gradient of the weight, (parts, steps, output channels): part z has positions from z * of_part on.
template <typename S, bool POOLED, typename Real = typename As<S>::Real>
__global__ void weight_gradient(Conv conv, const void* x, const S* dy, const u8* winners, Real* partials) {
    Transposed<Patches<S, POOLED>> a = {Patches<S, POOLED>(conv, x)};
    Transposed<Gradients<S, POOLED>> b = {Gradients<S, POOLED>(conv, dy, winners)};
    u32 steps = conv.kernel_height * conv.kernel_width * conv.c_in, c_out = conv.c_out;
    u32 begin = blockIdx.z * conv.of_part, end = min(begin + conv.of_part, conv.positions);
    Real* part = partials + (u64)blockIdx.z * steps * c_out;
    bool is_along_channels = !conv.has_planes;
    multiply_tile<S>(a, b, steps, c_out, TILE, begin, end, is_along_channels, is_along_channels,
                  [=](u32 row, u32 column, Real(&sums)[4][4]) {
                      for (u32 i = 0; i < 4 && row + i < steps; ++i) {
                          for (u32 j = 0; j < 4 && column + j < c_out; ++j) {
                              part[(u64)(row + i) * c_out + column + j] = sums[i][j];
                          }
                      }
                  });
}

// The gradient of the input. It is f32 or S.
template <typename S, bool POOLED, typename Real = typename As<S>::Real>
__global__ void input_gradient(Conv conv, const Real* w, const S* dy, const u8* winners, void* dx) {
    u32 positions = conv.positions;
    Spread<S, POOLED> a(conv, dy, winners);
    Transposed<WeightOfSpread<S>> b = {WeightOfSpread<S>{w, conv}};
    u32 steps = conv.kernel_height * conv.kernel_width * conv.c_out;
    multiply_tile<S>(a, b, positions, conv.c_in, TILE, 0, steps, conv.has_planes, false,
                  [=](u32 row, u32 column, Real(&sums)[4][4]) {
                      Layout layout(conv, conv.height, conv.width, conv.c_in);
                      for (u32 i = 0; i < 4 && row + i < positions; ++i) {
                          Position p = position_of<false>(row + i, conv.height, conv.width);
                          for (u32 j = 0; j < 4 && column + j < conv.c_in; ++j) {
                              u64 at = layout.at(p.n, p.i, p.j) + (u64)(column + j) * layout.channel;
                              if (conv.is_f32) ((f32*)dx)[at] = sums[i][j];
                              else ((S*)dx)[at] = As<S>::store(sums[i][j]);
                          }
                      }
                  });
}
