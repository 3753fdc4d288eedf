// Causal attention of narrow heads, of 8 or 16 elements: a thread has a row of a head, and meets the rows of the other side
// one after the other in shared memory, where all threads of a warp read the same one. No results go from thread to thread.
//
// A block has as many rows of each side as threads, at most MOST.

enum { MOST = 128 };

// All shared memory of a block: the rows of two tiles, then numbers of queries.
extern __shared__ __align__(16) unsigned char shared_bytes[];

template <typename Real, u32 WIDTH> struct __align__(16) Row {
    enum { HALF = WIDTH / 2 };
    Real of[WIDTH];

    __device__ __forceinline__ Real times(const Row& other) const {
        Real sum = of[0] * other.of[0];
        #pragma unroll
        for (u32 c = 1; c < WIDTH; ++c) sum = fused(of[c], other.of[c], sum);
        return sum;
    }
    __device__ __forceinline__ void add(Real factor, const Row& other) {
        #pragma unroll
        for (u32 c = 0; c < WIDTH; ++c) of[c] = fused(factor, other.of[c], of[c]);
    }
    __device__ __forceinline__ void scale(Real factor) {
        #pragma unroll
        for (u32 c = 0; c < WIDTH; ++c) of[c] *= factor;
    }

    // What is at an address, which need not be a multiple of more than an element.
    static __device__ __forceinline__ Row load_from(const Real* from) {
        Row row;
        #pragma unroll
        for (u32 c = 0; c < WIDTH; ++c) row.of[c] = from[c];
        return row;
    }
    __device__ __forceinline__ void store_to(Real* to) const {
        #pragma unroll
        for (u32 c = 0; c < WIDTH; ++c) to[c] = of[c];
    }

    // Rotated by a token's angles, or back.
    __device__ __forceinline__ Row turned(const Real* angles, bool is_back) const {
        Row row;
        #pragma unroll
        for (u32 c = 0; c < HALF; ++c) {
            Real cosine = angles[c], sine = is_back ? -angles[HALF + c] : angles[HALF + c];
            row.of[c] = of[c] * cosine - of[HALF + c] * sine;
            row.of[HALF + c] = of[HALF + c] * cosine + of[c] * sine;
        }
        return row;
    }

    static __device__ __forceinline__ Row filled(Real x) {
        Row row;
        #pragma unroll
        for (u32 c = 0; c < WIDTH; ++c) row.of[c] = x;
        return row;
    }
};

// A block's work, and where it finds what it needs.
template <typename Real, u32 WIDTH> struct Block {
    typedef Row<Real, WIDTH> Head;
    Attention spec;
    Work work;
    Length length;
    const Real *qkv, *angles;
    // The token of this thread.
    u32 token;

    __device__ Block(const Attention& spec, u32 heads, const Real* qkv, const i64* lengths, const Real* angles)
        : spec(spec), work(spec.seq, heads, blockDim.x), length(lengths, work.row, spec.seq), qkv(qkv), angles(angles),
          token(work.first + threadIdx.x) {}

    __device__ bool is_real() const { return token < length.real; }
    // A token's head of queries or keys, rotated, or of values, as it is.
    __device__ Head rotated(u32 at, u32 head) const { return plain(at, head).turned(angles + (u64)at * WIDTH, false); }
    __device__ Head plain(u32 at, u32 head) const { return Head::load_from(qkv + spec.at(work.row, at, head)); }
    __device__ Head output(const Real* from, u32 at, u32 head) const {
        return Head::load_from(from + spec.output_at(work.row, at, head));
    }
    // This thread's token, or the last real one if it has none, of which there is one at least. So every thread has numbers.
    __device__ u32 nearest() const { return min(token, length.real - 1); }
    // Puts keys and values of the tokens from `first` on into shared memory; behind the real ones is the last one of them.
    __device__ void load_keys(u32 first, u32 end, u32 head, Head* keys, Head* values) const {
        u32 at = min(first + threadIdx.x, end - 1);
        keys[threadIdx.x] = rotated(at, head);
        values[threadIdx.x] = plain(at, head + spec.kv_heads);
    }
    // How many of the keys from `first` on this thread's query attends to.
    __device__ u32 keys_from(u32 first) const { return is_real() ? min(blockDim.x, token + 1 - first) : 0; }
    // The gradient of this thread's row, rotated back and times a factor.
    __device__ void store_turned(const Head& sum, Real factor, u32 head, Real* d_qkv) const {
        Head d = Head::filled(behind<Real>(length));
        if (is_real()) {
            d = sum.turned(angles + (u64)token * WIDTH, true);
            d.scale(factor);
        }
        if (token < spec.seq) d.store_to(d_qkv + spec.at(work.row, token, head));
    }
};

