// Operations on rows: conversions, the gated activation, the norm, rotations and embeddings.

extern "C" __global__ void narrow_f16(const float* x, f16* rounded, u64 n) {
    u64 i = place();
    if (i < n) rounded[i] = As<f16>::store(x[i]);
}

extern "C" __global__ void narrow_bf16(const float* x, bf16* rounded, u64 n) {
    u64 i = place();
    if (i < n) rounded[i] = As<bf16>::store(x[i]);
}

template <typename S> __device__ __forceinline__ void widen(const S* rounded, float* x, u64 n) {
    u64 i = place();
    if (i < n) x[i] = load(rounded[i]);
}

template <typename S> __device__ __forceinline__ void swiglu(const S* gate_up, S* y, u32 columns, u64 n) {
    typedef typename As<S>::Real Real;
    u64 i = place();
    if (i >= n) return;
    u64 at = i / columns * 2 * columns + i % columns;
    Real g = load(gate_up[at]), u = load(gate_up[at + columns]);
    y[i] = As<S>::store(g / (Real(1) + fast_exp(-g)) * u);
}

template <typename S>
__device__ __forceinline__ void swiglu_backward(const S* gate_up, const S* dy, S* d_gate_up, u32 columns, u64 n) {
    typedef typename As<S>::Real Real;
    u64 i = place();
    if (i >= n) return;
    u64 at = i / columns * 2 * columns + i % columns;
    Real g = load(gate_up[at]), u = load(gate_up[at + columns]), d = load(dy[i]);
    Real s = Real(1) / (Real(1) + fast_exp(-g));
    d_gate_up[at] = As<S>::store(d * u * s * (Real(1) + g * (Real(1) - s)));
    d_gate_up[at + columns] = As<S>::store(d * g * s);
}

// The sum of the partial sums of a warp's lanes, lane by lane, as on the processor.
template <typename R> __device__ __forceinline__ R sum_in_order(R of_lane) {
    R total = 0;
    for (int lane = 0; lane < 32; ++lane) total = total + __shfl_sync(0xffffffffu, of_lane, lane);
    return total;
}

// A warp for each row, whose lanes have the processor's partial sums.
template <typename S, typename R>
__device__ __forceinline__ void rms_norm(const R* x, const R* w, R eps, S* y, R* r, u32 columns, u64 rows) {
    u64 row = place() / 32;
    u32 lane = threadIdx.x % 32;
    if (row >= rows) return;
    x += row * columns;
    y += row * columns;
    R sum = 0;
    for (u32 j = lane; j < columns; j += 32) sum = sum + x[j] * x[j];
    R scale = R(1) / sqrt(sum_in_order(sum) / R(columns) + eps);
    if (lane == 0) r[row] = scale;
    for (u32 j = lane; j < columns; j += 32) y[j] = As<S>::store(x[j] * scale * w[j]);
}

template <typename S, typename R>
__device__ __forceinline__ void rms_norm_backward_input(
    const R* x, const R* w, const R* r, const S* dy, R* dx, u32 columns, u64 rows) {
    u64 row = place() / 32;
    u32 lane = threadIdx.x % 32;
    if (row >= rows) return;
    x += row * columns;
    dy += row * columns;
    dx += row * columns;
    R sum = 0, scale = r[row];
    for (u32 j = lane; j < columns; j += 32) sum = sum + w[j] * load(dy[j]) * x[j];
    R mean = sum_in_order(sum) / R(columns);
    R factor = mean * scale * scale * scale;
    for (u32 j = lane; j < columns; j += 32) dx[j] = scale * w[j] * load(dy[j]) - x[j] * factor;
}

// A thread for each column and run of rows: the sum over the run.
template <typename S, typename R>
__device__ __forceinline__ void rms_norm_backward_weight(
    const R* x, const R* r, const S* dy, R* of_runs, u32 columns, u64 rows, u32 rows_of_run) {
    u32 column = blockIdx.x * blockDim.x + threadIdx.x;
    if (column >= columns) return;
    u64 row = (u64)blockIdx.y * rows_of_run, end = row + rows_of_run < rows ? row + rows_of_run : rows;
    R sum = 0;
    for (; row < end; ++row) sum = sum + load(dy[row * columns + column]) * x[row * columns + column] * r[row];
    of_runs[(u64)blockIdx.y * columns + column] = sum;
}

// A thread for each column: the sum over the runs, in order, added to what is there if `accumulate`.
template <typename R>
__device__ __forceinline__ void add_runs(const R* of_runs, R* sums, u32 columns, u32 runs, u32 accumulate) {
    u32 column = place();
    if (column >= columns) return;
    R sum = accumulate ? sums[column] : R(0);
    for (u32 run = 0; run < runs; ++run) sum = sum + of_runs[(u64)run * columns + column];
    sums[column] = sum;
}

// A thread for each pair of a head.
template <typename S, typename R>
__device__ __forceinline__ void rotate(
    const R* table, S* x, u32 half, u32 heads, u64 columns, u64 offset, u64 seq, u64 rows) {
    u64 i = place();
    u64 pair = i % half, head = i / half % heads, row = i / half / heads;
    if (row >= rows) return;
    const R* angles = table + (offset + row % seq) * 2 * half;
    S* first = x + row * columns + head * 2 * half + pair;
    R a = load(*first), b = load(first[half]), c = angles[pair], s = angles[half + pair];
    *first = As<S>::store(a * c - b * s);
    first[half] = As<S>::store(b * c + a * s);
}

