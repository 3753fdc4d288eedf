//! What operations do on [`Device::Meta`](paceline_memory::Device::Meta): everything except the arithmetic.
//!
//! Input: the operands of an operation, and the sizes of its scratch memory. Output: errors, and an account that saw the
//! same requests as on the CPU. So a pass on this device has the peaks of the same pass on the CPU. This module does not
//! know what an operation computes.

use paceline_memory::{Access, Category, Claim, DType, MemoryError, Tensor};

use crate::{Compute, KernelError, Result};

/// An operation that claims its operands and takes scratch memory, and computes nothing. Both go back when it is dropped.
pub(crate) struct MetaScratch<'a> {
    compute: &'a Compute,
    op: &'static str,
    claims: Vec<Claim>,
    scratch: Vec<Tensor>,
}

impl<'a> MetaScratch<'a> {
    pub(crate) fn new(compute: &'a Compute, op: &'static str) -> Self {
        Self { compute, op, claims: Vec::new(), scratch: Vec::new() }
    }

    /// Claims operands of an element type for reading.
    pub(crate) fn reads<'t>(
        self,
        dtype: DType,
        operands: impl IntoIterator<Item = &'t Tensor>,
    ) -> Result<Self> {
        self.claim(Access::Read, dtype, operands)
    }

    /// Claims operands of an element type for writing.
    pub(crate) fn writes<'t>(
        self,
        dtype: DType,
        operands: impl IntoIterator<Item = &'t Tensor>,
    ) -> Result<Self> {
        self.claim(Access::Write, dtype, operands)
    }

    fn claim<'t>(
        mut self,
        access: Access,
        dtype: DType,
        operands: impl IntoIterator<Item = &'t Tensor>,
    ) -> Result<Self> {
        for operand in operands {
            if operand.dtype() != dtype {
                let (expected, got) = (dtype, operand.dtype());
                return Err(MemoryError::WrongType { expected, got }.into());
            }
            self.claims.push(operand.claim(access, self.op)?);
        }
        Ok(self)
    }

    /// Takes scratch memory of `len` elements, which this operation keeps to its end.
    pub(crate) fn scratch(&mut self, dtype: DType, len: usize) -> Result<()> {
        let tensor = self.compute.allocator.tensor(dtype, [len], Category::Workspace)?;
        self.scratch.push(tensor);
        Ok(())
    }

    /// Takes scratch memory of `lens` elements of f32 for each part of a batch that the threads share. On the CPU the
    /// parts may follow each other; here all of them are there at once, which is the most that the CPU can need.
    pub(crate) fn scratch_of_parts(
        &mut self,
        batch: usize,
        lens: impl Fn(usize) -> [usize; 2],
    ) -> Result<()> {
        for part in self.compute.threads.split(batch) {
            for len in lens(part.len()) {
                self.scratch(DType::F32, len)?;
            }
        }
        Ok(())
    }
}

/// The element type of an operand that must be f32 or f64.
pub(crate) fn float(op: &'static str, operand: &Tensor) -> Result<DType> {
    match operand.dtype() {
        dtype @ (DType::F32 | DType::F64) => Ok(dtype),
        dtype => Err(KernelError::DType { op, dtype }),
    }
}
