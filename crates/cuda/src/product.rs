//! Matrix products by cuBLASLt.
//!
//! Matrices are rows after rows here and columns after columns there: a matrix of one kind is the transpose of the other, so
//! `c = a b` is asked for as `cᵀ = bᵀ aᵀ` and nothing is copied.
//!
//! The algorithm for a shape is chosen once per process. The library's own order names the first, with a workspace of fixed size,
//! and that one decides the bits. Large products are tried with all that it names, and a faster one replaces the first if its result has the
//! same bits, with the first operands of this shape. So for one version, kind of card and shape the bits are the same from run to run.

mod trial;

use std::collections::HashMap;
use std::collections::hash_map::Entry;
use std::ffi::c_void;
use std::sync::Mutex;

use paceline_trace::lock;

use crate::driver::Handle;
use crate::library::{Names, functions};
use crate::{Card, CudaError, Result, Stream};

const NAMES: Names = Names {
    files: &["libcublasLt.so.13", "libcublasLt.so.12", "libcublasLt.so"],
    companion: None,
    hint: "install it with `pip install nvidia-cublas`, and name its folder in PACELINE_CUDA_LIBRARIES",
};

functions! {
    /// The functions of the library.
    Library in NAMES;
    fn cublasLtCreate(handle: *mut Handle);
    fn cublasLtMatmulDescCreate(desc: *mut Handle, compute: u32, scale: u32);
    fn cublasLtMatmulDescDestroy(desc: Handle);
    fn cublasLtMatmulDescSetAttribute(desc: Handle, attribute: u32, value: *const c_void, bytes: usize);
    fn cublasLtMatrixLayoutCreate(layout: *mut Handle, number: u32, rows: u64, columns: u64, stride: i64);
    fn cublasLtMatrixLayoutDestroy(layout: Handle);
    fn cublasLtMatrixLayoutSetAttribute(layout: Handle, attribute: u32, value: *const c_void, bytes: usize);
    fn cublasLtMatmulPreferenceCreate(preference: *mut Handle);
    fn cublasLtMatmulPreferenceDestroy(preference: Handle);
    fn cublasLtMatmulPreferenceSetAttribute(preference: Handle, attribute: u32, value: *const c_void, bytes: usize);
    fn cublasLtMatmulAlgoGetHeuristic(
        handle: Handle, desc: Handle, a: Handle, b: Handle, c: Handle, d: Handle,
        preference: Handle, wanted: i32, results: *mut Found, found: *mut i32,
    );
    fn cublasLtMatmul(
        handle: Handle, desc: Handle, alpha: *const c_void,
        a: u64, a_layout: Handle, b: u64, b_layout: Handle, beta: *const c_void,
        c: u64, c_layout: Handle, d: u64, d_layout: Handle,
        algorithm: *const [u64; 8], workspace: u64, workspace_bytes: usize, stream: Handle,
    );
}

/// The type of a matrix's elements. Products are summed in f32, or in f64 if the elements are.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Number {
    /// f32, with every bit of the elements.
    Single,
    /// f32, whose elements the tensor cores round to 10 bits of mantissa (TF32).
    Rounded,
    /// f64.
    Double,
    /// bf16.
    Brain,
    /// fp16.
    Half,
}

impl Number {
    /// The library's numbers for the elements, the way to compute, and the type of the scale.
    fn codes(self) -> (u32, u32, u32) {
        const SUMS_F32: u32 = 68;
        match self {
            Number::Single => (0, SUMS_F32, 0),
            Number::Rounded => (0, 77, 0),
            Number::Double => (1, 70, 1),
            Number::Brain => (14, SUMS_F32, 0),
            Number::Half => (2, SUMS_F32, 0),
        }
    }
}

/// A matrix, row after row.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Factor {
    /// The first element.
    pub address: u64,
    /// Elements from one row to the next.
    pub stride: usize,
    /// Elements from one matrix of a batch to the next.
    pub batch_stride: usize,
    /// Whether its transpose is meant.
    pub is_transposed: bool,
}

