// The largest elements of a vector, and sums of such selections, with the processor's bits.
//
// A radix selection: three passes over all magnitudes, each of which finds one digit. Counts are whole numbers, so the order
// of atomic additions does not matter. What is selected is put in order by counting what comes before it.

// The bits of the threshold that are known, and how many elements with these bits are among the largest.
struct State { u32 known, left; };

__device__ __forceinline__ u32 magnitude(f32 x) { return __float_as_uint(x) & 0x7fffffffu; }

// Counts the digits at `shift` of the magnitudes whose upper bits are known. `counts` holds zeros.
__global__ void top_k_count(const f32* residual, const u32* state, u32* counts, u32 shift, u32 bits, u64 n) {
    __shared__ u32 own[2048];
    for (u32 digit = threadIdx.x; digit < 2048; digit += blockDim.x) own[digit] = 0;
    __syncthreads();
    u32 known = ((const State*)state)->known, above = shift + bits;
    for (u64 i = place(); i < n; i += (u64)gridDim.x * blockDim.x) {
        u32 size = magnitude(residual[i]);
        if ((above < 32 ? size >> above : 0) == known) atomicAdd(&own[(size >> shift) & ((1u << bits) - 1)], 1u);
    }
    __syncthreads();
    for (u32 digit = threadIdx.x; digit < 2048; digit += blockDim.x)
        if (own[digit]) atomicAdd(&counts[digit], own[digit]);
}

// One thread: finds the digit, and clears the counts.
__global__ void top_k_digit(u32* state, u32* counts, u32 bits) {
    State* now = (State*)state;
    u32 digit = (1u << bits) - 1, left = now->left;
    while (digit > 0 && counts[digit] < left) left -= counts[digit--];
    now->known = now->known << bits | digit;
    now->left = left;
    for (u32 at = 0; at < 2048; ++at) counts[at] = 0;
}

// One thread: begins with no known bits.
__global__ void top_k_begin(u32* state, u32* counts, u32 k) {
    ((State*)state)->known = 0;
    ((State*)state)->left = k;
    for (u32 at = 0; at < 2048; ++at) counts[at] = 0;
}

// Each block counts its elements above the threshold, and those at it.
__global__ void top_k_count_blocks(const f32* residual, const u32* state, u32* of_blocks, u64 n) {
    u64 i = place();
    u32 threshold = ((const State*)state)->known;
    u32 size = i < n ? magnitude(residual[i]) : 0;
    u32 above = __syncthreads_count(i < n && size > threshold);
    u32 at = __syncthreads_count(i < n && size == threshold);
    if (threadIdx.x == 0) {
        of_blocks[2 * blockIdx.x] = above;
        of_blocks[2 * blockIdx.x + 1] = at;
    }
}

// One block: counts become the sums of what comes before.
__global__ void top_k_sum_blocks(u32* of_blocks, u32 blocks) {
    __shared__ u32 sums[2];
    __shared__ u32 parts[2][256];
    if (threadIdx.x < 2) sums[threadIdx.x] = 0;
    __syncthreads();
    for (u32 begin = 0; begin < blocks; begin += blockDim.x) {
        u32 block = begin + threadIdx.x;
        for (u32 which = 0; which < 2; ++which) parts[which][threadIdx.x] = block < blocks ? of_blocks[2 * block + which] : 0;
        __syncthreads();
        if (threadIdx.x < 2) {
            u32 sum = sums[threadIdx.x];
            for (u32 at = 0; at < blockDim.x; ++at) {
                u32 count = parts[threadIdx.x][at];
                parts[threadIdx.x][at] = sum;
                sum += count;
            }
            sums[threadIdx.x] = sum;
        }
        __syncthreads();
        for (u32 which = 0; which < 2; ++which)
            if (block < blocks) of_blocks[2 * block + which] = parts[which][threadIdx.x];
        __syncthreads();
    }
}

// How many threads of the block before this one say yes. Has barriers.
__device__ __forceinline__ u32 count_before(bool says_yes) {
    __shared__ u32 of_warps[32];
    u32 votes = __ballot_sync(0xffffffffu, says_yes), lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    __syncthreads();
    if (lane == 0) of_warps[warp] = __popc(votes);
    __syncthreads();
    u32 count = __popc(votes & ((1u << lane) - 1));
    for (u32 before = 0; before < warp; ++before) count += of_warps[before];
    return count;
}

// Moves what is above the threshold, and the first elements at it, to `selected`, in order.
__global__ void top_k_move(f32* residual, const u32* state, const u32* of_blocks, i32* selected, u32 k, u64 n) {
    u64 i = place();
    u32 threshold = ((const State*)state)->known, left = ((const State*)state)->left;
    u32 size = i < n ? magnitude(residual[i]) : 0;
    bool is_above = i < n && size > threshold, is_at = i < n && size == threshold;
    u32 above = of_blocks[2 * blockIdx.x] + count_before(is_above);
    u32 at = of_blocks[2 * blockIdx.x + 1] + count_before(is_at);
    if (!(is_above || (is_at && at < left))) return;
    u32 place = above + (at < left ? at : left);
    if (place >= k) return;
    selected[place] = i;
    selected[k + place] = __float_as_uint(residual[i]);
    residual[i] = -0.0f;
}

// A thread for each element: the tree over the `n` selections, divided by `n`. Indices ascend within a selection.
__global__ void top_k_mean(const i32* selections, f32* mean, u32 k, u32 n, u64 len) {
    u64 i = place();
    if (i >= len) return;
    f32 waiting[32];
    u32 depth = 0;
    for (u32 number = 0; number < n; ++number) {
        const i32* indices = selections + (u64)number * 2 * k;
        u32 low = 0, high = k;
        while (low < high) {
            u32 middle = (low + high) / 2;
            if (indices[middle] < (i64)i) low = middle + 1; else high = middle;
        }
        f32 sum = low < k && indices[low] == (i64)i ? __uint_as_float(indices[k + low]) : -0.0f;
        for (u32 pairs = number; depth > 0 && (pairs % 2 == 1 || number + 1 == n); pairs /= 2) sum = waiting[--depth] + sum;
        waiting[depth++] = sum;
    }
    mean[i] = waiting[0] / (f32)n;
}
