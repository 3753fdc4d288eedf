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

use paceline_memory::{Body, Device, DeviceStream};
use paceline_trace::Shapes;

use crate::compute::Processor;
use crate::operands::{Claims, Holding, Inputs, Operands};
use crate::{CardNeeds, Compute, KernelError, OnCard, Result};

/// The name of an operation, and what it counts for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[must_use = "an operation is launched by `Compute::launch`"]
pub struct Op {
    pub(crate) name: &'static str,
    pub(crate) forward_flops: u64,
    pub(crate) backward_flops: u64,
    pub(crate) card_needs: CardNeeds,
}

impl Op {
    /// The operation of this name. It counts for no floating-point operations.
    pub const fn new(name: &'static str) -> Self {
        let card_needs = CardNeeds { capability: (0, 0), shared_bytes: 0 };
        Self { name, forward_flops: 0, backward_flops: 0, card_needs }
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

    /// Its kernels need this of a card, see [`Compute::card_needs`].
    pub(crate) fn needs(self, card_needs: CardNeeds) -> Self {
        Self { card_needs, ..self }
    }
}

/// The floating-point operations of a product with this number of multiply-adds.
fn flops(factors: impl IntoIterator<Item = usize>) -> u64 {
    factors.into_iter().fold(2, |all, factor| all.saturating_mul(factor as u64))
}

impl Compute {
    /// Runs an operation on the device of this handle. `body` gets the slices of the operands in the form in which they
    /// were stated.
    ///
    /// The processor runs the body at once. A device without contents checks and claims the operands, takes the scratch
    /// memory, counts the floating-point operations, and computes nothing; so a pass there has the peaks of memory of the
    /// same pass on the processor. An accelerator runs the body later, behind all that was launched before; what the body
    /// returns then stops the device, and [`Compute::synchronize`] tells it. A card cannot run the body, which is code of the
    /// processor: [`Compute::launch_with_card`] states another.
    ///
    /// Errors if an operand has another shape or element type than stated, lies on another device, or is in use; and with
    /// what the body returns.
    pub fn launch<O: Operands>(
        &self,
        op: Op,
        operands: O,
        body: impl for<'a> FnOnce(&Processor, O::Views<'a>) -> Result<()> + Send + 'static,
    ) -> Result<()> {
        let _time = self.time(op.name, &|| shapes_of(&operands));
        self.run(op, operands, body, None::<fn(&OnCard, O::OnCard) -> _>)
    }

    /// The same, with a second body for cards. It gets the addresses of the operands in the form in which they were stated,
    /// and launches kernels on them.
    pub fn launch_with_card<O: Operands>(
        &self,
        op: Op,
        operands: O,
        body: impl for<'a> FnOnce(&Processor, O::Views<'a>) -> Result<()> + Send + 'static,
        on_card: impl FnOnce(&OnCard, O::OnCard) -> paceline_cuda::Result<()> + Send + 'static,
    ) -> Result<()> {
        let _time = self.time(op.name, &|| shapes_of(&operands));
        self.run(op, operands, body, Some(on_card))
    }

    /// Runs an operation without recording it.
    pub(crate) fn run<O: Operands>(
        &self,
        op: Op,
        operands: O,
        body: impl for<'a> FnOnce(&Processor, O::Views<'a>) -> Result<()> + Send + 'static,
        on_card: Option<
            impl FnOnce(&OnCard, O::OnCard) -> paceline_cuda::Result<()> + Send + 'static,
        >,
    ) -> Result<()> {
        // Every operation has a copy of this function, so it does nothing that needs no type of the operation.
        match self.device() {
            Device::Cpu => {
                let mut claims = Claims::new();
                let mut held = operands.hold(&mut self.at_once(op, &mut claims))?;
                // SAFETY: the claims are there until this function ends. `hold` has refused operands of any other device than
                // this one.
                body(&self.processor, unsafe { O::views(&mut held) })
            }
            Device::Meta => {
                operands.hold(&mut self.at_once(op, &mut Claims::new()))?;
                self.count(op);
                Ok(())
            }
            Device::Sim => {
                let (shapes, mut work) = (shapes_of(&operands), Some((operands, body)));
                self.queue(op, shapes, &mut |holding| {
                    let (operands, body) = work.take().expect("work is prepared once");
                    let (mut held, processor) = (operands.hold(holding)?, self.processor.clone());
                    Ok(Box::new(move || {
                        // SAFETY: this is the work's place in its stream. This thread runs the work of the emulated device,
                        // whose memory it can reach.
                        told(body(&processor, unsafe { O::views(&mut held) }))
                    }))
                })
            }
            Device::Cuda => {
                let on_card = on_card.ok_or(KernelError::NoCardBody(op.name))?;
                let (shapes, mut work) = (shapes_of(&operands), Some((operands, on_card)));
                self.queue(op, shapes, &mut |holding| {
                    let (operands, on_card) = work.take().expect("work is prepared once");
                    let (addresses, card) = (O::on_card(&operands.hold(holding)?), self.on_card());
                    Ok(Box::new(move || told(on_card(&card, addresses))))
                })
            }
        }
    }

    /// How an operation that runs at once holds its operands.
    fn at_once<'a>(&'a self, op: Op, claims: &'a mut Claims) -> Holding<'a> {
        Holding { compute: self, op: op.name, queued: None, claims }
    }

    /// Puts an operation into the stream of this handle. `prepare` is called once.
    fn queue(
        &self,
        op: Op,
        shapes: Shapes,
        prepare: &mut dyn FnMut(&mut Holding<'_>) -> Result<Body>,
    ) -> Result<()> {
        let mut claims = Claims::new();
        self.stream().launch(op.name, shapes, |event| {
            let (queued, claims) = (Some(event), &mut claims);
            prepare(&mut Holding { compute: self, op: op.name, queued, claims })
        })?;
        Ok(())
    }

    /// What a body for cards launches kernels with.
    fn on_card(&self) -> OnCard {
        let stream = self.stream().card().expect("memory of a card has its stream").clone();
        OnCard::new(stream, self.rounds_to_tf32)
    }

    fn stream(&self) -> &DeviceStream {
        self.allocator.home().expect("memory of a device has a stream")
    }
}

/// The shapes of the tensors that are read.
fn shapes_of(operands: &impl Operands) -> Shapes {
    let mut inputs = Inputs::default();
    operands.inputs(&mut inputs);
    inputs.shapes()
}

/// The outcome of a body, as a stream tells it.
fn told<E: ToString>(outcome: std::result::Result<(), E>) -> std::result::Result<(), String> {
    outcome.map_err(|error| error.to_string())
}
