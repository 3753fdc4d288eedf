// Causal attention in 16 bits on tensor cores: a warp has 16 queries (or keys, in the gradients of keys), and meets 32 tokens of
// the other side at a time. Factors of products are rounded to 16 bits: rotated queries and keys, probabilities, and gradients
// of scores. Sums are f32.
//
// Scores of a warp stay in its registers: what a lane has of 16 x 16 results is what it needs of them as the left factor of the
// next product.

#if __CUDA_ARCH__ < 800
#error "attention in 16 bits needs a card of compute capability 8.0 or newer; pass --precision f32"
#endif

enum { OWN = 16, SIDE = 32, TILES = SIDE / 8 };

// All shared memory of a block: tiles of 16-bit numbers.
extern __shared__ __align__(16) unsigned char shared_bytes[];

// Where the columns of a head are in a tile. Each half of a head begins at a multiple of 8 and has zeros after it, so the two
// columns that are rotated together are at the same place of two matrices. Rows are longer by 8 numbers, which spreads them over
// the banks, and has room for two f32 of a row's token.
struct Slots {
    u32 half, slots_of_half;

    __device__ Slots(u32 head_dim) : half(head_dim / 2), slots_of_half((head_dim / 2 + 7) / 8 * 8) {}
    __device__ u32 count() const { return 2 * slots_of_half; }
    __device__ u32 pitch() const { return 2 * slots_of_half + 8; }
    // The two f32 after a row. The row ends at a multiple of 32 bytes.
    template <typename S> __device__ f32* behind(S* tile, u32 row) const { return (f32*)(tile + row * pitch() + count()); }
};

// Eight numbers side by side, two to a register.
template <typename S> struct Octet {
    u32 of[4];

    // The first `count` numbers from here on, and zeros after them: in one access, if they are eight and lie at a multiple of 16 bytes.
    __device__ Octet(const S* from, u32 count) {
        if (count == 8 && (u64)from % 16 == 0) {
            uint4 all = *(const uint4*)from;
            of[0] = all.x, of[1] = all.y, of[2] = all.z, of[3] = all.w;
            return;
        }
        #pragma unroll
        for (u32 k = 0; k < 4; ++k) {
            u32 low = 2 * k < count ? from[2 * k].bits : 0, high = 2 * k + 1 < count ? from[2 * k + 1].bits : 0;
            of[k] = low | high << 16;
        }
    }
    __device__ f32 operator[](u32 k) const { return load(S{(u16)(of[k / 2] >> k % 2 * 16)}); }
    __device__ void store(S* to) const { *(uint4*)to = make_uint4(of[0], of[1], of[2], of[3]); }
    // Stores the first `count` numbers, as they are loaded.
    __device__ void store(S* to, u32 count) const {
        if (count == 8 && (u64)to % 16 == 0) return store(to);
        #pragma unroll
        for (u32 k = 0; k < 8; ++k) {
            if (k < count) to[k].bits = (u16)(of[k / 2] >> k % 2 * 16);
        }
    }
    // Bits that are set if a number is not finite: the carry out of an exponent of ones.
    __device__ u32 overflow() const {
        const u32 ones = Tensor<S>::EXPONENTS, last = ones & ~(ones << 1);
        u32 bits = 0;
        for (u32 k = 0; k < 4; ++k) bits |= (of[k] & ones) + last;
        return bits & 0x80008000u;
    }
};

// The same for a run of f32.
__device__ void load_octet(const f32* from, u32 count, f32 (&to)[8]) {
    if (count == 8 && (u64)from % 16 == 0) {
        float4 low = *(const float4*)from, high = *(const float4*)(from + 4);
        to[0] = low.x, to[1] = low.y, to[2] = low.z, to[3] = low.w;
        to[4] = high.x, to[5] = high.y, to[6] = high.z, to[7] = high.w;
        return;
    }
    #pragma unroll
    for (u32 k = 0; k < 8; ++k) to[k] = k < count ? from[k] : 0;
}

