// Causal attention, tile by tile: 32 queries and 32 keys at a time, in shared memory, with the online softmax.
//
// A block has 8 x 16 threads. A thread has 4 queries (or keys, in the gradients of keys) and 2 of the other side of a square
// of scores, and the same 4 of a tile of results with every 16th of up to 128 columns (64 in f64, which saves registers). A
// head of more columns is divided between blocks, which compute its scores again.

enum { SIDE = 32, ROWS = 8, LANES = 16, THREADS = ROWS * LANES, OWN = SIDE / ROWS, PAIRED = SIDE / LANES };
// The columns of a thread, those of them in each half of a head, and the columns of a block in each half: columns are rotated
// in pairs, one of each half.
template <typename Real> struct Share {
    enum { COLUMNS = 32 / sizeof(Real), HALF = COLUMNS / 2, OF_BLOCK = HALF * LANES };
};
// After each row of a square, and of a tile, there is an element, which spreads columns over the banks.
enum { PITCH = SIDE + 1 };
__device__ u32 pitch_of(u32 head_dim) { return head_dim + 1; }

// All shared memory of a block: tiles of (SIDE, head_dim), then squares of (SIDE, SIDE), then numbers of a tile's tokens.
extern __shared__ __align__(16) unsigned char shared_bytes[];

template <typename Real> using Square = Real (*)[PITCH];

// Copies a head of the tokens from `first` on, rotated and times a factor if there are angles. After the real ones are zeros.
template <typename Real>
__device__ void load_tile(const Real* from, u64 stride, u32 first, u32 end, u32 head_dim, u32 pitch,
                          const Real* angles, Real factor, Real* tile) {
    u32 half = head_dim / 2;
    for (u32 i = threadIdx.x; i < SIDE * half; i += THREADS) {
        u32 r = i / half, c = i % half, token = first + r;
        Real x = 0, y = 0;
        if (token < end) {
            const Real* head = from + token * stride;
            x = head[c];
            y = head[c + half];
            if (angles) {
                Real cosine = angles[(u64)token * head_dim + c], sine = angles[(u64)token * head_dim + half + c];
                Real turned = (x * cosine - y * sine) * factor;
                y = (y * cosine + x * sine) * factor;
                x = turned;
            }
        }
        tile[r * pitch + c] = x;
        tile[r * pitch + half + c] = y;
    }
}

// Where this thread is: its rows begin at OWN * row, and its columns are lane, lane + LANES, ...
struct Place {
    u32 row, lane;
    __device__ Place() : row(threadIdx.x / LANES * OWN), lane(threadIdx.x % LANES) {}
};

// The scalar products of this thread's rows of a with its columns, which are rows of b.
template <typename Real>
__device__ void square(const Real* a, const Real* b, u32 head_dim, u32 pitch, Place at, Real (&sums)[OWN][PAIRED]) {
    for (u32 i = 0; i < OWN; ++i) {
        for (u32 j = 0; j < PAIRED; ++j) sums[i][j] = 0;
    }
    for (u32 c = 0; c < head_dim; ++c) {
        Real left[OWN], right[PAIRED];
        for (u32 i = 0; i < OWN; ++i) left[i] = a[(at.row + i) * pitch + c];
        for (u32 j = 0; j < PAIRED; ++j) right[j] = b[(at.lane + j * LANES) * pitch + c];
        for (u32 i = 0; i < OWN; ++i) {
            for (u32 j = 0; j < PAIRED; ++j) sums[i][j] = fused(left[i], right[j], sums[i][j]);
        }
    }
}

// The columns of this thread: the first half of them is in the first half of the head.
template <typename Real> struct Columns {
    typedef Share<Real> Of;
    u32 half, first, lane;

    __device__ Columns(u32 head_dim, u32 part, u32 lane) : half(head_dim / 2), first(part * Of::OF_BLOCK), lane(lane) {}
    // Whether this thread has any.
    __device__ bool is_live() const { return first + lane < half; }
    __device__ bool has(u32 c) const { return first + c % Of::HALF * LANES + lane < half; }
    __device__ u32 at(u32 c) const { return first + c % Of::HALF * LANES + lane + (c < Of::HALF ? 0 : half); }
};

