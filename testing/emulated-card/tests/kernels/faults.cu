// One fault each. The tests expect that the interpreter names it.
typedef unsigned int u32;
#define KERNEL extern "C" __global__ void

KERNEL misaligned(float* x) { float4 v = *(float4*)(x + 1); x[0] = v.x + v.y + v.z + v.w; }
KERNEL divergent_barrier(float* x) { if (threadIdx.x < 16) __syncthreads(); x[threadIdx.x] = 1; }
KERNEL divergent_warps(float* x) { if (threadIdx.x < 32) __syncthreads(); x[threadIdx.x] = 1; }
KERNEL absent_lane(float* x) {
    float v = x[threadIdx.x];
    if (threadIdx.x < 16) v += __shfl_xor_sync(0xffffffffu, v, 1);
    x[threadIdx.x] = v;
}
KERNEL unnamed_lane(float* x) {
    float v = x[threadIdx.x];
    if ((threadIdx.x & 31) < 16) v += __shfl_xor_sync(0x0000ffffu, v, 16);
    x[threadIdx.x] = v;
}
KERNEL race(float* x) {
    __shared__ float s[64];
    s[threadIdx.x] = x[threadIdx.x];
    __syncthreads();
    float v = s[63 - threadIdx.x];
    s[threadIdx.x] = v;
    x[threadIdx.x] = v;
}
KERNEL no_barrier(float* x) {
    __shared__ float s[64];
    s[threadIdx.x] = x[threadIdx.x];
    x[threadIdx.x] = s[63 - threadIdx.x];
}
KERNEL shared_overrun(float* x) {
    __shared__ float s[63];
    s[threadIdx.x] = x[threadIdx.x];
    __syncthreads();
    x[threadIdx.x] = s[(threadIdx.x + 32) & 31];
}
KERNEL shared_uninitialized(float* x) {
    __shared__ float s[64];
    if (threadIdx.x != 5) s[threadIdx.x] = x[threadIdx.x];
    __syncthreads();
    x[threadIdx.x] = s[63 - threadIdx.x];
}
KERNEL global_overrun(float* x) { x[threadIdx.x + 1] = 1; }
KERNEL global_underrun(float* x) { x[(int)threadIdx.x - 1] = 1; }
KERNEL through_pointer(float* x) { x[threadIdx.x] = **(float**)x; }
KERNEL uninitialized(float* x, float* y) { x[threadIdx.x] = y[threadIdx.x]; }
KERNEL endless(volatile float* x) { while (x[0] >= 0.0f) {} }
// Warps of 32 threads happen to run in step on some cards; nothing promises it. Only seeds that split warps tell.
KERNEL counts_on_step(u32* x) {
    volatile u32* s = x;
    u32 t = threadIdx.x & 31;
    s[t] = t + 1;
    u32 v = s[t ^ 16];
    x[64 + threadIdx.x] = v;
}
KERNEL fill(float* x, float value) { x[threadIdx.x] = value; }
KERNEL add(float* x, const float* y) { x[threadIdx.x] += y[threadIdx.x]; }