// Rotates eight pairs by the angles of a token, the first of which is at `column`, and multiplies them by a factor.
template <typename S>
__device__ void turn(Octet<S>& first, Octet<S>& second, const f32* of_token, u32 half, u32 column, u32 count, f32 factor) {
    f32 cosines[8], sines[8];
    load_octet(of_token + column, count, cosines);
    load_octet(of_token + half + column, count, sines);
    #pragma unroll
    for (u32 k = 0; k < 8; k += 2) {
        f32 x[2], y[2];
        for (u32 j = 0; j < 2; ++j) {
            f32 cosine = cosines[k + j], sine = sines[k + j], a = first[k + j], b = second[k + j];
            x[j] = (a * cosine - b * sine) * factor;
            y[j] = (b * cosine + a * sine) * factor;
        }
        first.of[k / 2] = Tensor<S>::pair(x[0], x[1]);
        second.of[k / 2] = Tensor<S>::pair(y[0], y[1]);
    }
}

// Copies a head of `count` tokens from `first` on, rotated and times a factor if there are angles. After the real ones are zeros.
// The real ones are also written to `copy`, if that is given, with the stride of a copy. Whether this thread has met a number that is
// not finite.
template <typename S>
__device__ bool load_tile(const S* from, u64 stride, u32 first, u32 count, u32 end, Slots slots, const f32* angles,
                          f32 factor, S* tile, S* copy = 0, u64 copy_stride = 0) {
    u32 octets = slots.slots_of_half / 8, overflow = 0;
    for (u32 i = threadIdx.x; i < count * octets; i += blockDim.x) {
        u32 r = i / octets, c = i % octets * 8, token = first + r, there = token < end ? min(8, slots.half - c) : 0;
        const S* head = from + token * stride + c;
        Octet<S> x(head, there), y(head + slots.half, there);
        if (angles && there > 0) turn(x, y, angles + (u64)token * 2 * slots.half, slots.half, c, there, factor);
        S* to = tile + r * slots.pitch() + c;
        x.store(to);
        y.store(to + slots.slots_of_half);
        if (copy) {
            x.store(copy + token * copy_stride + c, there);
            y.store(copy + token * copy_stride + c + slots.half, there);
        }
        overflow |= x.overflow() | y.overflow();
    }
    return overflow;
}

// This thread's place in its warp, and the first row of the warp in its block.
struct Place {
    u32 lane, row;

    __device__ Place() : lane(threadIdx.x % 32), row(threadIdx.x / 32 * OWN) {}
    // The row and the first column of its results in a tile of 8 columns: g, and g + 8 in the second half of them.
    __device__ u32 row_of(u32 half) const { return row + lane / 4 + 8 * half; }
    __device__ u32 column() const { return lane % 4 * 2; }
};

// The scalar products of the warp's rows of a with the rows of b, in tiles of 8 of them. Pairs of tiles outside of begin to end
// are left out.
template <typename S>
__device__ void square(const S* a, const S* b, Slots slots, Place at, u32 begin, u32 end, Sums (&sums)[TILES]) {
    for (u32 j = 0; j < TILES; ++j) {
        for (u32 k = 0; k < 4; ++k) sums[j][k] = 0;
    }
    u32 left = shared_address(a + (at.row + at.lane % 16) * slots.pitch() + at.lane / 16 * 8);
    u32 right = shared_address(b + (at.lane / 16 * 8 + at.lane % 8) * slots.pitch() + at.lane / 8 % 2 * 8);
    for (u32 k = 0; k < slots.count(); k += 16) {
        u32 x[4], y[4];
        load_matrices(x, left + k * sizeof(S));
        #pragma unroll
        for (u32 j = 0; j < TILES; j += 2) {
            if (8 * j >= end || 8 * j + 16 <= begin) continue;
            load_matrices(y, right + (8 * j * slots.pitch() + k) * sizeof(S));
            Tensor<S>::multiply(sums[j], x, y[0], y[1]);
            Tensor<S>::multiply(sums[j + 1], x, y[2], y[3]);
        }
    }
}