// Keys that are scored at a time, so that sums are rescaled once for them.
enum { SCORED = 4 };

template <typename Real, u32 WIDTH>
__device__ void forward(const Attention& spec, const Real* qkv, const i64* lengths, const Real* angles, Real scale,
                        Real* output, Real* log_sums) {
    typedef Row<Real, WIDTH> Head;
    Head *keys = (Head*)shared_bytes, *values = keys + blockDim.x;
    Block<Real, WIDTH> block(spec, spec.heads, qkv, lengths, angles);
    Work work = block.work;
    u32 end = min(work.first + blockDim.x, block.length.real);
    const Real lowest = -(Real)__int_as_float(0x7f800000);
    Head q, sum = Head::filled(0);
    Real most = lowest, total = 0;
    if (work.first < end) {
        q = block.rotated(block.nearest(), work.head);
        q.scale(scale * to_base_2<Real>());
    }
    for (u32 first = 0; work.first < end && first < end; first += blockDim.x) {
        if (first > 0) __syncthreads();
        block.load_keys(first, end, spec.keys_of(work.head), keys, values);
        __syncthreads();
        u32 count = block.keys_from(first);
        for (u32 k = 0; k < count; k += SCORED) {
            Real scores[SCORED], best = most;
            #pragma unroll
            for (u32 j = 0; j < SCORED; ++j) {
                scores[j] = q.times(keys[k + j]);
                if (k + j >= count) scores[j] = lowest;
                best = scores[j] > best ? scores[j] : best;
            }
            Real factor = power(most - best);
            most = best;
            total *= factor;
            sum.scale(factor);
            #pragma unroll
            for (u32 j = 0; j < SCORED; ++j) {
                Real weight = power(scores[j] - best);
                total += weight;
                // A weight of zero would not leave out a value that is not finite.
                if (k + j < count) sum.add(weight, values[k + j]);
            }
        }
    }
    if (block.token >= spec.seq) return;
    Real log_sum = behind<Real>(block.length);
    if (block.is_real()) {
        log_sum = most * to_base_e<Real>() + log(total);
        sum.scale((Real)1 / total);
    } else {
        sum = Head::filled(log_sum);
    }
    sum.store_to(output + spec.output_at(work.row, block.token, work.head));
    log_sums[spec.log_sum_at(work.row, work.head, block.token)] = log_sum;
}

// The gradient of queries: a thread has a query.
template <typename Real, u32 WIDTH>
__device__ void backward_queries(const Attention& spec, const Real* qkv, const i64* lengths, const Real* angles, Real scale,
                                 const Real* output, const Real* log_sums, const Real* d_output, Real* d_qkv) {
    typedef Row<Real, WIDTH> Head;
    Head *keys = (Head*)shared_bytes, *values = keys + blockDim.x;
    Block<Real, WIDTH> block(spec, spec.heads, qkv, lengths, angles);
    Work work = block.work;
    u32 end = min(work.first + blockDim.x, block.length.real);
    Head q, dy, dq = Head::filled(0);
    Real log_sum, product;
    if (work.first < end) {
        u32 token = block.nearest();
        q = block.rotated(token, work.head);
        q.scale(scale * to_base_2<Real>());
        dy = block.output(d_output, token, work.head);
        product = dy.times(block.output(output, token, work.head));
        log_sum = log_sums[spec.log_sum_at(work.row, work.head, token)] * to_base_2<Real>();
    }
    for (u32 first = 0; work.first < end && first < end; first += blockDim.x) {
        if (first > 0) __syncthreads();
        block.load_keys(first, end, spec.keys_of(work.head), keys, values);
        __syncthreads();
        u32 count = block.keys_from(first);
        for (u32 k = 0; k < count; ++k) {
            Real p = power(q.times(keys[k]) - log_sum);
            dq.add(p * (dy.times(values[k]) - product), keys[k]);
        }
    }
    block.store_turned(dq, scale, work.head, d_qkv);
}

