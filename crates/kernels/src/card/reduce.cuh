// Sums over the threads of a block, in an order that depends on the number of threads alone.

template <typename T> __device__ __forceinline__ T sum_of_warp(T x) {
    for (int step = 16; step > 0; step >>= 1) x = x + __shfl_xor_sync(0xffffffffu, x, step);
    return x;
}

// The sum of the values of all threads of a block with whole warps, in every thread. Has two barriers.
template <typename T> __device__ __forceinline__ T sum_of_block(T x) {
    __shared__ T of_warps[32];
    x = sum_of_warp(x);
    __syncthreads();
    if (threadIdx.x % 32 == 0) of_warps[threadIdx.x / 32] = x;
    __syncthreads();
    x = threadIdx.x % 32 < blockDim.x / 32 ? of_warps[threadIdx.x % 32] : T(0);
    return sum_of_warp(x);
}
