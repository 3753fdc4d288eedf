//! The operands of an operation: tensors and scratch memory, stated before they are touched.
//!
//! Input: tensors with the shape, element type and access that an operation states. Output: claims, and then slices for the
//! processor or addresses for a card's kernels. This module does not know when, or on which device, an operation runs.

use std::marker::PhantomData;
use std::ptr::NonNull;

use paceline_cuda::kernel::{In, Out};
use paceline_memory::{Access, Category, Claim, DType, Device, Element, Event, Shape, Tensor};
use paceline_trace::Shapes;
use smallvec::SmallVec;

use crate::error::expect_shape;
use crate::rehearsal::Op;
use crate::{Compute, KernelError, Result};

/// The operands of an operation: one, a tuple or a `Vec` of them, or an `Option` of one.
///
/// [`read`], [`write()`], [`update`] and [`scratch`] make operands. A body gets slices in the same form.
pub trait Operands {
    /// Where the operands lie.
    #[doc(hidden)]
    type Held: Send + 'static;
    /// The slices that a body gets.
    type Views<'a>;

    /// Checks each operand and claims it, until one is refused, see [`Holding::outcome`].
    #[doc(hidden)]
    fn hold(self, to: &mut Holding<'_>) -> Self::Held;

    /// The slices of what is held.
    ///
    /// # Safety
    ///
    /// `held` is what `hold` of such operands returned, and none was refused. The claims of `hold` are there still, or the
    /// operation is in its place in a stream, and all that comes before it is done. The memory lies where this thread can
    /// reach it.
    #[doc(hidden)]
    unsafe fn views(held: &mut Self::Held) -> Self::Views<'_>;

    /// The addresses that a card's kernels get.
    type OnCard: Send + 'static;

    /// The addresses of what is held.
    #[doc(hidden)]
    fn on_card(held: &Self::Held) -> Self::OnCard;

    /// Notes the tensors that are read, in order, and the bytes of all.
    #[doc(hidden)]
    fn inputs<'a>(&'a self, into: &mut InputShapes<'a>);
}

/// The dimensions of the tensors that an operation reads.
#[doc(hidden)]
#[derive(Debug, Default)]
pub struct InputShapes<'a> {
    dims: [Option<&'a [usize]>; Shapes::TENSORS],
    len: usize,
    /// Of all operands, twice for one that is changed in place.
    bytes: usize,
}

impl<'a> InputShapes<'a> {
    fn push(&mut self, tensor: &'a Tensor) {
        self.bytes += tensor.num_bytes();
        if let Some(place) = self.dims.get_mut(self.len) {
            *place = Some(tensor.dims());
            self.len += 1;
        }
    }

    pub(crate) fn shapes(&self, op: Op) -> Shapes {
        let mut shapes = Shapes::new(self.dims.into_iter().flatten());
        (shapes.flop, shapes.bytes) = (op.flops(), op.touched_bytes.unwrap_or(self.bytes as u64));
        shapes
    }
}

/// Keep the memory of operands in place until the operation is done or in its stream. Memory of a device may be freed while
/// queued work uses it, because it goes back to the stream after the work.
pub(crate) type Claims = SmallVec<[Claim; 10]>;

/// Who claims operands, and for what.
#[doc(hidden)]
#[derive(Debug)]
pub struct Holding<'a> {
    compute: &'a Compute,
    op: &'static str,
    /// The end of the operation, if it is put into a stream.
    queued: Option<&'a Event>,
    claims: &'a mut Claims,
    outcome: Result<()>,
}

impl<'a> Holding<'a> {
    pub(crate) fn new(
        compute: &'a Compute,
        op: &'static str,
        queued: Option<&'a Event>,
        claims: &'a mut Claims,
    ) -> Self {
        Self { compute, op, queued, claims, outcome: Ok(()) }
    }

    /// Why an operand was refused, if one was: what was held must not be used then. To be called once, after `hold`.
    pub(crate) fn outcome(&mut self) -> Result<()> {
        std::mem::replace(&mut self.outcome, Ok(()))
    }