// sums += weights b, where a row of weights belongs to a row of this thread. Their elements from begin to end are not zero,
// and each has a row of b. Only pairs (own row, row of b) that are there count: a weight of zero would not leave out a number that
// is not finite.
template <typename Real, typename IsThere = All>
__device__ void add_weighted(Square<Real> weights, u32 begin, u32 end, const Real* b, u32 pitch, Place at,
                             const Columns<Real>& columns, Real (&sums)[OWN][Share<Real>::COLUMNS],
                             IsThere is_there = All()) {
    if (!columns.is_live()) return;
    for (u32 k = begin; k < end; ++k) {
        Real left[OWN];
        for (u32 i = 0; i < OWN; ++i) left[i] = weights[at.row + i][k];
        #pragma unroll
        for (u32 c = 0; c < Share<Real>::COLUMNS; ++c) {
            if (!columns.has(c)) continue;
            Real right = b[k * pitch + columns.at(c)];
            for (u32 i = 0; i < OWN; ++i) {
                if (is_there(i, k)) sums[i][c] = fused(left[i], right, sums[i][c]);
            }
        }
    }
}

// The same for queries and keys of a tile, of which the last ones are those of some of this thread's queries only.
template <typename Real>
__device__ void add_keys(Square<Real> weights, const Work& work, u32 first, u32 end, const Real* b, u32 pitch, Place at,
                         const Columns<Real>& columns, Real (&sums)[OWN][Share<Real>::COLUMNS]) {
    // The keys of the first query, and of the last one. All are before `end`.
    u32 of_first = work.first + at.row + 1 - first, whole = min(SIDE, min(end - first, of_first));
    u32 keys = min(SIDE, min(end - first, of_first + OWN - 1));
    add_weighted(weights, 0, whole, b, pitch, at, columns, sums);
    add_weighted(weights, whole, keys, b, pitch, at, columns, sums, [=](u32 i, u32 key) { return key < of_first + i; });
}

// The largest, and the sum, over the 16 threads that share rows.
template <typename Real> __device__ Real largest_of_lanes(Real x) {
    for (u32 mask = LANES / 2; mask > 0; mask /= 2) {
        Real other = __shfl_xor_sync(~0u, x, mask);
        x = other > x ? other : x;
    }
    return x;
}
template <typename Real> __device__ Real sum_of_lanes(Real x) {
    for (u32 mask = LANES / 2; mask > 0; mask /= 2) x += __shfl_xor_sync(~0u, x, mask);
    return x;
}