/// What is done to the result before it is stored.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum Epilogue {
    /// Nothing.
    #[default]
    None,
    /// The row at this address is added to each row.
    Bias(u64),
    /// The same, and negative results become zero.
    BiasRelu(u64),
    /// Negative results become zero.
    Relu,
}

impl Epilogue {
    fn code(self) -> u32 {
        match self {
            Epilogue::None => 1,
            Epilogue::Relu => 2,
            Epilogue::Bias(_) => 4,
            Epilogue::BiasRelu(_) => 6,
        }
    }

    fn bias(self) -> Option<u64> {
        match self {
            Epilogue::Bias(at) | Epilogue::BiasRelu(at) => Some(at),
            Epilogue::None | Epilogue::Relu => None,
        }
    }
}

/// `c = scale a b + keep c` for matrices a (rows, inner), b (inner, columns) and c (rows, columns), or a batch of them.
#[derive(Clone, Copy, Debug)]
pub struct Product {
    /// The type of `a` and `b`.
    pub number: Number,
    /// The type of `c`.
    pub result: Number,
    /// Rows of `a` and `c`.
    pub rows: usize,
    /// Columns of `a` and rows of `b`.
    pub inner: usize,
    /// Columns of `b` and `c`.
    pub columns: usize,
    /// How many products.
    pub batch: usize,
    /// The left factor.
    pub a: Factor,
    /// The right factor.
    pub b: Factor,
    /// The result, which is not transposed.
    pub c: Factor,
    /// What the product is multiplied with.
    pub scale: f64,
    /// What the result's old value is multiplied with.
    pub keep: f64,
    /// What is done last.
    pub epilogue: Epilogue,
}

/// The library, for one card.
pub(crate) struct Products {
    library: &'static Library,
    handle: Handle,
    chosen: Mutex<HashMap<Shape, Chosen>>,
}

/// What a shape is multiplied with.
struct Chosen {
    plan: Plan,
    algorithm: [u64; 8],
}

// SAFETY: the handle and the library's descriptions may be used from any thread; what changes is behind mutexes.
unsafe impl Send for Products {}
// SAFETY: as for `Send`.
unsafe impl Sync for Products {}

/// What an algorithm is chosen for.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
struct Shape {
    numbers: (Number, Number),
    sizes: [usize; 4],
    strides: [usize; 6],
    are_transposed: (bool, bool),
    epilogue: u32,
    /// How far the addresses are aligned, which algorithms demand.
    alignments: [u32; 3],
}

/// What the library's order of algorithms returns.
#[repr(C)]
#[derive(Clone, Copy)]
pub(crate) struct Found {
    algorithm: [u64; 8],
    workspace_bytes: usize,
    status: u32,
    waves: f32,
    reserved: [i32; 4],
}

/// The workspace that the vendor advises for its newer cards.
pub(crate) const WORKSPACE_BYTES: usize = 32 << 20;

const TRANSPOSE_A: u32 = 3;
const TRANSPOSE_B: u32 = 4;
const EPILOGUE: u32 = 7;
const BIAS_ADDRESS: u32 = 8;
const BATCH: u32 = 5;
const BATCH_STRIDE: u32 = 6;
const MOST_WORKSPACE: u32 = 1;
/// How far a, b, c and d are aligned, in bytes.
const ALIGNMENTS: [u32; 4] = [5, 6, 7, 8];
const TRANSPOSED: i32 = 1;

impl Products {
    pub(crate) fn open(card: &Card) -> Result<Self> {
        let library = Library::get()?;
        card.current()?;
        let mut handle = std::ptr::null_mut();
        // SAFETY: the address is that of a handle, and the card's context is current.
        check("cublasLtCreate", unsafe { (library.cublasLtCreate)(&mut handle) })?;
        Ok(Self { library, handle, chosen: Mutex::default() })
    }