// Results for COLUMNS slots of each half of a head.
template <u32 COLUMNS> struct Results {
    enum { TILES_OF_HALF = COLUMNS / 8 };
    Sums of[2][TILES_OF_HALF];
    // The first of the slots in each half.
    u32 first;

    __device__ Results() : first(blockIdx.y * COLUMNS) {
        for (u32 n = 0; n < TILES_OF_HALF; ++n) {
            for (u32 k = 0; k < 4; ++k) of[0][n][k] = of[1][n][k] = 0;
        }
    }

    // Adds weights b, where the columns of the weights are the rows of b. They are zero outside of begin to end.
    template <typename S>
    __device__ void add(const Sums (&weights)[TILES], const S* b, Slots slots, Place at, u32 begin, u32 end) {
        u32 right = shared_address(b + at.lane % 16 * slots.pitch() + first + at.lane / 16 * slots.slots_of_half);
        #pragma unroll
        for (u32 j = 0; j < TILES; j += 2) {
            if (8 * j >= end || 8 * j + 16 <= begin) continue;
            const Sums &low = weights[j], &high = weights[j + 1];
            u32 x[4] = {Tensor<S>::pair(low[0], low[1]), Tensor<S>::pair(low[2], low[3]),
                        Tensor<S>::pair(high[0], high[1]), Tensor<S>::pair(high[2], high[3])};
            #pragma unroll
            for (u32 n = 0; n < TILES_OF_HALF; ++n) {
                if (first + 8 * n >= slots.slots_of_half) break;
                u32 y[4];
                load_transposed(y, right + (8 * j * slots.pitch() + 8 * n) * sizeof(S));
                Tensor<S>::multiply(of[0][n], x, y[0], y[1]);
                Tensor<S>::multiply(of[1][n], x, y[2], y[3]);
            }
        }
    }

    // The same, one number after the other and only where is_there(half, row of b): a weight of zero does not count even if it
    // meets a number that is not finite, as it would in a product of matrices. This is rare, so it is short instead of fast.
    template <typename S, typename IsThere>
    __device__ void add_each(const Sums (&weights)[TILES], const S* b, Slots slots, Place at, IsThere is_there) {
        f32 rounded[4 * TILES];
        for (u32 k = 0; k < 4 * TILES; ++k) rounded[k] = load(As<S>::store(weights[k / 4][k % 4]));
        #pragma unroll 1
        for (u32 r = 0; r < SIDE; ++r, b += slots.pitch()) {
            u32 from = at.lane / 4 * 4 + r % 8 / 2, place = r / 8 * 4 + r % 2;
            f32 low = __shfl_sync(~0u, rounded[place], from), high = __shfl_sync(~0u, rounded[place + 2], from);
            bool has_low = is_there(0, r), has_high = is_there(1, r);
            #pragma unroll
            for (u32 n = 0; n < TILES_OF_HALF; ++n) {
                #pragma unroll
                for (u32 k = 0; k < 2; ++k) {
                    u32 column = first + 8 * n + at.column() + k;
                    if (column >= slots.half) continue;
                    f32 x = load(b[column]), y = load(b[slots.slots_of_half + column]);
                    if (has_low) of[0][n][k] = fused(low, x, of[0][n][k]);
                    if (has_low) of[1][n][k] = fused(low, y, of[1][n][k]);
                    if (has_high) of[0][n][2 + k] = fused(high, x, of[0][n][2 + k]);
                    if (has_high) of[1][n][2 + k] = fused(high, y, of[1][n][2 + k]);
                }
            }
        }
    }

    // Multiplies the results of row g, or g + 8.
    __device__ void scale(u32 half, f32 factor) {
        #pragma unroll
        for (u32 n = 0; n < TILES_OF_HALF; ++n) {
            for (u32 k = 2 * half; k < 2 * half + 2; ++k) {
                of[0][n][k] *= factor;
                of[1][n][k] *= factor;
            }
        }
    }

    // Calls store(column, x, y) for each column of the first half of a head that this thread has in row g, or g + 8, with the
    // results of that column and of its partner.
    template <typename Store> __device__ void for_each(u32 half, Slots slots, Place at, Store store) const {
        #pragma unroll
        for (u32 n = 0; n < TILES_OF_HALF; ++n) {
            #pragma unroll
            for (u32 k = 0; k < 2; ++k) {
                u32 column = first + 8 * n + at.column() + k;
                if (column < slots.half) store(column, of[0][n][2 * half + k], of[1][n][2 * half + k]);
            }
        }
    }

    // Writes gradients of rotated rows, rotated back and times a factor; or as they are, without angles.
    template <typename S>
    __device__ void store_turned(const Attention<f32>& spec, const Work& work, const Length& length, u32 head, Slots slots, Place at,
                                 const f32* angles, f32 factor, S* d_qkv) const {
        #pragma unroll
        for (u32 half = 0; half < 2; ++half) {
            u32 token = work.first + at.row_of(half);
            if (token >= spec.seq) continue;
            S* to = d_qkv + spec.at(work.row, token, head);
            bool is_real = token < length.real;
            for_each(half, slots, at, [=](u32 column, f32 first, f32 second) {
                f32 x = first, y = second;
                if (angles && is_real) {
                    f32 cosine = angles[(u64)token * spec.head_dim + column];
                    f32 sine = angles[(u64)token * spec.head_dim + slots.half + column];
                    x = (first * cosine + second * sine) * factor;
                    y = (second * cosine - first * sine) * factor;
                }
                to[column] = As<S>::store(is_real ? x : behind<f32>(length));
                to[slots.half + column] = As<S>::store(is_real ? y : behind<f32>(length));
            });
        }
    }
};