template <typename Real>
__global__ void attention_forward(Attention<Real> spec, const Real* qkv, Real* output, Real* log_sums) {
    u32 head_dim = spec.head_dim, pitch = pitch_of(head_dim);
    Real* q = (Real*)shared_bytes;
    Real* k = q + SIDE * pitch;
    Real* v = k + SIDE * pitch;
    Square<Real> p = (Square<Real>)(v + SIDE * pitch);
    Work work(spec.seq, spec.heads, SIDE);
    Length length(spec, work.row);
    Place at;
    Columns<Real> columns(head_dim, blockIdx.y, at.lane);
    const Real* of_row = qkv + spec.at(work.row, 0, 0);
    u64 stride = spec.qkv_columns();
    u32 key_head = spec.keys_of(work.head);
    const Real lowest = -(Real)__int_as_float(0x7f800000);
    Real most[OWN], total[OWN], sums[OWN][Share<Real>::COLUMNS] = {};
    for (u32 i = 0; i < OWN; ++i) {
        most[i] = lowest;
        total[i] = 0;
    }
    u32 end = min(work.first + SIDE, length.real);
    if (work.first < length.real) {
        load_tile(of_row + (u64)work.head * head_dim, stride, work.first, end, head_dim, pitch, spec.angles,
                  (Real)spec.scale * to_base_2<Real>(), q);
        for (u32 first = 0; first < end; first += SIDE) {
            __syncthreads();
            load_tile(of_row + (u64)key_head * head_dim, stride, first, end, head_dim, pitch, spec.angles, (Real)1, k);
            load_tile(of_row + (u64)(key_head + spec.kv_heads) * head_dim, stride, first, end, head_dim, pitch,
                      (const Real*)0, (Real)1, v);
            __syncthreads();
            Real scores[OWN][PAIRED];
            square(q, k, head_dim, pitch, at, scores);
            for (u32 i = 0; i < OWN; ++i) {
                // A query of padding has its own key too, so no row is without scores.
                Real best = most[i];
                for (u32 j = 0; j < PAIRED; ++j) {
                    if (first + at.lane + j * LANES > work.first + at.row + i) scores[i][j] = lowest;
                    best = scores[i][j] > best ? scores[i][j] : best;
                }
                best = largest_of_lanes(best);
                Real factor = power(most[i] - best), sum = 0;
                most[i] = best;
                for (u32 j = 0; j < PAIRED; ++j) {
                    Real weight = power(scores[i][j] - best);
                    p[at.row + i][at.lane + j * LANES] = weight;
                    sum += weight;
                }
                total[i] = total[i] * factor + sum_of_lanes(sum);
                for (u32 c = 0; columns.is_live() && c < Share<Real>::COLUMNS; ++c) sums[i][c] *= factor;
            }
            // Weights go from lane to lane of a warp only, for its rows.
            __syncwarp();
            add_keys(p, work, first, end, v, pitch, at, columns, sums);
        }
    }
    for (u32 i = 0; i < OWN; ++i) {
        u32 token = work.first + at.row + i;
        if (token >= spec.seq) continue;
        bool is_real = token < length.real;
        Real* to = output + spec.output_at(work.row, token, work.head);
        for (u32 c = 0; c < Share<Real>::COLUMNS; ++c) {
            if (columns.has(c)) to[columns.at(c)] = is_real ? sums[i][c] / total[i] : behind<Real>(length);
        }
        if (at.lane == 0 && blockIdx.y == 0) {
            Real log_sum = most[i] * to_base_e<Real>() + log(total[i]);
            log_sums[spec.log_sum_at(work.row, work.head, token)] = is_real ? log_sum : behind<Real>(length);
        }
    }
}

// The numbers of the gradients of a square of queries and keys, for this thread's pairs: the probability, and the gradient of the
// score. `log_sums` and `products` belong to queries.
template <typename Real> struct Pair {
    Real p, ds;

    __device__ Pair(bool is_there, Real score, Real log_sum, Real dp, Real product) {
        p = is_there ? power(score - log_sum) : 0;
        ds = is_there ? p * (dp - product) : 0;
    }
};

// The logarithms of a tile of queries, to the base 2, and the products of the output with its gradient. The threads that share rows of a tile
// sum for these rows.
template <typename Real>
__device__ void load_results(const Attention<Real>& spec, const Work& work, u32 head, u32 first, u32 end, Place at,
                             const Real* output, const Real* log_sums, const Real* d_output,
                             Real* logs, Real* products) {
    for (u32 i = at.row; i < at.row + OWN; ++i) {
        Real sum = 0;
        bool is_there = first + i < end;
        u64 from = is_there ? spec.output_at(work.row, first + i, head) : 0;
        for (u32 c = at.lane; is_there && c < spec.head_dim; c += LANES) {
            sum = fused(d_output[from + c], output[from + c], sum);
        }
        sum = sum_of_lanes(sum);
        if (at.lane == 0) {
            products[i] = sum;
            logs[i] = is_there ? log_sums[spec.log_sum_at(work.row, head, first + i)] * to_base_2<Real>() : 0;
        }
    }
}