    /// The result of `claim`, or no elements if this or an earlier operand is refused.
    fn held(&mut self, claim: impl FnOnce(&mut Self) -> Result<HeldOperand>) -> HeldOperand {
        if self.outcome.is_ok() {
            match claim(self) {
                Ok(held) => return held,
                Err(error) => self.outcome = Err(error),
            }
        }
        HeldOperand { base: NonNull::dangling(), len_bytes: 0 }
    }

    fn scratch(&mut self, dtype: DType, len: usize) -> HeldOperand {
        self.held(|to| {
            let tensor = to.compute.allocator.tensor(dtype, [len], Category::Workspace)?;
            to.claim(&tensor, Access::Write)
        })
    }

    fn claim(&mut self, tensor: &Tensor, access: Access) -> Result<HeldOperand> {
        let claim = match self.queued {
            None => tensor.claim(access, self.op)?,
            Some(event) => tensor.queue(access, self.op, event)?,
        };
        let held = HeldOperand { base: claim.base(), len_bytes: claim.len_bytes() };
        self.claims.push(claim);
        Ok(held)
    }
}

/// Where an operand lies that is claimed.
#[doc(hidden)]
#[derive(Debug)]
pub struct HeldOperand {
    base: NonNull<u8>,
    len_bytes: usize,
}

// SAFETY: an address. Whoever uses it promises that what lies there is claimed.
unsafe impl Send for HeldOperand {}

impl HeldOperand {
    fn address(&self) -> u64 {
        self.base.as_ptr().addr() as u64
    }

    /// # Safety
    ///
    /// As for [`Operands::views`], and `T` is the element type of the operand, or a byte.
    unsafe fn elems<T: Element>(&self) -> &[T] {
        let len = self.len_bytes / size_of::<T>();
        // SAFETY: the caller promises the claim, or the place in the stream, which keeps the range in place and excludes writers,
        // and that this thread can reach it. With the element type the range is aligned and any bits in it are a valid `T`.
        unsafe { std::slice::from_raw_parts(self.base.as_ptr().cast(), len) }
    }

    /// # Safety
    ///
    /// As for [`HeldOperand::elems`], and the operand must be claimed for writing.
    unsafe fn elems_mut<T: Element>(&mut self) -> &mut [T] {
        let len = self.len_bytes / size_of::<T>();
        // SAFETY: as for `elems`; a claim for writing excludes all other users.
        unsafe { std::slice::from_raw_parts_mut(self.base.as_ptr().cast(), len) }
    }
}

/// The part of a statement that all tensors have.
#[derive(Clone, Copy, Debug)]
struct StatedTensor<'t> {
    operand: &'static str,
    tensor: &'t Tensor,
    shape: Shape,
    /// Whether the elements are taken as bytes, whatever their type.
    is_bytes: bool,
}

impl StatedTensor<'_> {
    /// Checks the tensor and claims it, for elements of type `dtype`.
    fn hold(&self, to: &mut Holding<'_>, dtype: DType, access: Access) -> HeldOperand {
        to.held(|to| {
            self.check(to, dtype)?;
            to.claim(self.tensor, access)
        })
    }

    /// Checks shape, device and element type.
    fn check(&self, to: &Holding<'_>, dtype: DType) -> Result<()> {
        let (op, compute) = (to.op, to.compute);
        expect_shape(op, self.operand, self.tensor.shape(), self.shape)?;
        if self.tensor.device() != compute.device() {
            let (operand, compute) = (self.tensor.device(), compute.device());
            return Err(KernelError::Device { op, operand, compute });
        }
        if self.tensor.dtype() != dtype && !self.is_bytes {
            let (operand, expected, got) = (self.operand, dtype, self.tensor.dtype());
            return Err(KernelError::Type { op, operand, expected, got });
        }
        Ok(())
    }
}

/// See [`read`].
#[derive(Clone, Copy, Debug)]
pub struct Read<'t, T>(StatedTensor<'t>, PhantomData<T>);

/// See [`write()`] and [`update`].
#[derive(Clone, Copy, Debug)]
pub struct Write<'t, T> {
    stated: StatedTensor<'t>,
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
    Read(StatedTensor { operand, tensor, shape: shape.into(), is_bytes: false }, PhantomData)
}