// The largest, and the sum, over the 4 lanes that share rows.
__device__ f32 largest_of_lanes(f32 x) {
    for (u32 mask = 1; mask < 4; mask *= 2) x = fmaxf(x, __shfl_xor_sync(~0u, x, mask));
    return x;
}
__device__ f32 sum_of_lanes(f32 x) {
    for (u32 mask = 1; mask < 4; mask *= 2) x += __shfl_xor_sync(~0u, x, mask);
    return x;
}

// Columns of results of a block in each half of a head, and its threads. Narrow heads leave room for more queries, which share the
// keys that are loaded. The gradients of keys come with those of values, and with them for all heads of a group.
enum { WIDE = 64, NARROW = 32, MANY = 256, FEW = 128 };

template <typename H, u32 COLUMNS>
__global__ void __launch_bounds__(COLUMNS == NARROW ? MANY : FEW) halves_forward(Attention<f32> spec, const H* qkv, H* output, f32* log_sums) {
    u32 head_dim = spec.head_dim, side = blockDim.x / 2;
    Slots slots(head_dim);
    H* q = (H*)shared_bytes;
    H* k = q + side * slots.pitch();
    H* v = k + SIDE * slots.pitch();
    Work work(spec.seq, spec.heads, side);
    Length length(spec, work.row);
    Place at;
    const H* of_row = qkv + spec.at(work.row, 0, 0);
    u64 stride = spec.qkv_columns();
    u32 key_head = spec.keys_of(work.head), end = min(work.first + side, length.real);
    const f32 lowest = -__int_as_float(0x7f800000);
    f32 most[2] = {lowest, lowest}, total[2] = {0, 0};
    Results<COLUMNS> sums;
    if (work.first < length.real) {
        load_tile(of_row + (u64)work.head * head_dim, stride, work.first, side, end, slots, spec.angles,
                  (f32)spec.scale * to_base_2<f32>(), q);
    }
    for (u32 first = 0; work.first < length.real && first < end; first += SIDE) {
        __syncthreads();
        load_tile(of_row + (u64)key_head * head_dim, stride, first, SIDE, end, slots, spec.angles, 1.0f, k);
        bool has_infinite = load_tile(of_row + (u64)(key_head + spec.kv_heads) * head_dim, stride, first, SIDE, end, slots,
                                      (const f32*)0, 1.0f, v);
        has_infinite = __syncthreads_or(has_infinite);
        // The keys that the last query of this warp attends to.
        u32 last = work.first + at.row + OWN;
        if (last <= first) continue;
        bool has_later = first + SIDE > last - OWN + 1;
        Sums scores[TILES];
        square(q, k, slots, at, 0, last - first, scores);
        #pragma unroll
        for (u32 half = 0; half < 2; ++half) {
            // A query of padding has its own key too, so no row is without scores.
            u32 query = work.first + at.row_of(half);
            f32 best = most[half];
            for (u32 j = 0; has_later && j < TILES; ++j) {
                for (u32 c = 0; c < 2; ++c) {
                    if (first + 8 * j + at.column() + c > query) scores[j][2 * half + c] = lowest;
                }
            }
            for (u32 j = 0; j < TILES; ++j) {
                for (u32 c = 0; c < 2; ++c) best = fmaxf(best, scores[j][2 * half + c]);
            }
            best = largest_of_lanes(best);
            f32 factor = power(most[half] - best);
            most[half] = best;
            total[half] *= factor;
            sums.scale(half, factor);
            for (u32 j = 0; j < TILES; ++j) {
                for (u32 c = 0; c < 2; ++c) {
                    f32& score = scores[j][2 * half + c];
                    score = power(score - best);
                    total[half] += score;
                }
            }
        }
        if (has_infinite) {
            sums.add_each(scores, v, slots, at,
                          [=](u32 half, u32 key) { return first + key <= work.first + at.row_of(half); });
        } else {
            sums.add(scores, v, slots, at, 0, last - first);
        }
    }
    #pragma unroll
    for (u32 half = 0; half < 2; ++half) {
        f32 all = sum_of_lanes(total[half]), part = 1 / all;
        u32 token = work.first + at.row_of(half);
        if (token >= spec.seq) continue;
        bool is_real = token < length.real;
        H* to = output + spec.output_at(work.row, token, work.head);
        sums.for_each(half, slots, at, [=](u32 column, f32 x, f32 y) {
            to[column] = As<H>::store(is_real ? x * part : behind<f32>(length));
            to[slots.half + column] = As<H>::store(is_real ? y * part : behind<f32>(length));
        });
        if (at.lane % 4 == 0 && blockIdx.y == 0) {
            f32 log_sum = most[half] * to_base_e<f32>() + log(all);
            log_sums[spec.log_sum_at(work.row, work.head, token)] = is_real ? log_sum : behind<f32>(length);
        }
    }
}