// A block for each id. An id that is no row of the table gives a row of NaN.
template <typename S>
__device__ __forceinline__ void embedding(const i64* ids, const S* table, S* output, u64 len, u32 width) {
    i64 id = ids[blockIdx.x];
    bool is_row = id >= 0 && (u64)id < len;
    S broken = As<S>::store((typename As<S>::Real)__int_as_float(0x7fc00000));
    for (u32 j = threadIdx.x; j < width; j += blockDim.x)
        output[(u64)blockIdx.x * width + j] = is_row ? table[id * width + j] : broken;
}

// A block for each id: the first block with an id adds the rows of all, in order.
template <typename S>
__device__ __forceinline__ void embedding_backward(
    const i64* ids, const S* d_output, S* d_table, u64 count, u64 len, u32 width) {
    __shared__ u32 wanted[256];
    u64 own = blockIdx.x;
    i64 id = ids[own];
    if (id < 0 || (u64)id >= len) return;
    int is_later = 0;
    for (u64 at = threadIdx.x; at < own; at += blockDim.x) is_later |= ids[at] == id;
    if (__syncthreads_or(is_later)) return;
    for (u64 begin = own; begin < count; begin += blockDim.x) {
        u64 at = begin + threadIdx.x;
        int is_wanted = at < count && ids[at] == id;
        wanted[threadIdx.x] = is_wanted;
        if (!__syncthreads_or(is_wanted)) continue;
        for (u32 j = threadIdx.x; j < width; j += blockDim.x) {
            S* sum = d_table + id * width + j;
            S value = *sum;
            for (u32 k = 0; k < blockDim.x; ++k)
                if (wanted[k]) value = As<S>::store(load(value) + load(d_output[(begin + k) * width + j]));
            *sum = value;
        }
        __syncthreads();
    }
}

// A thread for each sequence: the row of its last element. Lengths beyond the sequence count as its length.
extern "C" __global__ void last_rows(
    const i64* ids, const i64* lengths, i64* rows, u64 count, u64 seq, u32 has_pad, i64 pad) {
    u64 at = place();
    if (at >= count) return;
    i64 length = lengths[at] < 1 ? 1 : lengths[at] > (i64)seq ? (i64)seq : lengths[at];
    i64 last = length - 1;
    if (has_pad) {
        while (last > 0 && ids[at * seq + last] == pad) --last;
    }
    rows[at] = at * seq + last;
}

#define FOR_HALF(S) \
    extern "C" __global__ void widen_##S(const S* rounded, float* x, u64 n) { widen(rounded, x, n); }
#define FOR_STORED(S, R)                                                                                                 \
    extern "C" __global__ void swiglu_##S(const S* gate_up, S* y, u32 columns, u64 n) { swiglu(gate_up, y, columns, n); } \
    extern "C" __global__ void swiglu_backward_##S(                                                                      \
        const S* gate_up, const S* dy, S* d_gate_up, u32 columns, u64 n) {                                               \
        swiglu_backward(gate_up, dy, d_gate_up, columns, n);                                                             \
    }                                                                                                                    \
    extern "C" __global__ void rms_norm_##S(const R* x, const R* w, R eps, S* y, R* r, u32 columns, u64 rows) {           \
        rms_norm(x, w, eps, y, r, columns, rows);                                                                        \
    }                                                                                                                    \
    extern "C" __global__ void rms_norm_backward_input_##S(                                                              \
        const R* x, const R* w, const R* r, const S* dy, R* dx, u32 columns, u64 rows) {                                  \
        rms_norm_backward_input(x, w, r, dy, dx, columns, rows);                                                         \
    }                                                                                                                    \
    extern "C" __global__ void rms_norm_backward_weight_##S(                                                             \
        const R* x, const R* r, const S* dy, R* of_runs, u32 columns, u64 rows, u32 rows_of_run) {                        \
        rms_norm_backward_weight(x, r, dy, of_runs, columns, rows, rows_of_run);                                         \
    }                                                                                                                    \
    extern "C" __global__ void rotate_##S(                                                                               \
        const R* table, S* x, u32 half, u32 heads, u64 columns, u64 offset, u64 seq, u64 rows) {                          \
        rotate(table, x, half, heads, columns, offset, seq, rows);                                                       \
    }                                                                                                                    \
    extern "C" __global__ void embedding_##S(const i64* ids, const S* table, S* output, u64 len, u32 width) {             \
        embedding(ids, table, output, len, width);                                                                       \
    }                                                                                                                    \
    extern "C" __global__ void embedding_backward_##S(                                                                   \
        const i64* ids, const S* d_output, S* d_table, u64 count, u64 len, u32 width) {                                   \
        embedding_backward(ids, d_output, d_table, count, len, width);                                                   \
    }
#define FOR_REAL(R)                                                                                                      \
    extern "C" __global__ void add_runs_##R(const R* of_runs, R* sums, u32 columns, u32 runs, u32 accumulate) {           \
        add_runs(of_runs, sums, columns, runs, accumulate);                                                              \
    }
FOR_HALF(f16)
FOR_HALF(bf16)
FOR_STORED(f32, f32)
FOR_STORED(f64, f64)
FOR_STORED(f16, f32)
FOR_STORED(bf16, f32)
FOR_REAL(f32)
FOR_REAL(f64)