// Writes gradients of rotated rows, rotated back and times a factor. The partner of a column is in the same thread.
template <typename Real>
__device__ void store_turned(const Attention<Real>& spec, const Work& work, const Length& length, u32 head, Place at,
                             const Columns<Real>& columns, Real factor, const Real (&sums)[OWN][Share<Real>::COLUMNS],
                             Real* d_qkv) {
    u32 half = columns.half;
    for (u32 i = 0; i < OWN; ++i) {
        u32 token = work.first + at.row + i;
        if (token >= spec.seq) continue;
        Real* to = d_qkv + spec.at(work.row, token, head);
        for (u32 c = 0; c < Share<Real>::HALF; ++c) {
            if (!columns.has(c)) continue;
            u32 column = columns.at(c);
            Real x = behind<Real>(length), y = x;
            if (token < length.real) {
                Real cosine = spec.angles[(u64)token * spec.head_dim + column];
                Real sine = spec.angles[(u64)token * spec.head_dim + half + column];
                Real first = sums[i][c], second = sums[i][c + Share<Real>::HALF];
                x = (first * cosine + second * sine) * factor;
                y = (second * cosine - first * sine) * factor;
            }
            to[column] = x;
            to[half + column] = y;
        }
    }
}

// The gradient of queries: a block has a tile of queries, and visits their keys.
template <typename Real>
__global__ void attention_backward_queries(Attention<Real> spec, const Real* qkv, const Real* output,
                                           const Real* log_sums, const Real* d_output, Real* d_qkv) {
    u32 head_dim = spec.head_dim, pitch = pitch_of(head_dim);
    Real* q = (Real*)shared_bytes;
    Real* dy = q + SIDE * pitch;
    Real* k = dy + SIDE * pitch;
    Real* v = k + SIDE * pitch;
    Square<Real> ds = (Square<Real>)(v + SIDE * pitch);
    Real *logs = (Real*)(ds + SIDE), *products = logs + SIDE;
    Work work(spec.seq, spec.heads, SIDE);
    Length length(spec, work.row);
    Place at;
    Columns<Real> columns(head_dim, blockIdx.y, at.lane);
    const Real* of_row = qkv + spec.at(work.row, 0, 0);
    u64 stride = spec.qkv_columns(), output_stride = (u64)spec.heads * head_dim;
    u32 key_head = spec.keys_of(work.head), end = min(work.first + SIDE, length.real);
    Real sums[OWN][Share<Real>::COLUMNS] = {};
    if (work.first < length.real) {
        load_tile(of_row + (u64)work.head * head_dim, stride, work.first, end, head_dim, pitch, spec.angles,
                  (Real)spec.scale * to_base_2<Real>(), q);
        load_tile(d_output + spec.output_at(work.row, 0, work.head), output_stride, work.first, end, head_dim, pitch,
                  (const Real*)0, (Real)1, dy);
        load_results(spec, work, work.head, work.first, end, at, output, log_sums, d_output, logs, products);
        for (u32 first = 0; first < end; first += SIDE) {
            __syncthreads();
            load_tile(of_row + (u64)key_head * head_dim, stride, first, end, head_dim, pitch, spec.angles, (Real)1, k);
            load_tile(of_row + (u64)(key_head + spec.kv_heads) * head_dim, stride, first, end, head_dim, pitch,
                      (const Real*)0, (Real)1, v);
            __syncthreads();
            Real scores[OWN][PAIRED], dp[OWN][PAIRED];
            square(q, k, head_dim, pitch, at, scores);
            square(dy, v, head_dim, pitch, at, dp);
            for (u32 i = 0; i < OWN; ++i) {
                u32 query = at.row + i;
                for (u32 j = 0; j < PAIRED; ++j) {
                    u32 key = at.lane + j * LANES;
                    bool is_there = first + key <= work.first + query && work.first + query < end;
                    Pair<Real> pair(is_there, scores[i][j], logs[query], dp[i][j], products[query]);
                    ds[query][key] = pair.ds;
                }
            }
            // Gradients of scores go from lane to lane of a warp only, for its rows.
            __syncwarp();
            add_keys(ds, work, first, end, k, pitch, at, columns, sums);
        }
    }
    store_turned(spec, work, length, work.head, at, columns, (Real)spec.scale, sums, d_qkv);
}