// The logarithms of a block's queries, to the base 2, and the products of their output with its gradient, behind their rows in their
// tile. 4 lanes sum for a query. The products are also stored, for the gradients of keys.
template <typename S>
__device__ void load_results(const Attention<f32>& spec, const Work& work, u32 side, u32 end, const S* output, const f32* log_sums,
                             const S* d_output, Slots slots, S* q, f32* products) {
    for (u32 i = threadIdx.x / 4; i < side; i += blockDim.x / 4) {
        bool is_there = work.first + i < end;
        u64 from = is_there ? spec.output_at(work.row, work.first + i, work.head) : 0;
        f32 sum = 0;
        for (u32 c = threadIdx.x % 4 * 8; is_there && c < spec.head_dim; c += 32) {
            u32 there = min(8, spec.head_dim - c);
            Octet<S> x(output + from + c, there), dy(d_output + from + c, there);
            for (u32 k = 0; k < 8; ++k) sum = fused(dy[k], x[k], sum);
        }
        sum = sum_of_lanes(sum);
        if (threadIdx.x % 4 > 0) continue;
        u64 of_query = spec.log_sum_at(work.row, work.head, work.first + i);
        f32* to = slots.behind(q, i);
        to[0] = is_there ? log_sums[of_query] * to_base_2<f32>() : 0;
        to[1] = sum;
        if (is_there && blockIdx.y == 0) products[of_query] = sum;
    }
}