/// An operand that is overwritten as a whole: what it held before does not matter.
pub fn write<'t, T: Element>(
    operand: &'static str,
    tensor: &'t Tensor,
    shape: impl Into<Shape>,
) -> Write<'t, T> {
    let stated = StatedTensor { operand, tensor, shape: shape.into(), is_bytes: false };
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

/// An operand of any type that is read as bytes.
pub(crate) fn read_bytes<'t>(
    operand: &'static str,
    tensor: &'t Tensor,
    shape: Shape,
) -> Read<'t, u8> {
    Read(StatedTensor { operand, tensor, shape, is_bytes: true }, PhantomData)
}

/// An operand of any type that is overwritten as bytes.
pub(crate) fn write_bytes<'t>(
    operand: &'static str,
    tensor: &'t Tensor,
    shape: Shape,
) -> Write<'t, u8> {
    let stated = StatedTensor { operand, tensor, shape, is_bytes: true };
    Write { stated, is_read: false, elements: PhantomData }
}

/// A result to which the operation adds if `accumulate`, and which it overwrites otherwise.
pub fn write_or_update<'t, T: Element>(
    accumulate: bool,
    operand: &'static str,
    tensor: &'t Tensor,
    shape: impl Into<Shape>,
) -> Write<'t, T> {
    Write { is_read: accumulate, ..write(operand, tensor, shape) }
}

/// Scratch memory of `len` elements, which have unspecified values when the body starts.
pub fn scratch<T: Element>(len: usize) -> Scratch<T> {
    Scratch(len, PhantomData)
}

/// The same for what only a card's kernels need: no elements on other devices.
pub(crate) fn card_scratch<T: Element>(compute: &Compute, len: usize) -> Scratch<T> {
    scratch(if compute.device() == Device::Cuda { len } else { 0 })
}

impl<'t, T: Element> Operands for Read<'t, T> {
    type Held = HeldOperand;
    type Views<'a> = &'a [T];

    fn hold(self, to: &mut Holding<'_>) -> HeldOperand {
        self.0.hold(to, T::DTYPE, Access::Read)
    }

    unsafe fn views(held: &mut HeldOperand) -> &[T] {
        // SAFETY: the caller's, and `hold` has checked the element type.
        unsafe { held.elems() }
    }

    type OnCard = In<T>;

    fn on_card(held: &Self::Held) -> Self::OnCard {
        In(held.address(), PhantomData)
    }

    fn inputs<'a>(&'a self, into: &mut InputShapes<'a>) {
        into.push(self.0.tensor);
    }
}

impl<'t, T: Element> Operands for Write<'t, T> {
    type Held = HeldOperand;
    type Views<'a> = &'a mut [T];

    fn hold(self, to: &mut Holding<'_>) -> HeldOperand {
        self.stated.hold(to, T::DTYPE, Access::Write)
    }

    unsafe fn views(held: &mut HeldOperand) -> &mut [T] {
        // SAFETY: the caller's, and `hold` has checked the element type and claimed the range for writing.
        unsafe { held.elems_mut() }
    }

    type OnCard = Out<T>;

    fn on_card(held: &Self::Held) -> Self::OnCard {
        Out(held.address(), PhantomData)
    }

    fn inputs<'a>(&'a self, into: &mut InputShapes<'a>) {
        into.bytes += self.stated.tensor.num_bytes();
        if self.is_read {
            into.push(self.stated.tensor);
        }
    }
}

impl<T: Element> Operands for Scratch<T> {
    type Held = HeldOperand;
    type Views<'a> = &'a mut [T];

    fn hold(self, to: &mut Holding<'_>) -> HeldOperand {
        to.scratch(T::DTYPE, self.0)
    }

    unsafe fn views(held: &mut HeldOperand) -> &mut [T] {
        // SAFETY: the caller's, and `hold` has claimed a range of these elements for writing.
        unsafe { held.elems_mut() }
    }

    type OnCard = Out<T>;

    fn on_card(held: &Self::Held) -> Self::OnCard {
        Out(held.address(), PhantomData)
    }

    fn inputs<'a>(&'a self, _: &mut InputShapes<'a>) {}
}

