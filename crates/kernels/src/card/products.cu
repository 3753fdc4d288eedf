// Kernels for the matrix products of the library: conversion to 16 bits, biases, and sums over rows.

template <typename H> __global__ void narrow(const f32* __restrict__ x, H* __restrict__ y, u64 n) {
    at_places(n, [=](u64 i) { y[i] = As<H>::store(x[i]); });
}

template <typename H> __global__ void widen(const H* __restrict__ x, f32* __restrict__ y, u64 n) {
    at_places(n, [=](u64 i) { y[i] = load(x[i]); });
}

template <typename S> __global__ void add_bias(const S* bias, u32 with_relu, S* y, u64 columns, u64 n) {
    u64 i = place();
    if (i >= n) return;
    auto sum = load(y[i]) + load(bias[i % columns]);
    y[i] = As<S>::store(with_relu && sum <= 0 ? 0 : sum);
}

template <typename S> __global__ void cut(S* y, u64 n) {
    u64 i = place();
    if (i < n && load(y[i]) <= 0) y[i] = As<S>::store(0);
}

// A block has 32 columns and 8 rows of threads. Each of its 8 rows sums every 8th row of the block's part, in order; the
// 8 sums are added in order. partials is (parts, columns).
template <typename S, typename R = typename As<S>::Real>
__global__ void sum_rows(const S* x, u64 rows, u64 columns, u64 rows_of_part, R* partials) {
    __shared__ R sums[8][32];
    u64 column = (u64)blockIdx.x * 32 + threadIdx.x, first = blockIdx.y * rows_of_part;
    u64 end = first + rows_of_part < rows ? first + rows_of_part : rows;
    R sum = 0;
    if (column < columns) {
        for (u64 row = first + threadIdx.y; row < end; row += 8) sum += load(x[row * columns + column]);
    }
    sums[threadIdx.y][threadIdx.x] = sum;
    __syncthreads();
    if (threadIdx.y != 0 || column >= columns) return;
    for (u32 k = 1; k < 8; ++k) sum += sums[k][threadIdx.x];
    partials[blockIdx.y * columns + column] = sum;
}

// partials is (parts, n). They are added in order; or, if there are many, each row of threads adds every 8th of them in order, and
// the 8 sums are added in order.
template <typename S, typename R = typename As<S>::Real>
__global__ void add_parts(const R* partials, u64 parts, u64 n, u32 accumulate, S* sums) {
    __shared__ R of_rows[8][32];
    u64 i = place();
    R sum = 0;
    if (i < n) {
        #pragma unroll 8
        for (u64 part = threadIdx.y; part < parts; part += blockDim.y) sum += partials[part * n + i];
    }
    if (blockDim.y > 1) {
        of_rows[threadIdx.y][threadIdx.x] = sum;
        __syncthreads();
        if (threadIdx.y != 0) return;
        for (u32 k = 1; k < 8; ++k) sum += of_rows[k][threadIdx.x];
    }
    if (i < n) sums[i] = As<S>::store(accumulate ? load(sums[i]) + sum : sum);
}
