//! The one door through which every operation goes to its device.
//!
//! An operation states once what it is: its name, its operands with their shapes, element types and access, its scratch
//! memory, and its floating-point operations. Then comes a body, which computes on slices of the operands. From the
//! statement follow the checks, the claims, the time in the trace, the count of operations, and what a device without
//! contents does. This module does not know what any operation computes.
//!
//! ```
//! # use paceline_kernels::{Compute, Op, Result, read, update};
//! # use paceline_memory::Tensor;
//! /// `y = factor * x + y`. Shapes: the same; f32.
//! fn add_scaled(compute: &Compute, factor: f32, x: &Tensor, y: &Tensor) -> Result<()> {
//!     let operands = (read::<f32>("x", x, y.shape()), update::<f32>("y", y, y.shape()));
//!     compute.launch(Op::new("add_scaled"), operands, move |_, (x, y)| {
//!         y.iter_mut().zip(x).for_each(|(y, x)| *y += factor * x);
//!         Ok(())
//!     })
//! }
//! ```

use std::marker::PhantomData;

use paceline_memory::{
    Access, Category, Claim, DType, Device, Element, MemoryError, Shape, Tensor,
};
use paceline_trace::Shapes;

use crate::compute::Processor;
use crate::error::expect_shape;
use crate::{Compute, KernelError, Result};

/// The name of an operation, and what it counts for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[must_use = "an operation is launched by `Compute::launch`"]
pub struct Op {
    pub(crate) name: &'static str,
    pub(crate) forward_flops: u64,
    pub(crate) backward_flops: u64,
}

impl Op {
    /// The operation of this name. It counts for no floating-point operations.
    pub const fn new(name: &'static str) -> Self {
        Self { name, forward_flops: 0, backward_flops: 0 }
    }

    /// It is a product of a forward pass with as many multiply-adds as the product of `factors`, see
    /// [`Compute::forward_flops`].
    pub fn forward_product(self, factors: impl IntoIterator<Item = usize>) -> Self {
        Self { forward_flops: flops(factors), ..self }
    }

    /// It is a product of a backward pass, see [`Compute::backward_flops`].
    pub fn backward_product(self, factors: impl IntoIterator<Item = usize>) -> Self {
        Self { backward_flops: flops(factors), ..self }
    }
}

/// The floating-point operations of a product with this number of multiply-adds.
fn flops(factors: impl IntoIterator<Item = usize>) -> u64 {
    factors.into_iter().fold(2, |all, factor| all.saturating_mul(factor as u64))
}

/// What an operation works on: one operand, a tuple or an array of them, or an `Option` of one.
///
/// [`read`], [`write`], [`update`] and [`scratch`] make operands. A body gets slices in the same form.
pub trait Operands {
    /// What the operation keeps while it runs.
    #[doc(hidden)]
    type Held: Send + 'static;
    /// The slices that a body gets.
    type Views<'a>;

    /// Checks each operand and claims it.
    #[doc(hidden)]
    fn hold(self, compute: &Compute, op: &'static str) -> Result<Self::Held>;

    /// The slices of what is held.
    ///
    /// # Safety
    ///
    /// The memory lies where this thread can reach it, on [`Device::Cpu`].
    #[doc(hidden)]
    unsafe fn views(held: &mut Self::Held) -> Self::Views<'_>;

    /// Shows the tensors that are read, in order.
    #[doc(hidden)]
    fn inputs<'a>(&'a self, show: &mut dyn FnMut(&'a Tensor));
}

/// An operand that is claimed. It keeps the memory in place.
#[doc(hidden)]
#[derive(Debug)]
pub struct Held<T>(Claim, PhantomData<T>);

impl<T: Element> Held<T> {
    fn len(&self) -> usize {
        self.0.len_bytes() / size_of::<T>()
    }

    /// # Safety
    ///
    /// As for [`Operands::views`].
    unsafe fn elems(&self) -> &[T] {
        // SAFETY: the claim keeps the range in place and excludes writers. `hold` has checked the element type, so the
        // range is aligned and any bits in it are a valid `T`. The caller says that this thread can reach it.
        unsafe { std::slice::from_raw_parts(self.0.base().as_ptr().cast(), self.len()) }
    }

    /// # Safety
    ///
    /// As for [`Operands::views`], and the claim must be for writing.
    unsafe fn elems_mut(&mut self) -> &mut [T] {
        // SAFETY: as for `elems`; a claim for writing excludes all other users.
        unsafe { std::slice::from_raw_parts_mut(self.0.base().as_ptr().cast(), self.len()) }
    }
}

/// The part of a statement that all tensors have.
#[derive(Clone, Copy, Debug)]
struct Stated<'t> {
    operand: &'static str,
    tensor: &'t Tensor,
    shape: Shape,
}

impl Stated<'_> {
    /// Checks shape, device and element type, and claims the tensor.
    fn hold<T: Element>(
        &self,
        compute: &Compute,
        op: &'static str,
        access: Access,
    ) -> Result<Held<T>> {
        expect_shape(op, self.operand, self.tensor.shape(), self.shape)?;
        if self.tensor.device() != compute.device() {
            let (operand, compute) = (self.tensor.device(), compute.device());
            return Err(KernelError::Device { op, operand, compute });
        }
        if self.tensor.dtype() != T::DTYPE {
            let (expected, got) = (T::DTYPE, self.tensor.dtype());
            return Err(MemoryError::WrongType { expected, got }.into());
        }
        Ok(Held(self.tensor.claim(access, op)?, PhantomData))
    }
}

