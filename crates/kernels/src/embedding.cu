// A block for each id. An id that is no row of the table gives a row of NaN.
template <typename S>
__global__ void embedding(const i64* ids, const S* table, S* output, u64 len, u32 width) {
    i64 id = ids[blockIdx.x];
    bool is_row = id >= 0 && (u64)id < len;
    S broken = As<S>::store((typename As<S>::Real)__int_as_float(0x7fc00000));
    for (u32 j = threadIdx.x; j < width; j += blockDim.x)
        output[(u64)blockIdx.x * width + j] = is_row ? table[id * width + j] : broken;
}

// A block for each id: the first block with an id adds the rows of all, in order.
template <typename S>
__global__ void embedding_backward(
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
__global__ void last_rows(
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
