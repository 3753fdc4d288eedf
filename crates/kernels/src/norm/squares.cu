// Sums of squares as a balanced tree over rows of 16 elements, with the processor's bits.
//
// A block of 256 threads adds 256 rows: thread t has lane t % 16 of the rows of group t / 16. Rows that are not there count as
// zeros, which change no bit of a sum of squares.

// The tree over 16 numbers.
template <typename Of> __device__ __forceinline__ f64 tree_of_16(Of of) {
    f64 sums[8];
#pragma unroll
    for (u32 at = 0; at < 8; ++at) sums[at] = of(2 * at) + of(2 * at + 1);
#pragma unroll
    for (u32 count = 4; count > 0; count /= 2) {
#pragma unroll
        for (u32 at = 0; at < count; ++at) sums[at] = sums[2 * at] + sums[2 * at + 1];
    }
    return sums[0];
}

// The tree over the 16 groups of a block, for each lane; the threads of group 0 have the result.
__device__ __forceinline__ f64 tree_of_groups(f64 sum) {
    __shared__ f64 sums[256];
    sums[threadIdx.x] = sum;
    __syncthreads();
    return threadIdx.x < 16 ? tree_of_16([&](u32 group) { return sums[16 * group + threadIdx.x]; }) : 0;
}

// The place of a row, or of a unit, among those that begin with these numbers: the last that is not greater.
__device__ __forceinline__ u32 last_not_above(const i64* begins, u32 stride, u32 count, i64 number) {
    u32 low = 0, high = count;
    while (high - low > 1) {
        u32 middle = (low + high) / 2;
        if (begins[(u64)middle * stride] <= number) low = middle; else high = middle;
    }
    return low;
}

// A block for each run of at most 256 rows within a node. `pieces` has for each piece of memory its first row, its first
// element (of `x`) and the element after it; `nodes` for each node its first run, its first row, and its number of rows.
template <typename R>
__global__ void squares_of_runs(
    const R* x, const i64* pieces, u32 num_pieces, const i64* nodes, u32 num_nodes, f64* of_runs) {
    u32 unit = blockIdx.x;
    const i64* node = nodes + 3 * last_not_above(nodes, 3, num_nodes, unit);
    i64 first = 256 * (unit - node[0]);
    u32 lane = threadIdx.x % 16, group = threadIdx.x / 16;
    i64 row = node[1] + first + 16 * group, end = node[1] + node[2];
    u32 at = row < end ? last_not_above(pieces, 3, num_pieces, row) : 0;
    f64 sum = tree_of_16([&](u32 i) {
        if (row + i >= end) return 0.0;
        while (at + 1 < num_pieces && pieces[3 * (at + 1)] <= row + i) ++at;
        const i64* piece = pieces + 3 * at;
        i64 elem = piece[1] + 16 * (row + i - piece[0]) + lane;
        f64 value = elem < piece[2] ? (f64)x[elem] : 0.0;
        return value * value;
    });
    sum = tree_of_groups(sum);
    if (threadIdx.x < 16) of_runs[16 * (u64)unit + lane] = sum;
}

// A block for each node: the tree over its runs.
__global__ void squares_of_nodes(const f64* of_runs, const i64* nodes, f64* of_nodes) {
    const i64* node = nodes + 3 * blockIdx.x;
    u64 units = (node[2] + 255) / 256, per_group = 16;
    while (16 * per_group < units) per_group *= 2;
    u32 lane = threadIdx.x % 16, group = threadIdx.x / 16;
    // Sums of 16 units, and of twice as many, and so on: those that wait for their right half.
    f64 waiting[32], sum = 0;
    for (u64 part = 0; part < per_group / 16; ++part) {
        u64 begin = group * per_group + 16 * part;
        sum = tree_of_16([&](u32 i) {
            return begin + i < units ? of_runs[16 * (node[0] + begin + i) + lane] : 0.0;
        });
        u32 level = 0;
        for (u64 parts = part; parts % 2 == 1; parts /= 2) sum = waiting[level++] + sum;
        waiting[level] = sum;
    }
    sum = tree_of_groups(sum);
    if (threadIdx.x < 16) of_nodes[16 * (u64)blockIdx.x + lane] = sum;
}