/// See [`read`].
#[derive(Clone, Copy, Debug)]
pub struct Read<'t, T>(Stated<'t>, PhantomData<T>);

/// See [`write`] and [`update`].
#[derive(Clone, Copy, Debug)]
pub struct Write<'t, T> {
    stated: Stated<'t>,
    is_read: bool,
    elements: PhantomData<T>,
}

/// See [`scratch`].
#[derive(Clone, Copy, Debug)]
pub struct Scratch<T>(usize, PhantomData<T>);

/// An operand that is only read. The tensor must have this shape; errors call it `operand`.
pub fn read<'t, T: Element>(
    operand: &'static str,
    tensor: &'t Tensor,
    shape: impl Into<Shape>,
) -> Read<'t, T> {
    Read(Stated { operand, tensor, shape: shape.into() }, PhantomData)
}

/// An operand that is overwritten as a whole: what it held before does not matter.
pub fn write<'t, T: Element>(
    operand: &'static str,
    tensor: &'t Tensor,
    shape: impl Into<Shape>,
) -> Write<'t, T> {
    let stated = Stated { operand, tensor, shape: shape.into() };
    Write { stated, is_read: false, elements: PhantomData }
}

/// An operand that is changed: what it held before matters.
pub fn update<'t, T: Element>(
    operand: &'static str,
    tensor: &'t Tensor,
    shape: impl Into<Shape>,
) -> Write<'t, T> {
    Write { is_read: true, ..write(operand, tensor, shape) }
}

/// Scratch memory of `len` elements, which have unspecified values when the body starts.
pub fn scratch<T: Element>(len: usize) -> Scratch<T> {
    Scratch(len, PhantomData)
}

impl<'t, T: Element> Operands for Read<'t, T> {
    type Held = Held<T>;
    type Views<'a> = &'a [T];

    fn hold(self, compute: &Compute, op: &'static str) -> Result<Held<T>> {
        self.0.hold(compute, op, Access::Read)
    }

    unsafe fn views(held: &mut Held<T>) -> &[T] {
        // SAFETY: the caller's.
        unsafe { held.elems() }
    }

    fn inputs<'a>(&'a self, show: &mut dyn FnMut(&'a Tensor)) {
        show(self.0.tensor);
    }
}

impl<'t, T: Element> Operands for Write<'t, T> {
    type Held = Held<T>;
    type Views<'a> = &'a mut [T];

    fn hold(self, compute: &Compute, op: &'static str) -> Result<Held<T>> {
        self.stated.hold(compute, op, Access::Write)
    }

    unsafe fn views(held: &mut Held<T>) -> &mut [T] {
        // SAFETY: the caller's, and `hold` has claimed the range for writing.
        unsafe { held.elems_mut() }
    }

    fn inputs<'a>(&'a self, show: &mut dyn FnMut(&'a Tensor)) {
        if self.is_read {
            show(self.stated.tensor);
        }
    }
}

