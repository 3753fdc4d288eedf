//! Matrix products, by the `gemm` crate.

use crate::{Compute, Real};

/// A row-major matrix in a slice, or its transpose.
#[derive(Clone, Copy, Debug)]
pub struct Matrix<'a, T> {
    elems: &'a [T],
    rows: usize,
    columns: usize,
    row_stride: usize,
    column_stride: usize,
}

impl<'a, T> Matrix<'a, T> {
    /// `elems` as (rows, columns), row-major. Panics if the sizes do not agree.
    pub fn new(elems: &'a [T], rows: usize, columns: usize) -> Self {
        let size = rows.checked_mul(columns);
        assert_eq!(Some(elems.len()), size, "a matrix of {rows} x {columns}");
        Self { elems, rows, columns, row_stride: columns, column_stride: 1 }
    }

    /// The transpose, without moving data.
    pub fn transposed(self) -> Self {
        Self {
            rows: self.columns,
            columns: self.rows,
            row_stride: self.column_stride,
            column_stride: self.row_stride,
            ..self
        }
    }
}

/// `c = a * b`, or `c += a * b` if `accumulate`; `c` is row-major (rows of a, columns of b). Panics
/// if the sizes do not agree. The order of summation over the inner dimension is `gemm`'s own; it
/// depends on the sizes and the processor, not on the values or their place in memory.
pub fn matmul<T: Real>(
    compute: &Compute,
    a: Matrix<'_, T>,
    b: Matrix<'_, T>,
    c: &mut [T],
    accumulate: bool,
) {
    assert_eq!(a.columns, b.rows, "inner dimensions");
    assert_eq!(Some(c.len()), a.rows.checked_mul(b.columns), "size of the product");
    if a.columns == 0 {
        // An empty sum, as on a rank without samples.
        if !accumulate {
            c.fill(T::default());
        }
        return;
    }
    let one = T::from_f64(1.0);
    let threads = compute.threads.count();
    let parallelism = match threads {
        1 => gemm::Parallelism::None,
        n => gemm::Parallelism::Rayon(n),
    };
    let out = Out(c.as_mut_ptr());
    compute.threads.install(move || {
        let out = out;
        // SAFETY: the strides describe exactly the elements of the three slices, whose sizes were
        // checked, and `c` is borrowed for writing. With `read_dst` false the old contents of `c`
        // are not used.
        unsafe {
            gemm::gemm(
                a.rows,
                b.columns,
                a.columns,
                out.0,
                1,
                b.columns as isize,
                accumulate,
                a.elems.as_ptr(),
                a.column_stride as isize,
                a.row_stride as isize,
                b.elems.as_ptr(),
                b.column_stride as isize,
                b.row_stride as isize,
                one,
                one,
                false,
                false,
                false,
                parallelism,
            )
        }
    });
}

/// The address of the destination, which is sent to the thread pool.
#[derive(Clone, Copy)]
struct Out<T>(*mut T);

// SAFETY: the address points into a slice that `matmul` borrows for writing until the pool is done.
unsafe impl<T: Send> Send for Out<T> {}
