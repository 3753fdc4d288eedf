// Arithmetic in 16 bits, matrices by `ldmatrix`, and other instructions that ordinary sources do not make.
typedef unsigned short u16; typedef unsigned int u32; typedef unsigned long long u64;
#define KERNEL extern "C" __global__ void

// Six results a thread: sums, products and fused products of halves, of bfloat16, and of pairs.
KERNEL halves(const u16* x, const u16* y, u16* out, u32 n) {
    u32 i = threadIdx.x;
    if (i >= n) return;
    u16 a = x[i], b = y[i], r;
    asm("add.f16 %0, %1, %2;" : "=h"(r) : "h"(a), "h"(b)); out[i] = r;
    asm("mul.f16 %0, %1, %2;" : "=h"(r) : "h"(a), "h"(b)); out[n + i] = r;
    asm("fma.rn.f16 %0, %1, %2, %1;" : "=h"(r) : "h"(a), "h"(b)); out[2 * n + i] = r;
    asm("fma.rn.bf16 %0, %1, %2, %1;" : "=h"(r) : "h"(a), "h"(b)); out[3 * n + i] = r;
    u32 pair = (u32)a << 16 | b, sum;
    asm("add.f16x2 %0, %1, %1;" : "=r"(sum) : "r"(pair));
    out[4 * n + i] = (u16)(sum >> 16);
    out[5 * n + i] = (u16)sum;
}

// The four 8 x 8 matrices of a 16 x 16 tile of 16 bits, as a lane of a tensor core holds them.
KERNEL load_matrix(const u16* x, u32* out, u32* transposed) {
    __shared__ __align__(16) u16 tile[256];
    for (u32 i = threadIdx.x; i < 256; i += 32) tile[i] = x[i];
    __syncthreads();
    u32 lane = threadIdx.x, row = lane % 16, column = lane / 16 * 8, r[4];
    u32 at = (u32)__cvta_generic_to_shared(&tile[row * 16 + column]);
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
        : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3]) : "r"(at));
    for (u32 k = 0; k < 4; ++k) out[lane * 4 + k] = r[k];
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
        : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3]) : "r"(at));
    for (u32 k = 0; k < 4; ++k) transposed[lane * 4 + k] = r[k];
}

// Threads of a warp that go different ways round a loop, and meet again.
KERNEL collatz(const u32* x, u32* steps, u32* most, u32 n) {
    u32 i = blockIdx.x * blockDim.x + threadIdx.x;
    u32 v = i < n ? x[i] : 1, count = 0;
    while (v != 1) {
        if (v & 1) v = 3 * v + 1; else v >>= 1;
        ++count;
    }
    if (i < n) steps[i] = count;
    u32 top = __reduce_max_sync(0xffffffffu, count);
    u32 same = __match_any_sync(0xffffffffu, count);
    if (i < n) most[i] = top * 100 + __popc(same);
}