impl<T: Element> Operands for Scratch<T> {
    type Held = Held<T>;
    type Views<'a> = &'a mut [T];

    fn hold(self, compute: &Compute, op: &'static str) -> Result<Held<T>> {
        let tensor = compute.allocator.tensor(T::DTYPE, [self.0], Category::Workspace)?;
        Ok(Held(tensor.claim(Access::Write, op)?, PhantomData))
    }

    unsafe fn views(held: &mut Held<T>) -> &mut [T] {
        // SAFETY: the caller's, and `hold` has claimed the range for writing.
        unsafe { held.elems_mut() }
    }

    fn inputs<'a>(&'a self, _: &mut dyn FnMut(&'a Tensor)) {}
}

impl<A: Operands> Operands for Option<A> {
    type Held = Option<A::Held>;
    type Views<'a> = Option<A::Views<'a>>;

    fn hold(self, compute: &Compute, op: &'static str) -> Result<Self::Held> {
        self.map(|operand| operand.hold(compute, op)).transpose()
    }

    unsafe fn views(held: &mut Self::Held) -> Self::Views<'_> {
        // SAFETY: the caller's.
        held.as_mut().map(|held| unsafe { A::views(held) })
    }

    fn inputs<'a>(&'a self, show: &mut dyn FnMut(&'a Tensor)) {
        if let Some(operand) = self {
            operand.inputs(show);
        }
    }
}

macro_rules! operands_in_tuples {
    ($(($($A:ident $at:tt),+))+) => {$(
        impl<$($A: Operands),+> Operands for ($($A,)+) {
            type Held = ($($A::Held,)+);
            type Views<'a> = ($($A::Views<'a>,)+);

            fn hold(self, compute: &Compute, op: &'static str) -> Result<Self::Held> {
                Ok(($(self.$at.hold(compute, op)?,)+))
            }

            unsafe fn views(held: &mut Self::Held) -> Self::Views<'_> {
                // SAFETY: the caller's.
                unsafe { ($($A::views(&mut held.$at),)+) }
            }

            fn inputs<'a>(&'a self, show: &mut dyn FnMut(&'a Tensor)) {
                $(self.$at.inputs(show);)+
            }
        }
    )+};
}
operands_in_tuples! {
    (A 0)
    (A 0, B 1)
    (A 0, B 1, C 2)
    (A 0, B 1, C 2, D 3)
    (A 0, B 1, C 2, D 3, E 4)
    (A 0, B 1, C 2, D 3, E 4, F 5)
    (A 0, B 1, C 2, D 3, E 4, F 5, G 6)
    (A 0, B 1, C 2, D 3, E 4, F 5, G 6, H 7)
}

impl Compute {
    /// Runs an operation on the device of this handle. `body` gets the slices of the operands in the form in which they
    /// were stated.
    ///
    /// The processor runs the body at once. A device without contents checks and claims the operands, takes the scratch
    /// memory, counts the floating-point operations, and computes nothing; so a pass there has the peaks of memory of the
    /// same pass on the processor.
    ///
    /// Errors if an operand has another shape or element type than stated, lies on another device, or is in use; and with
    /// what the body returns.
    pub fn launch<O: Operands>(
        &self,
        op: Op,
        operands: O,
        body: impl for<'a> FnOnce(&Processor, O::Views<'a>) -> Result<()> + Send + 'static,
    ) -> Result<()> {
        let _time = self.time(op.name, || {
            let (mut inputs, mut len) = ([None; Shapes::TENSORS], 0);
            operands.inputs(&mut |tensor| {
                if let Some(place) = inputs.get_mut(len) {
                    *place = Some(tensor.dims());
                    len += 1;
                }
            });
            Shapes::new(inputs.into_iter().flatten())
        });
        let mut held = operands.hold(self, op.name)?;
        match self.device() {
            // SAFETY: `hold` has refused operands of any other device than this one.
            Device::Cpu => body(&self.processor, unsafe { O::views(&mut held) }),
            Device::Meta => {
                self.count(op);
                Ok(())
            }
        }
    }
}

/// The error of an operation that is not defined for elements of this type.
pub(crate) fn undefined<T>(op: &'static str, dtype: DType) -> Result<T> {
    Err(KernelError::DType { op, dtype })
}