// Turns scores into probabilities, and gradients of probabilities into those of scores. results_of(half, column) are the two
// numbers of the query of a pair; pairs that the mask leaves out become zero.
template <typename IsThere, typename ResultsOf>
__device__ void differentiate(Sums (&scores)[TILES], Sums (&gradients)[TILES], Place at, IsThere is_there, ResultsOf results_of) {
    for (u32 half = 0; half < 2; ++half) {
        for (u32 j = 0; j < TILES; ++j) {
            for (u32 k = 2 * half; k < 2 * half + 2; ++k) {
                u32 column = 8 * j + at.column() + k % 2;
                const f32* results = results_of(half, column);
                f32 &score = scores[j][k], &gradient = gradients[j][k];
                score = is_there(half, column) ? power(score - results[0]) : 0;
                gradient = is_there(half, column) ? score * (gradient - results[1]) : 0;
            }
        }
    }
}

// The gradient of queries: a block has queries, and visits their keys. The queries as they are multiplied go to `turned`, (batch, seq,
// heads, head_dim), for the gradients of keys.
template <typename H, u32 COLUMNS>
__global__ void __launch_bounds__(COLUMNS == NARROW ? MANY : FEW) halves_backward_queries(
    Attention<f32> spec, const H* qkv, const H* output, const f32* log_sums, const H* d_output, H* d_qkv, f32* products,
    H* turned) {
    u32 head_dim = spec.head_dim, side = blockDim.x / 2;
    Slots slots(head_dim);
    H* q = (H*)shared_bytes;
    H* dy = q + side * slots.pitch();
    H* k = dy + side * slots.pitch();
    H* v = k + SIDE * slots.pitch();
    Work work(spec.seq, spec.heads, side);
    Length length(spec, work.row);
    Place at;
    const H* of_row = qkv + spec.at(work.row, 0, 0);
    u64 stride = spec.qkv_columns(), output_stride = (u64)spec.heads * head_dim;
    u32 key_head = spec.keys_of(work.head), end = min(work.first + side, length.real);
    Results<COLUMNS> sums;
    if (work.first < length.real) {
        H* copy = blockIdx.y == 0 ? turned + spec.output_at(work.row, 0, work.head) : 0;
        load_tile(of_row + (u64)work.head * head_dim, stride, work.first, side, end, slots, spec.angles,
                  (f32)spec.scale * to_base_2<f32>(), q, copy, output_stride);
        load_tile(d_output + spec.output_at(work.row, 0, work.head), output_stride, work.first, side, end, slots,
                  (const f32*)0, 1.0f, dy);
        load_results(spec, work, side, end, output, log_sums, d_output, slots, q, products);
    }
    for (u32 first = 0; work.first < length.real && first < end; first += SIDE) {
        __syncthreads();
        bool has_infinite =
            load_tile(of_row + (u64)key_head * head_dim, stride, first, SIDE, end, slots, spec.angles, 1.0f, k);
        load_tile(of_row + (u64)(key_head + spec.kv_heads) * head_dim, stride, first, SIDE, end, slots, (const f32*)0, 1.0f, v);
        has_infinite = __syncthreads_or(has_infinite);
        u32 last = work.first + at.row + OWN;
        if (last <= first) continue;
        Sums scores[TILES], gradients[TILES];
        square(q, k, slots, at, 0, last - first, scores);
        square(dy, v, slots, at, 0, last - first, gradients);
        auto is_there = [=](u32 half, u32 key) {
            u32 query = work.first + at.row_of(half);
            return first + key <= query && query < end;
        };
        auto results_of = [=](u32 half, u32) { return slots.behind(q, at.row_of(half)); };
        if (first + SIDE < last - OWN + 2 && last <= end) {
            differentiate(scores, gradients, at, All(), results_of);
        } else {
            differentiate(scores, gradients, at, is_there, results_of);
        }
        if (has_infinite) {
            sums.add_each(gradients, k, slots, at, is_there);
        } else {
            sums.add(gradients, k, slots, at, 0, last - first);
        }
    }
    sums.store_turned(spec, work, length, work.head, slots, at, spec.angles, spec.scale, d_qkv);
}

