// The sum of the partial sums of a warp's lanes, lane by lane, as on the processor: one lane adds, which is less work than if
// each lane fetched the sums of all. A kernel calls it once, in blocks of at most 8 warps.
template <typename R> __device__ __forceinline__ R sum_in_order(R of_lane) {
    __shared__ __align__(16) R all[8][32];
    R* of_warp = all[threadIdx.x / 32];
    of_warp[threadIdx.x % 32] = of_lane;
    __syncwarp();
    R total = 0;
    if (threadIdx.x % 32 == 0) {
        #pragma unroll
        for (u32 lane = 0; lane < 32; ++lane) total = total + of_warp[lane];
    }
    return __shfl_sync(0xffffffffu, total, 0);
}

// Who computes a row: a warp, whose lanes have the processor's partial sums; or if each of these has one column at most, a
// thread, which adds them in the same order.
struct RowOwner {
    u64 row;
    u32 first, step;

    __device__ RowOwner(u32 columns)
        : row(columns > 32 ? place() / 32 : place()), first(columns > 32 ? threadIdx.x % 32 : 0), step(columns > 32 ? 32 : 1) {}
    template <typename R> __device__ R sum(R of_thread) const { return step > 1 ? sum_in_order(of_thread) : of_thread; }
};

template <typename S, typename R = typename As<S>::Real>
__global__ void rms_norm(const R* x, const R* w, R eps, S* y, R* r, u32 columns, u64 rows) {
    RowOwner own(columns);
    if (own.row >= rows) return;
    u64 begin = own.row * columns + own.first, step = own.step;
    const R* at = x + begin;
    R sum = 0;
    for (u32 j = own.first; j < columns; j += step, at += step) sum = sum + *at * *at;
    R scale = R(1) / sqrt(own.sum(sum) / R(columns) + eps);
    if (own.first == 0) r[own.row] = scale;
    x += begin;
    w += own.first;
    y += begin;
    for (u32 j = own.first; j < columns; j += step, x += step, w += step, y += step) *y = As<S>::store(*x * scale * *w);
}

template <typename S, typename R = typename As<S>::Real>
__global__ void rms_norm_backward_input(
    const R* x, const R* w, const R* r, const S* dy, const R* onto, R* dx, u32 columns, u64 rows) {
    RowOwner own(columns);
    if (own.row >= rows) return;
    u64 begin = own.row * columns + own.first, step = own.step;
    x += begin;
    w += own.first;
    dy += begin;
    dx += begin;
    const R *x_at = x, *w_at = w;
    const S* dy_at = dy;
    R sum = 0, scale = r[own.row];
    for (u32 j = own.first; j < columns; j += step, x_at += step, w_at += step, dy_at += step) {
        sum = sum + *w_at * load(*dy_at) * *x_at;
    }
    R mean = own.sum(sum) / R(columns);
    R factor = mean * scale * scale * scale;
    if (onto) onto += begin;
    for (u32 j = own.first; j < columns; j += step, x += step, w += step, dy += step, dx += step) {
        R value = scale * *w * load(*dy) - *x * factor;
        *dx = onto ? onto[j - own.first] + value : value;
    }
}

// A thread for each column and run of rows: the sum over the run.
template <typename S, typename R = typename As<S>::Real>
__global__ void rms_norm_backward_weight(
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
__global__ void add_runs(const R* of_runs, R* sums, u32 columns, u32 runs, u32 accumulate) {
    u32 column = place();
    if (column >= columns) return;
    R sum = accumulate ? sums[column] : R(0);
    for (u32 run = 0; run < runs; ++run) sum = sum + of_runs[(u64)run * columns + column];
    sums[column] = sum;
}
