// Transposes each of some matrices (rows, columns), in tiles of 32 x 32, with 32 x 8 threads.
template <typename S> __global__ void transpose(const S* x, S* y, u32 rows, u32 columns, u32 tiles) {
    __shared__ S tile[32][33];
    u64 matrix = (u64)(blockIdx.y / tiles) * rows * columns;
    u32 column = blockIdx.x * 32 + threadIdx.x, row = blockIdx.y % tiles * 32 + threadIdx.y;
    for (u32 k = 0; k < 32; k += 8) {
        if (row + k < rows && column < columns)
            tile[threadIdx.y + k][threadIdx.x] = x[matrix + (u64)(row + k) * columns + column];
    }
    __syncthreads();
    u32 to_row = blockIdx.x * 32 + threadIdx.y, to_column = blockIdx.y % tiles * 32 + threadIdx.x;
    for (u32 k = 0; k < 32; k += 8) {
        if (to_row + k < columns && to_column < rows)
            y[matrix + (u64)(to_row + k) * rows + to_column] = tile[threadIdx.x][threadIdx.y + k];
    }
}