// The gradients of keys and values: a block has keys, and visits the queries that attend to them, head by head.
template <typename H>
__global__ void __launch_bounds__(FEW) halves_backward_keys(
    Attention<f32> spec, const H* qkv, const f32* log_sums, const f32* products, const H* turned, const H* d_output, H* d_qkv) {
    u32 head_dim = spec.head_dim, side = blockDim.x / 2;
    Slots slots(head_dim);
    H* k = (H*)shared_bytes;
    H* v = k + side * slots.pitch();
    H* q = v + side * slots.pitch();
    H* dy = q + SIDE * slots.pitch();
    Work work(spec.seq, spec.kv_heads, side, true);
    Length length(spec, work.row);
    Place at;
    const H* of_row = qkv + spec.at(work.row, 0, 0);
    u64 stride = spec.qkv_columns(), output_stride = (u64)spec.heads * head_dim;
    u32 group = spec.heads / spec.kv_heads, key_head = spec.heads + work.head, real = length.real;
    Results<NARROW> dk, dv;
    if (work.first < real) {
        load_tile(of_row + (u64)key_head * head_dim, stride, work.first, side, real, slots, spec.angles, 1.0f, k);
        load_tile(of_row + (u64)(key_head + spec.kv_heads) * head_dim, stride, work.first, side, real, slots, (const f32*)0,
                  1.0f, v);
    }
    for (u32 head = work.head * group; head < (work.head + 1) * group; ++head) {
        for (u32 first = work.first; first < real; first += SIDE) {
            __syncthreads();
            u64 of_head = spec.output_at(work.row, 0, head);
            bool has_infinite =
                load_tile(turned + of_head, output_stride, first, SIDE, real, slots, (const f32*)0, 1.0f, q);
            has_infinite |=
                load_tile(d_output + of_head, output_stride, first, SIDE, real, slots, (const f32*)0, 1.0f, dy);
            for (u32 i = threadIdx.x; i < SIDE; i += blockDim.x) {
                bool is_real = first + i < real;
                u64 of_query = spec.log_sum_at(work.row, head, first + i);
                f32* to = slots.behind(q, i);
                to[0] = is_real ? log_sums[of_query] * to_base_2<f32>() : 0;
                to[1] = is_real ? products[of_query] : 0;
            }
            has_infinite = __syncthreads_or(has_infinite);
            // Queries before the first key of this warp do not attend to its keys.
            u32 key = work.first + at.row, begin = key > first ? key - first : 0;
            if (begin >= SIDE) continue;
            Sums scores[TILES], gradients[TILES];
            square(k, q, slots, at, begin, SIDE, scores);
            square(v, dy, slots, at, begin, SIDE, gradients);
            auto is_there = [=](u32 half, u32 query) {
                return work.first + at.row_of(half) <= first + query && first + query < real;
            };
            auto results_of = [=](u32, u32 query) { return slots.behind(q, query); };
            if (key + OWN <= first + 1 && first + SIDE <= real) {
                differentiate(scores, gradients, at, All(), results_of);
            } else {
                differentiate(scores, gradients, at, is_there, results_of);
            }
            if (has_infinite) {
                dv.add_each(scores, dy, slots, at, is_there);
                dk.add_each(gradients, q, slots, at, is_there);
            } else {
                dv.add(scores, dy, slots, at, begin, SIDE);
                dk.add(gradients, q, slots, at, begin, SIDE);
            }
        }
    }
    dk.store_turned(spec, work, length, key_head, slots, at, spec.angles, to_base_e<f32>(), d_qkv);
    dv.store_turned(spec, work, length, key_head + spec.kv_heads, slots, at, (const f32*)0, 1.0f, d_qkv);
}