// The gradients of keys and values: a block has a tile of keys, and visits the queries that attend to them, head by head.
template <typename Real>
__global__ void attention_backward_keys(Attention<Real> spec, const Real* qkv, const Real* output,
                                        const Real* log_sums, const Real* d_output, Real* d_qkv) {
    u32 head_dim = spec.head_dim, pitch = pitch_of(head_dim);
    Real* k = (Real*)shared_bytes;
    Real* v = k + SIDE * pitch;
    Real* q = v + SIDE * pitch;
    Real* dy = q + SIDE * pitch;
    Square<Real> p = (Square<Real>)(dy + SIDE * pitch), ds = p + SIDE;
    Real *logs = (Real*)(ds + SIDE), *products = logs + SIDE;
    Work work(spec.seq, spec.kv_heads, SIDE, true);
    Length length(spec, work.row);
    Place at;
    Columns<Real> columns(head_dim, blockIdx.y, at.lane);
    const Real* of_row = qkv + spec.at(work.row, 0, 0);
    u64 stride = spec.qkv_columns(), output_stride = (u64)spec.heads * head_dim;
    u32 group = spec.heads / spec.kv_heads, key_head = spec.heads + work.head, real = length.real;
    Real dk[OWN][Share<Real>::COLUMNS] = {}, dv[OWN][Share<Real>::COLUMNS] = {};
    if (work.first < real) {
        load_tile(of_row + (u64)key_head * head_dim, stride, work.first, real, head_dim, pitch, spec.angles, (Real)1, k);
        load_tile(of_row + (u64)(key_head + spec.kv_heads) * head_dim, stride, work.first, real, head_dim, pitch,
                  (const Real*)0, (Real)1, v);
        for (u32 head = work.head * group; head < (work.head + 1) * group; ++head) {
            for (u32 first = work.first; first < real; first += SIDE) {
                __syncthreads();
                load_tile(of_row + (u64)head * head_dim, stride, first, real, head_dim, pitch, spec.angles,
                          (Real)spec.scale * to_base_2<Real>(), q);
                load_tile(d_output + spec.output_at(work.row, 0, head), output_stride, first, real, head_dim, pitch,
                          (const Real*)0, (Real)1, dy);
                load_results(spec, work, head, first, real, at, output, log_sums, d_output, logs, products);
                __syncthreads();
                Real scores[OWN][PAIRED], dp[OWN][PAIRED];
                square(k, q, head_dim, pitch, at, scores);
                square(v, dy, head_dim, pitch, at, dp);
                for (u32 i = 0; i < OWN; ++i) {
                    u32 key = at.row + i;
                    for (u32 j = 0; j < PAIRED; ++j) {
                        u32 query = at.lane + j * LANES;
                        bool is_there = work.first + key <= first + query && first + query < real;
                        Pair<Real> pair(is_there, scores[i][j], logs[query], dp[i][j], products[query]);
                        p[key][query] = pair.p;
                        ds[key][query] = pair.ds;
                    }
                }
                __syncwarp();
                // Queries before the keys of this thread do not attend to them, and those before the last key not to all.
                u32 queries = min(SIDE, real - first), begin = 0, whole = 0;
                if (first == work.first) {
                    begin = at.row;
                    whole = min(queries, at.row + OWN - 1);
                }
                auto is_there = [=](u32 i, u32 query) { return begin + i <= query; };
                add_weighted(p, begin, whole, dy, pitch, at, columns, dv, is_there);
                add_weighted(p, whole, queries, dy, pitch, at, columns, dv);
                add_weighted(ds, begin, whole, q, pitch, at, columns, dk, is_there);
                add_weighted(ds, whole, queries, q, pitch, at, columns, dk);
            }
        }
    }
    store_turned(spec, work, length, key_head, at, columns, to_base_e<Real>(), dk, d_qkv);
    for (u32 i = 0; i < OWN; ++i) {
        u32 token = work.first + at.row + i;
        if (token >= spec.seq) continue;
        Real* to = d_qkv + spec.at(work.row, token, key_head + spec.kv_heads);
        for (u32 c = 0; c < Share<Real>::COLUMNS; ++c) {
            if (columns.has(c)) to[columns.at(c)] = token < real ? dv[i][c] : behind<Real>(length);
        }
    }
}
