//! Descriptors of products and matrices, with the numbers of cublasLt.h.

use std::collections::HashMap;
use std::sync::{LazyLock, Mutex, MutexGuard, PoisonError};

use crate::boundary::Status;
use crate::driver::refuse;

/// `CUBLAS_STATUS_INVALID_VALUE`
pub const INVALID_VALUE: Status = Status(7);
/// `CUBLAS_STATUS_EXECUTION_FAILED`
pub const EXECUTION_FAILED: Status = Status(13);
/// `CUBLAS_STATUS_INTERNAL_ERROR`
pub const INTERNAL_ERROR: Status = Status(14);
/// `CUBLAS_STATUS_NOT_SUPPORTED`
pub const NOT_SUPPORTED: Status = Status(15);

/// The types of a matrix's elements.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Element {
    /// `CUDA_R_32F`
    F32,
    /// `CUDA_R_64F`
    F64,
    /// `CUDA_R_16F`
    F16,
    /// `CUDA_R_16BF`
    Bf16,
}

impl Element {
    /// The type with this number of `cudaDataType`.
    pub fn new(number: u32) -> Result<Self, Status> {
        match number {
            0 => Ok(Self::F32),
            1 => Ok(Self::F64),
            2 => Ok(Self::F16),
            14 => Ok(Self::Bf16),
            _ => Err(refuse(NOT_SUPPORTED, format!("the data type {number} is not emulated"))),
        }
    }

    /// Bytes of an element.
    pub fn bytes(self) -> usize {
        match self {
            Self::F64 => 8,
            Self::F32 => 4,
            Self::F16 | Self::Bf16 => 2,
        }
    }
}

/// How a product is computed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ComputeType {
    /// `CUBLAS_COMPUTE_32F` and its pedantic form.
    F32,
    /// `CUBLAS_COMPUTE_64F` and its pedantic form.
    F64,
    /// `CUBLAS_COMPUTE_32F_FAST_TF32`: f32 operands are rounded to 10 bits of mantissa.
    Tf32,
}

impl ComputeType {
    fn new(number: u32) -> Result<Self, Status> {
        match number {
            68 | 69 => Ok(Self::F32),
            70 | 71 => Ok(Self::F64),
            77 => Ok(Self::Tf32),
            _ => Err(refuse(NOT_SUPPORTED, format!("the compute type {number} is not emulated"))),
        }
    }
}

/// `CUBLASLT_EPILOGUE_RELU`
pub const RELU: u32 = 2;
/// `CUBLASLT_EPILOGUE_BIAS`
pub const BIAS: u32 = 4;
/// `CUBLASLT_EPILOGUE_BGRADA`
pub const BIAS_GRADIENT_A: u32 = 256;
/// `CUBLASLT_EPILOGUE_BGRADB`
pub const BIAS_GRADIENT_B: u32 = 512;

/// A product's descriptor.
#[derive(Clone, Copy, Debug)]
pub struct Description {
    pub compute: ComputeType,
    pub transposed_a: bool,
    pub transposed_b: bool,
    /// The operations after the product: `1`, or a sum of the bits above.
    pub epilogue: u32,
    /// The bias, or where its gradient goes.
    pub bias: u64,
    /// The bias's type, if it is not that of `d`.
    pub bias_element: Option<Element>,
    /// Elements between the biases of a batch.
    pub bias_stride: i64,
}

impl Description {
    /// The default descriptor.
    pub fn new(compute: u32, scale: u32) -> Result<Self, Status> {
        let compute = ComputeType::new(compute)?;
        let own = if compute == ComputeType::F64 { Element::F64 } else { Element::F32 };
        if Element::new(scale)? != own {
            return Err(refuse(NOT_SUPPORTED, format!("alpha and beta are not {own:?}")));
        }
        Ok(Self {
            compute,
            transposed_a: false,
            transposed_b: false,
            epilogue: 1,
            bias: 0,
            bias_element: None,
            bias_stride: 0,
        })
    }

    /// Sets an attribute of `cublasLtMatmulDescAttributes_t`.
    pub fn set(&mut self, attribute: u32, bytes: &[u8]) -> Result<(), Status> {
        match attribute {
            0 => self.compute = ComputeType::new(word(bytes)?)?,
            1 if word(bytes)? == 0 => {}
            // The pointer mode: alpha and beta on the host.
            2 if word(bytes)? == 0 => {}
            3 => self.transposed_a = transposed(bytes)?,
            4 => self.transposed_b = transposed(bytes)?,
            5 if !transposed(bytes)? => {}
            // CUBLAS_FILL_MODE_FULL
            6 if word(bytes)? == 2 => {}
            7 => match word(bytes)? {
                epilogue @ (1 | RELU | BIAS | 6 | BIAS_GRADIENT_A | BIAS_GRADIENT_B) => {
                    self.epilogue = epilogue;
                }
                other => return Err(refuse(NOT_SUPPORTED, format!("the epilogue {other}"))),
            },
            8 => self.bias = long(bytes)?,
            10 => self.bias_stride = long(bytes)? as i64,
            // How many multiprocessors to use.
            15 => _ = word(bytes)?,
            26 => self.bias_element = Some(Element::new(word(bytes)?)?),
            _ => {
                let why = format!("attribute {attribute} of a product with {bytes:?}");
                return Err(refuse(NOT_SUPPORTED, why));
            }
        }
        Ok(())
    }
}

