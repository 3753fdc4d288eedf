// Shared by all kernels of attention: the places of tokens, the lengths of rows, and powers of two.
//
// Scores are logarithms to the base 2: queries are multiplied by log2(e) and their scale, so a probability is one power of
// two. Sums that are stored for the backward pass are natural logarithms.

// The sizes, the factor of scores, and what all heads share: the lengths of rows, if there are some, and the angles of tokens.
template <typename Real> struct Attention {
    u32 seq, heads, kv_heads, head_dim;
    double scale;
    const i64* lengths;
    const Real* angles;

    __device__ u64 qkv_columns() const { return (u64)(heads + 2 * kv_heads) * head_dim; }
    // The first element of a token's head in qkv, counted from queries over keys to values.
    __device__ u64 at(u32 row, u32 token, u32 head) const {
        return ((u64)row * seq + token) * qkv_columns() + (u64)head * head_dim;
    }
    __device__ u64 output_at(u32 row, u32 token, u32 head) const {
        return (((u64)row * seq + token) * heads + head) * head_dim;
    }
    __device__ u64 log_sum_at(u32 row, u32 head, u32 token) const { return ((u64)row * heads + head) * seq + token; }
    __device__ u32 keys_of(u32 head) const { return heads + head / (heads / kv_heads); }
};

// The real tokens of a row; a length that is not within 0..=seq makes the row's results NaN.
struct Length {
    u32 real;
    bool is_wrong;

    template <typename Real> __device__ Length(const Attention<Real>& spec, u32 row) {
        i64 seq = spec.seq, length = spec.lengths ? spec.lengths[row] : seq;
        is_wrong = length < 0 || length > seq;
        real = is_wrong ? 0 : (u32)length;
    }
};

// The results of tokens that are not real.
template <typename Real> __device__ Real behind(const Length& length) {
    return length.is_wrong ? (Real)__int_as_float(0x7fffffff) : 0;
}

// The work of a block: a tile of a head of a row of the batch. Tiles of all heads with the most pairs come first: the last
// queries, or the first keys.
struct Work {
    u32 first, head, row;

    __device__ Work(u32 seq, u32 heads, u32 side, bool has_keys = false) {
        u32 tiles = (seq + side - 1) / side, all = gridDim.x / tiles, tile = blockIdx.x / all, rest = blockIdx.x % all;
        first = (has_keys ? tile : tiles - 1 - tile) * side;
        head = rest % heads;
        row = rest / heads;
    }
};

// All pairs of a row of this thread and a row of the other side.
struct All {
    __device__ bool operator()(u32, u32) const { return true; }
};