    /// # Safety
    ///
    /// As for [`Stream::multiply`].
    pub(crate) unsafe fn launch(&self, product: &Product, stream: &Stream) -> Result<()> {
        stream.card().current()?;
        if product.rows == 0 || product.columns == 0 || product.batch == 0 {
            return Ok(());
        }
        let shape = Shape::of(product);
        let mut chosen = lock(&self.chosen);
        let chosen = match chosen.entry(shape) {
            Entry::Occupied(known) => known.into_mut(),
            Entry::Vacant(place) => {
                let plan = Plan::new(self.library, product)?;
                // SAFETY: the caller's.
                let algorithm = unsafe { self.choose(&plan, product, &shape, stream) }?;
                place.insert(Chosen { plan, algorithm })
            }
        };
        if let Some(bias) = product.epilogue.bias() {
            chosen.plan.set_bias(self.library, bias)?;
        }
        // SAFETY: the caller's.
        unsafe { self.multiply(&chosen.plan, &chosen.algorithm, product, stream) }
    }

    /// # Safety
    ///
    /// As for [`Stream::multiply`], and the plan is one of the product.
    unsafe fn multiply(
        &self,
        plan: &Plan,
        algorithm: &[u64; 8],
        product: &Product,
        stream: &Stream,
    ) -> Result<()> {
        let workspace = stream.workspace()?;
        let (single, double) =
            ([product.scale as f32, product.keep as f32], [product.scale, product.keep]);
        let scales: [*const c_void; 2] = match product.number {
            Number::Double => [0, 1].map(|at| std::ptr::from_ref(&double[at]).cast()),
            _ => [0, 1].map(|at| std::ptr::from_ref(&single[at]).cast()),
        };
        // SAFETY: the layouts describe the operands, which the caller vouches for; the workspace belongs to this stream.
        let status = unsafe {
            (self.library.cublasLtMatmul)(
                self.handle,
                plan.desc.handle,
                scales[0],
                product.b.address,
                plan.b.handle,
                product.a.address,
                plan.a.handle,
                scales[1],
                product.c.address,
                plan.c.handle,
                product.c.address,
                plan.c.handle,
                algorithm,
                workspace,
                WORKSPACE_BYTES,
                stream.handle(),
            )
        };
        check("cublasLtMatmul", status)
    }
}

impl Shape {
    fn of(product: &Product) -> Self {
        let Product { number, result, rows, inner, columns, batch, a, b, c, epilogue, .. } =
            *product;
        let alignment = |factor: Factor| factor.address.trailing_zeros().min(8);
        Self {
            numbers: (number, result),
            sizes: [rows, inner, columns, batch],
            strides: [a.stride, a.batch_stride, b.stride, b.batch_stride, c.stride, c.batch_stride],
            are_transposed: (a.is_transposed, b.is_transposed),
            epilogue: epilogue.code(),
            alignments: [a, b, c].map(alignment),
        }
    }
}

/// The library's description of a product.
struct Plan {
    desc: Own,
    a: Own,
    b: Own,
    c: Own,
}

/// A handle that is given back.
struct Own {
    handle: Handle,
    destroy: unsafe extern "C" fn(Handle) -> u32,
}

impl Drop for Own {
    fn drop(&mut self) {
        // SAFETY: the handle was made by the function's counterpart, and nobody else has it.
        let _ = unsafe { (self.destroy)(self.handle) };
    }
}