// The gradients of keys and values: a thread has a key.
template <typename Real, u32 WIDTH>
__device__ void backward_keys(const Attention& spec, const Real* qkv, const i64* lengths, const Real* angles, Real scale,
                              const Real* output, const Real* log_sums, const Real* d_output, Real* d_qkv) {
    typedef Row<Real, WIDTH> Head;
    struct __align__(2 * sizeof(Real)) Numbers { Real log_sum, product; };
    Head *queries = (Head*)shared_bytes, *d_outputs = queries + blockDim.x;
    Numbers* all_numbers = (Numbers*)(d_outputs + blockDim.x);
    Block<Real, WIDTH> block(spec, spec.kv_heads, qkv, lengths, angles);
    Work work = block.work;
    u32 group = spec.heads / spec.kv_heads, key_head = spec.heads + work.head, real = block.length.real;
    Head k, v, dk = Head::filled(0), dv = dk;
    if (work.first < real) {
        k = block.rotated(block.nearest(), key_head);
        v = block.plain(block.nearest(), key_head + spec.kv_heads);
    }
    for (u32 head = work.head * group; head < (work.head + 1) * group; ++head) {
        for (u32 first = work.first; first < real; first += blockDim.x) {
            u32 token = min(first + threadIdx.x, real - 1);
            Head q = block.rotated(token, head), dy = block.output(d_output, token, head);
            q.scale(scale * to_base_2<Real>());
            Real log_sum = log_sums[spec.log_sum_at(work.row, head, token)];
            Real product = dy.times(block.output(output, token, head));
            __syncthreads();
            queries[threadIdx.x] = q;
            d_outputs[threadIdx.x] = dy;
            all_numbers[threadIdx.x] = Numbers{log_sum * to_base_2<Real>(), product};
            __syncthreads();
            // Queries before the key do not attend to it.
            u32 count = block.is_real() ? min(blockDim.x, real - first) : 0;
            // More at a time would not fit into registers.
            #pragma unroll 1
            for (u32 i = first == work.first ? threadIdx.x : 0; i < count; ++i) {
                Head dy = d_outputs[i];
                Numbers numbers = all_numbers[i];
                Real p = power(k.times(queries[i]) - numbers.log_sum);
                dv.add(p, dy);
                dk.add(p * (v.times(dy) - numbers.product), queries[i]);
            }
        }
    }
    block.store_turned(dk, to_base_e<Real>(), key_head, d_qkv);
    if (!block.is_real()) dv = Head::filled(behind<Real>(block.length));
    if (block.token < spec.seq) dv.store_to(d_qkv + spec.at(work.row, block.token, key_head + spec.kv_heads));
}

#define BACKWARD(S, NAME)                                                                                                \
    extern "C" __global__ void __launch_bounds__(MOST) narrow_##NAME##_##S(                                              \
        ATTENTION_ARGUMENTS, const S* qkv, const i64* lengths, const S* angles, double scale, const S* output,           \
        const S* log_sums, const S* d_output, S* d_qkv) {                                                                \
        if (head_dim == 8) NAME<S, 8>(ATTENTION, qkv, lengths, angles, scale, output, log_sums, d_output, d_qkv);        \
        else NAME<S, 16>(ATTENTION, qkv, lengths, angles, scale, output, log_sums, d_output, d_qkv);                     \
    }
#define FOR_REAL(S)                                                                                                      \
    extern "C" __global__ void __launch_bounds__(MOST) narrow_forward_##S(                                               \
        ATTENTION_ARGUMENTS, const S* qkv, const i64* lengths, const S* angles, double scale, S* output, S* log_sums) {  \
        if (head_dim == 8) forward<S, 8>(ATTENTION, qkv, lengths, angles, scale, output, log_sums);                      \
        else forward<S, 16>(ATTENTION, qkv, lengths, angles, scale, output, log_sums);                                   \
    }                                                                                                                    \
    BACKWARD(S, backward_queries)                                                                                        \
    BACKWARD(S, backward_keys)

FOR_REAL(f32)
FOR_REAL(f64)
