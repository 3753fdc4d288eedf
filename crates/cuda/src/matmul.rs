//! Matrix products by cuBLASLt.
//!
//! Matrices are rows after rows here and columns after columns there: a matrix of one kind is the transpose of the other, so
//! `c = a b` is asked for as `cᵀ = bᵀ aᵀ` and nothing is copied.
//!
//! The algorithm for a shape is chosen once per process: the first one in the library's own order, with a workspace of fixed
//! size, decides the bits. Large products are tried with all algorithms that the library names, and a faster one replaces the
//! first if its result has the same bits for the first operands of this shape. So for one version, kind of card and shape the
//! bits are the same from run to run.

mod trial;

use std::collections::HashMap;
use std::collections::hash_map::Entry;
use std::ffi::c_void;
use std::sync::Mutex;

use paceline_trace::lock;

use crate::driver::Handle;
use crate::library::{LibraryNames, functions};
use crate::{Card, CudaError, Result, Stream};

const NAMES: LibraryNames = LibraryNames {
    files: &["libcublasLt.so.13", "libcublasLt.so.12", "libcublasLt.so"],
    companion: None,
    hint: "install it with `pip install nvidia-cublas`, and name its folder in PACELINE_CUDA_LIBRARIES",
};

functions! {
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
        preference: Handle, wanted: i32, results: *mut FoundAlgorithm, found: *mut i32,
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
pub enum MatrixType {
    /// f32, with every bit of the elements.
    F32,
    /// f32, whose elements the tensor cores round to 10 bits of mantissa.
    Tf32,
    /// f64.
    F64,
    /// bf16.
    Bf16,
    /// fp16.
    F16,
}

impl MatrixType {
    /// The library's numbers for the elements, the way to compute, and the type of the scale.
    fn codes(self) -> (u32, u32, u32) {
        const SUMS_F32: u32 = 68;
        match self {
            MatrixType::F32 => (0, SUMS_F32, 0),
            MatrixType::Tf32 => (0, 77, 0),
            MatrixType::F64 => (1, 70, 1),
            MatrixType::Bf16 => (14, SUMS_F32, 0),
            MatrixType::F16 => (2, SUMS_F32, 0),
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

/// The last operation on the result before it is stored.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum Epilogue {
    /// Nothing.
    #[default]
    None,
    /// Adds the row at this address to each row.
    Bias(u64),
    /// The same; then negative results become zero.
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
}

/// The sizes of a batch of products.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct MatmulSizes {
    /// Rows of `a` and `c`.
    pub rows: usize,
    /// Columns of `a` and rows of `b`.
    pub inner: usize,
    /// Columns of `b` and `c`.
    pub columns: usize,
    /// Number of products.
    pub batch: usize,
}

/// `c = alpha a b`, or plus another matrix, for matrices a (rows, inner), b (inner, columns) and c (rows, columns), or a batch of them.
#[derive(Clone, Copy, Debug)]
pub struct Matmul {
    /// The type of `a` and `b`.
    pub factors: MatrixType,
    /// The type of `c`.
    pub result: MatrixType,
    /// The sizes.
    pub sizes: MatmulSizes,
    /// The left factor.
    pub a: Factor,
    /// The right factor.
    pub b: Factor,
    /// The result, which is not transposed.
    pub c: Factor,
    /// Factor of the product.
    pub alpha: f64,
    /// The address of a matrix that is added, which is laid out as the result and may be its old value.
    pub added: Option<u64>,
    /// The last operation.
    pub epilogue: Epilogue,
}

/// The library, for one card.
pub(crate) struct Matmuls {
    library: &'static Library,
    handle: Handle,
    chosen: Mutex<HashMap<MatmulKey, ChosenAlgorithm>>,
}

struct ChosenAlgorithm {
    plan: MatmulPlan,
    algorithm: [u64; 8],
}

// SAFETY: the handle and the library's descriptions may be used from any thread; changes are protected by mutexes.
unsafe impl Send for Matmuls {}
// SAFETY: as for `Send`.
unsafe impl Sync for Matmuls {}

/// The properties of a product that its algorithm depends on.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
struct MatmulKey {
    types: (MatrixType, MatrixType),
    sizes: MatmulSizes,
    strides: [usize; 6],
    are_transposed: (bool, bool),
    epilogue: u32,
    /// How far the addresses are aligned, which algorithms demand.
    alignments: [u32; 3],
}

/// `cublasLtMatmulHeuristicResult_t`
#[repr(C)]
#[derive(Clone, Copy, Default)]
pub(crate) struct FoundAlgorithm {
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

impl Matmuls {
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
    pub(crate) unsafe fn launch(&self, matmul: &Matmul, stream: &Stream) -> Result<()> {
        stream.card().current()?;
        let MatmulSizes { rows, columns, batch, .. } = matmul.sizes;
        if rows == 0 || columns == 0 || batch == 0 {
            return Ok(());
        }
        let key = MatmulKey::of(matmul);
        let mut chosen = lock(&self.chosen);
        let chosen = match chosen.entry(key) {
            Entry::Occupied(known) => known.into_mut(),
            Entry::Vacant(entry) => {
                let plan = MatmulPlan::new(self.library, matmul)?;
                // SAFETY: the caller's.
                let algorithm = unsafe { self.choose(&plan, matmul, &key, stream) }?;
                entry.insert(ChosenAlgorithm { plan, algorithm })
            }
        };
        // The address of a bias is no part of a key.
        chosen.plan.set_bias(self.library, matmul.epilogue)?;
        // SAFETY: the caller's.
        unsafe { self.multiply(&chosen.plan, &chosen.algorithm, matmul, stream) }
    }

    /// # Safety
    ///
    /// As for [`Stream::multiply`], and the plan is one of the product.
    unsafe fn multiply(
        &self,
        plan: &MatmulPlan,
        algorithm: &[u64; 8],
        matmul: &Matmul,
        stream: &Stream,
    ) -> Result<()> {
        let workspace = stream.workspace()?;
        let double = [matmul.alpha, f64::from(u8::from(matmul.added.is_some()))];
        let single = double.map(|scale| scale as f32);
        let scales: [*const c_void; 2] = match matmul.factors {
            MatrixType::F64 => double.each_ref().map(|scale| std::ptr::from_ref(scale).cast()),
            _ => single.each_ref().map(|scale| std::ptr::from_ref(scale).cast()),
        };
        // SAFETY: the layouts describe the operands, which the caller vouches for; the workspace belongs to this stream.
        let status = unsafe {
            (self.library.cublasLtMatmul)(
                self.handle,
                plan.desc.handle,
                scales[0],
                matmul.b.address,
                plan.b.handle,
                matmul.a.address,
                plan.a.handle,
                scales[1],
                matmul.added.unwrap_or(matmul.c.address),
                plan.c.handle,
                matmul.c.address,
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

impl MatmulKey {
    fn of(matmul: &Matmul) -> Self {
        let Matmul { factors, result, sizes, a, b, c, added, epilogue, .. } = *matmul;
        let alignment = |address: u64| address.trailing_zeros().min(8);
        Self {
            types: (factors, result),
            sizes,
            strides: [a.stride, a.batch_stride, b.stride, b.batch_stride, c.stride, c.batch_stride],
            are_transposed: (a.is_transposed, b.is_transposed),
            epilogue: epilogue.code(),
            alignments: [a.address, b.address, c.address | added.unwrap_or(0)].map(alignment),
        }
    }
}

/// The library's description of a product.
struct MatmulPlan {
    desc: OwnedHandle,
    a: OwnedHandle,
    b: OwnedHandle,
    c: OwnedHandle,
}

struct OwnedHandle {
    handle: Handle,
    destroy: unsafe extern "C" fn(Handle) -> u32,
}

impl OwnedHandle {
    fn new(
        function: &'static str,
        destroy: unsafe extern "C" fn(Handle) -> u32,
        create: impl FnOnce(&mut Handle) -> u32,
    ) -> Result<Self> {
        let mut handle = std::ptr::null_mut();
        check(function, create(&mut handle))?;
        Ok(Self { handle, destroy })
    }

    /// Sets an attribute.
    ///
    /// # Safety
    ///
    /// `set` is the library's function of this name for such a handle, and the attribute has the type of the value.
    unsafe fn set<T>(
        &self,
        function: &'static str,
        set: unsafe extern "C" fn(Handle, u32, *const c_void, usize) -> u32,
        attribute: u32,
        value: T,
    ) -> Result<()> {
        let address = std::ptr::from_ref(&value).cast();
        // SAFETY: the value has this size and is read during the call; the caller's for the rest.
        check(function, unsafe { set(self.handle, attribute, address, size_of::<T>()) })
    }
}

impl Drop for OwnedHandle {
    fn drop(&mut self) {
        // SAFETY: the handle was made by the function's counterpart, and nobody else has it.
        let _ = unsafe { (self.destroy)(self.handle) };
    }
}

impl MatmulPlan {
    fn new(library: &Library, matmul: &Matmul) -> Result<Self> {
        let (_, compute, scale) = matmul.factors.codes();
        let destroy = library.cublasLtMatmulDescDestroy;
        let desc = OwnedHandle::new("cublasLtMatmulDescCreate", destroy, |handle| {
            // SAFETY: the address is that of a handle.
            unsafe { (library.cublasLtMatmulDescCreate)(handle, compute, scale) }
        })?;
        let MatmulSizes { rows, inner, columns, batch } = matmul.sizes;
        let a = layout(library, &matmul.a, matmul.factors, [batch, rows, inner])?;
        let b = layout(library, &matmul.b, matmul.factors, [batch, inner, columns])?;
        let c = layout(library, &matmul.c, matmul.result, [batch, rows, columns])?;
        let plan = Self { desc, a, b, c };
        // The factors change places, and the library's columns are our rows: a factor that is not transposed here is not
        // transposed there.
        for (attribute, factor) in [(TRANSPOSE_A, &matmul.b), (TRANSPOSE_B, &matmul.a)] {
            if factor.is_transposed {
                plan.set(library, attribute, TRANSPOSED)?;
            }
        }
        plan.set(library, EPILOGUE, matmul.epilogue.code())?;
        // The library names algorithms only with a bias, whatever its address.
        plan.set_bias(library, matmul.epilogue)?;
        Ok(plan)
    }

    fn set_bias(&self, library: &Library, epilogue: Epilogue) -> Result<()> {
        match epilogue {
            Epilogue::Bias(at) | Epilogue::BiasRelu(at) => self.set(library, BIAS_ADDRESS, at),
            Epilogue::None | Epilogue::Relu => Ok(()),
        }
    }

    fn set<T>(&self, library: &Library, attribute: u32, value: T) -> Result<()> {
        let set = library.cublasLtMatmulDescSetAttribute;
        // SAFETY: the callers' values have the types that the library states for their attributes.
        unsafe { self.desc.set("cublasLtMatmulDescSetAttribute", set, attribute, value) }
    }
}

/// The library's description of a matrix of this shape: (batch, rows, columns).
fn layout(
    library: &Library,
    factor: &Factor,
    elements: MatrixType,
    [batch, rows, columns]: [usize; 3],
) -> Result<OwnedHandle> {
    let (rows, columns) = if factor.is_transposed { (columns, rows) } else { (rows, columns) };
    let destroy = library.cublasLtMatrixLayoutDestroy;
    let layout = OwnedHandle::new("cublasLtMatrixLayoutCreate", destroy, |handle| {
        // SAFETY: the address is that of a handle. Rows here are columns there.
        unsafe {
            (library.cublasLtMatrixLayoutCreate)(
                handle,
                elements.codes().0,
                columns as u64,
                rows as u64,
                factor.stride as i64,
            )
        }
    })?;
    let (function, set) =
        ("cublasLtMatrixLayoutSetAttribute", library.cublasLtMatrixLayoutSetAttribute);
    // SAFETY: the attributes have these types.
    unsafe {
        layout.set(function, set, BATCH, batch as i32)?;
        layout.set(function, set, BATCH_STRIDE, factor.batch_stride as i64)?;
    }
    Ok(layout)
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