impl<A: Operands> Operands for Option<A> {
    type Held = Option<A::Held>;
    type Views<'a> = Option<A::Views<'a>>;

    fn hold(self, to: &mut Holding<'_>) -> Self::Held {
        self.map(|operand| operand.hold(to))
    }

    unsafe fn views(held: &mut Self::Held) -> Self::Views<'_> {
        // SAFETY: the caller's.
        held.as_mut().map(|held| unsafe { A::views(held) })
    }

    type OnCard = Option<A::OnCard>;

    fn on_card(held: &Self::Held) -> Self::OnCard {
        held.as_ref().map(A::on_card)
    }

    fn inputs<'a>(&'a self, into: &mut InputShapes<'a>) {
        if let Some(operand) = self {
            operand.inputs(into);
        }
    }
}

impl<A: Operands> Operands for Vec<A> {
    type Held = Vec<A::Held>;
    type Views<'a> = Vec<A::Views<'a>>;

    fn hold(self, to: &mut Holding<'_>) -> Self::Held {
        self.into_iter().map(|operand| operand.hold(to)).collect()
    }

    unsafe fn views(held: &mut Self::Held) -> Self::Views<'_> {
        // SAFETY: the caller's.
        held.iter_mut().map(|held| unsafe { A::views(held) }).collect()
    }

    type OnCard = Vec<A::OnCard>;

    fn on_card(held: &Self::Held) -> Self::OnCard {
        held.iter().map(A::on_card).collect()
    }

    fn inputs<'a>(&'a self, into: &mut InputShapes<'a>) {
        self.iter().for_each(|operand| operand.inputs(into));
    }
}

/// One of two operands, chosen by the tensor's dtype.
#[derive(Clone, Copy, Debug)]
pub enum Either<A, B> {
    /// The first one.
    A(A),
    /// The second one.
    B(B),
}

impl<A: Operands, B: Operands> Operands for Either<A, B> {
    type Held = Either<A::Held, B::Held>;
    type Views<'a> = Either<A::Views<'a>, B::Views<'a>>;

    fn hold(self, to: &mut Holding<'_>) -> Self::Held {
        match self {
            Either::A(operand) => Either::A(operand.hold(to)),
            Either::B(operand) => Either::B(operand.hold(to)),
        }
    }

    unsafe fn views(held: &mut Self::Held) -> Self::Views<'_> {
        match held {
            // SAFETY: the caller's.
            Either::A(held) => Either::A(unsafe { A::views(held) }),
            // SAFETY: the caller's.
            Either::B(held) => Either::B(unsafe { B::views(held) }),
        }
    }

    type OnCard = Either<A::OnCard, B::OnCard>;

    fn on_card(held: &Self::Held) -> Self::OnCard {
        match held {
            Either::A(held) => Either::A(A::on_card(held)),
            Either::B(held) => Either::B(B::on_card(held)),
        }
    }

    fn inputs<'a>(&'a self, into: &mut InputShapes<'a>) {
        match self {
            Either::A(operand) => operand.inputs(into),
            Either::B(operand) => operand.inputs(into),
        }
    }
}

macro_rules! operands_in_tuples {
    ($(($($A:ident $at:tt),+))+) => {$(
        impl<$($A: Operands),+> Operands for ($($A,)+) {
            type Held = ($($A::Held,)+);
            type Views<'a> = ($($A::Views<'a>,)+);

            fn hold(self, to: &mut Holding<'_>) -> Self::Held {
                ($(self.$at.hold(to),)+)
            }

            unsafe fn views(held: &mut Self::Held) -> Self::Views<'_> {
                // SAFETY: the caller's.
                unsafe { ($($A::views(&mut held.$at),)+) }
            }

            type OnCard = ($($A::OnCard,)+);

            fn on_card(held: &Self::Held) -> Self::OnCard {
                ($($A::on_card(&held.$at),)+)
            }

            fn inputs<'a>(&'a self, into: &mut InputShapes<'a>) {
                $(self.$at.inputs(into);)+
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
    (A 0, B 1, C 2, D 3, E 4, F 5, G 6, H 7, I 8)
}