/// A matrix's layout: columns of `rows` elements, `ld` elements apart.
#[derive(Clone, Copy, Debug)]
pub struct MatrixLayout {
    pub element: Element,
    pub rows: u64,
    pub cols: u64,
    /// Elements between the beginnings of two columns.
    pub ld: i64,
    pub batch: i32,
    /// Elements between the beginnings of two matrices.
    pub stride: i64,
}

impl MatrixLayout {
    /// One matrix.
    pub fn new(element: u32, rows: u64, cols: u64, ld: i64) -> Result<Self, Status> {
        Ok(Self { element: Element::new(element)?, rows, cols, ld, batch: 1, stride: 0 })
    }

    /// Sets an attribute of `cublasLtMatrixLayoutAttribute_t`.
    pub fn set(&mut self, attribute: u32, bytes: &[u8]) -> Result<(), Status> {
        match attribute {
            0 => self.element = Element::new(word(bytes)?)?,
            // CUBLASLT_ORDER_COL
            1 if word(bytes)? == 0 => {}
            2 => self.rows = long(bytes)?,
            3 => self.cols = long(bytes)?,
            4 => self.ld = long(bytes)? as i64,
            5 => self.batch = word(bytes)? as i32,
            6 => self.stride = long(bytes)? as i64,
            _ => {
                let why = format!("attribute {attribute} of a matrix with {bytes:?}");
                return Err(refuse(NOT_SUPPORTED, why));
            }
        }
        Ok(())
    }
}

/// A caller's wishes for an algorithm.
#[derive(Clone, Copy, Debug)]
pub struct Preference {
    pub workspace_bytes: u64,
    /// The alignments of the addresses of `a`, `b`, `c` and `d`.
    pub alignments: [u32; 4],
}

impl Default for Preference {
    fn default() -> Self {
        // The library takes this alignment for granted.
        Self { workspace_bytes: 0, alignments: [256; 4] }
    }
}

impl Preference {
    /// Sets an attribute of `cublasLtMatmulPreferenceAttributes_t`.
    pub fn set(&mut self, attribute: u32, bytes: &[u8]) -> Result<(), Status> {
        match attribute {
            1 => self.workspace_bytes = long(bytes)?,
            5..=8 => self.alignments[attribute as usize - 5] = word(bytes)?,
            // Search mode, reduction schemes, waves, implementations: there is one algorithm.
            0 | 3 | 9 | 12 => {}
            _ => return Err(refuse(INVALID_VALUE, format!("attribute {attribute}"))),
        }
        Ok(())
    }
}

pub fn word(bytes: &[u8]) -> Result<u32, Status> {
    let wrong = |_| refuse(INVALID_VALUE, format!("{} bytes for an attribute of 4", bytes.len()));
    bytes.try_into().map(u32::from_le_bytes).map_err(wrong)
}

pub fn long(bytes: &[u8]) -> Result<u64, Status> {
    let wrong = |_| refuse(INVALID_VALUE, format!("{} bytes for an attribute of 8", bytes.len()));
    bytes.try_into().map(u64::from_le_bytes).map_err(wrong)
}

fn transposed(bytes: &[u8]) -> Result<bool, Status> {
    match word(bytes)? {
        0 => Ok(false),
        // Transposed, and conjugated: the same for real numbers.
        1 | 2 => Ok(true),
        other => Err(refuse(INVALID_VALUE, format!("the operation {other}"))),
    }
}

/// An object that a handle names.
#[derive(Clone, Copy, Debug)]
#[allow(missing_docs)]
pub enum Object {
    Library,
    Description(Description),
    Layout(MatrixLayout),
    Preference(Preference),
}

/// All objects. Handles are numbers that are never used again, so the use of a destroyed one is an error.
#[derive(Default)]
pub struct Objects {
    objects: HashMap<usize, Object>,
    last: usize,
}

impl Objects {
    /// Adds an object.
    pub fn insert(&mut self, object: Object) -> usize {
        self.last += 16;
        self.objects.insert(0x17_0000 + self.last, object);
        0x17_0000 + self.last
    }

    /// Removes an object.
    pub fn remove(&mut self, handle: usize) -> Result<(), Status> {
        self.objects.remove(&handle).map(|_| ()).ok_or(INVALID_VALUE)
    }

    /// An object, to be changed.
    pub fn get_mut(&mut self, handle: usize) -> Result<&mut Object, Status> {
        self.objects.get_mut(&handle).ok_or(INVALID_VALUE)
    }

    /// A product's descriptor.
    pub fn description(&self, handle: usize) -> Result<Description, Status> {
        match self.objects.get(&handle) {
            Some(Object::Description(description)) => Ok(*description),
            _ => Err(refuse(INVALID_VALUE, "not a descriptor of a product")),
        }
    }

    /// A matrix's layout.
    pub fn layout(&self, handle: usize) -> Result<MatrixLayout, Status> {
        match self.objects.get(&handle) {
            Some(Object::Layout(layout)) => Ok(*layout),
            _ => Err(refuse(INVALID_VALUE, "not a layout of a matrix")),
        }
    }

    /// A preference; 0 is the default one.
    pub fn preference(&self, handle: usize) -> Result<Preference, Status> {
        match self.objects.get(&handle) {
            Some(Object::Preference(preference)) => Ok(*preference),
            None if handle == 0 => Ok(Preference::default()),
            _ => Err(refuse(INVALID_VALUE, "not a preference")),
        }
    }
}

/// Locks the objects.
pub fn objects() -> MutexGuard<'static, Objects> {
    static OBJECTS: LazyLock<Mutex<Objects>> = LazyLock::new(Mutex::default);
    OBJECTS.lock().unwrap_or_else(PoisonError::into_inner)
}