impl Plan {
    fn new(library: &Library, product: &Product) -> Result<Self> {
        let (_, compute, scale) = product.number.codes();
        let mut desc = std::ptr::null_mut();
        // SAFETY: the address is that of a handle.
        let status = unsafe { (library.cublasLtMatmulDescCreate)(&mut desc, compute, scale) };
        check("cublasLtMatmulDescCreate", status)?;
        let desc = Own { handle: desc, destroy: library.cublasLtMatmulDescDestroy };
        let set = |attribute, value: *const c_void, bytes| {
            // SAFETY: the value has this size.
            let status = unsafe {
                (library.cublasLtMatmulDescSetAttribute)(desc.handle, attribute, value, bytes)
            };
            check("cublasLtMatmulDescSetAttribute", status)
        };
        let transposed = std::ptr::from_ref(&TRANSPOSED).cast();
        // The factors change places, and the library's columns are our rows: a factor that is not transposed here is not
        // transposed there.
        for (attribute, factor) in [(TRANSPOSE_A, &product.b), (TRANSPOSE_B, &product.a)] {
            if factor.is_transposed {
                set(attribute, transposed, size_of::<i32>())?;
            }
        }
        let epilogue = product.epilogue.code();
        set(EPILOGUE, std::ptr::from_ref(&epilogue).cast(), size_of::<u32>())?;
        let Product { rows, inner, columns, .. } = *product;
        let layout = |factor: &Factor, number: Number, rows: usize, columns: usize| {
            let (rows, columns) =
                if factor.is_transposed { (columns, rows) } else { (rows, columns) };
            let mut layout = std::ptr::null_mut();
            // SAFETY: the address is that of a handle. Rows here are columns there.
            let status = unsafe {
                (library.cublasLtMatrixLayoutCreate)(
                    &mut layout,
                    number.codes().0,
                    columns as u64,
                    rows as u64,
                    factor.stride as i64,
                )
            };
            check("cublasLtMatrixLayoutCreate", status)?;
            let layout = Own { handle: layout, destroy: library.cublasLtMatrixLayoutDestroy };
            let (batch, stride) = (product.batch as i32, factor.batch_stride as i64);
            // SAFETY: the values have these sizes.
            unsafe {
                let set = library.cublasLtMatrixLayoutSetAttribute;
                let value = std::ptr::from_ref(&batch).cast();
                let status = set(layout.handle, BATCH, value, size_of::<i32>());
                check("cublasLtMatrixLayoutSetAttribute", status)?;
                let value = std::ptr::from_ref(&stride).cast();
                let status = set(layout.handle, BATCH_STRIDE, value, size_of::<i64>());
                check("cublasLtMatrixLayoutSetAttribute", status)?;
            }
            Ok(layout)
        };
        let a = layout(&product.a, product.number, rows, inner)?;
        let b = layout(&product.b, product.number, inner, columns)?;
        let c = layout(&product.c, product.result, rows, columns)?;
        let plan = Self { desc, a, b, c };
        // Algorithms are named for an address, whichever.
        product.epilogue.bias().map_or(Ok(()), |bias| plan.set_bias(library, bias))?;
        Ok(plan)
    }

    /// Sets where the bias is, which is no part of a shape.
    fn set_bias(&self, library: &Library, address: u64) -> Result<()> {
        let value = std::ptr::from_ref(&address).cast();
        // SAFETY: the value has this size.
        let status = unsafe {
            (library.cublasLtMatmulDescSetAttribute)(
                self.desc.handle,
                BIAS_ADDRESS,
                value,
                size_of::<u64>(),
            )
        };
        check("cublasLtMatmulDescSetAttribute", status)
    }
}

/// Whether the library is there.
pub(crate) fn probe() -> Result<()> {
    Library::get().map(drop)
}

const NOT_SUPPORTED: u32 = 15;

fn check(function: &'static str, status: u32) -> Result<()> {
    let name = match status {
        0 => return Ok(()),
        1 => "CUBLAS_STATUS_NOT_INITIALIZED",
        3 => "CUBLAS_STATUS_ALLOC_FAILED",
        7 => "CUBLAS_STATUS_INVALID_VALUE",
        8 => "CUBLAS_STATUS_ARCH_MISMATCH",
        13 => "CUBLAS_STATUS_EXECUTION_FAILED",
        14 => "CUBLAS_STATUS_INTERNAL_ERROR",
        NOT_SUPPORTED => "CUBLAS_STATUS_NOT_SUPPORTED",
        _ => "unknown",
    };
    let text = "the library of products refuses".to_owned();
    Err(CudaError::Failed { function, status, name: name.to_owned(), text })
}
