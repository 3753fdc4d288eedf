//! The one door through which every operation goes to its device.
//!
//! An operation states once its name, its operands with their shapes, element types and access, its scratch memory, and its
//! floating-point operations. The checks, the claims, the time in the trace, the count of operations, and the behavior of a
//! device without contents follow from that. Then comes a body, which computes on slices of the operands. This module does not
//! know what any operation computes.
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

use paceline_memory::{Body, Device, DeviceStream, MemoryError, Tensor};
use paceline_trace::{Event, Place, Shapes, Span, lock, now_ns};

use crate::compute::Processor;
use crate::operands::{Claims, Holding, InputShapes, Operands, read_bytes, write_bytes};
use crate::rehearsal::Op;
use crate::{Compute, KernelError, OnCard, Result};

impl Compute {
    /// Runs an operation on the device of this handle. `body` gets the slices of the operands in the form in which they
    /// were stated.
    ///
    /// The processor runs the body at once. A device without contents checks and claims the operands, takes the scratch memory,
    /// counts the floating-point operations, and computes nothing; so a pass has the same peaks of memory there. An accelerator
    /// runs the body after all that was launched before; an error of the body stops the device, and [`Compute::synchronize`]
    /// returns it. A card cannot run the body: [`Compute::launch_with_card`] takes another.
    ///
    /// Errors if an operand has another shape or element type than stated, lies on another device, or is in use; and with
    /// what the body returns.
    pub fn launch<O: Operands>(
        &self,
        op: Op,
        operands: O,
        body: impl for<'a> FnOnce(&Processor, O::Views<'a>) -> Result<()> + Send + 'static,
    ) -> Result<()> {
        let _time = self.time(op.name, &|| work_of(op, &operands));
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
        let _time = self.time(op.name, &|| work_of(op, &operands));
        self.run(op, operands, body, Some(on_card))
    }

    /// Copies the elements of a tensor into another tensor with the same element type and number of elements, and records a copy.
    /// One of the two may lie on the host.
    pub fn copy(&self, from: &Tensor, to: &Tensor) -> Result<()> {
        if from.dtype() != to.dtype() {
            let (expected, got) = (to.dtype(), from.dtype());
            return Err(MemoryError::WrongType { expected, got }.into());
        }
        let from = from.view(to.shape())?;
        if let Some(stream) = self.allocator.home().filter(|_| from.device() != to.device()) {
            stream.copy(&from, to)?;
            return Ok(());
        }
        let track = self.host_track();
        let start_ns = track.map(|_| now_ns());
        let operands = (read_bytes("from", &from, to.shape()), write_bytes("to", to, to.shape()));
        let bytes = to.num_bytes();
        let body = |_: &Processor, (from, to): (&[u8], &mut [u8])| {
            to.copy_from_slice(from);
            Ok(())
        };
        let on_card = move |card: &OnCard, (from, to)| {
            // SAFETY: both operands have the shape of `to`, whose bytes these are.
            unsafe { card.copy::<u8>(from, to, bytes) }
        };
        self.run(Op::new("copy"), operands, body, Some(on_card))?;
        let (Some(track), Some(start_ns)) = (track, start_ns) else { return Ok(()) };
        let span = Span { start_ns, end_ns: now_ns() };
        let (launched, bytes) = (Span::at(start_ns), from.num_bytes() as u64);
        let places = (Place::Pageable, Place::Pageable);
        track.record(Event::Copy { launched, span, bytes, places });
        Ok(())
    }

    /// Runs an operation without recording it.
    fn run<O: Operands>(
        &self,
        op: Op,
        operands: O,
        body: impl for<'a> FnOnce(&Processor, O::Views<'a>) -> Result<()> + Send + 'static,
        on_card: Option<
            impl FnOnce(&OnCard, O::OnCard) -> paceline_cuda::Result<()> + Send + 'static,
        >,
    ) -> Result<()> {
        let op = if on_card.is_none() { op.without_card() } else { op };
        if let Some(name) = op.card_needs.missing.filter(|_| self.is_card()) {
            return Err(KernelError::NoCardBody(name));
        }
        // Every operation has a copy of this function, so what needs no type of the operation is done elsewhere.
        let shapes = (self.device() != Device::Cpu).then(|| work_of(op, &operands));
        let mut work = Some((operands, body, on_card));
        self.run_held(op, shapes, &mut |holding| {
            let (operands, body, on_card) = work.take().expect("work is prepared once");
            let mut held = operands.hold(holding);
            holding.outcome()?;
            match self.device() {
                Device::Cpu => {
                    // SAFETY: the claims are there until `run_held` ends. `hold` has refused operands of any other device
                    // than this one.
                    unsafe { compute::<O>(body, &self.processor, &mut held) }.map(|()| None)
                }
                Device::Meta => Ok(None),
                Device::Sim => {
                    let processor = self.processor.clone();
                    Ok(Some(Box::new(move || {
                        // SAFETY: this is the work's place in its stream. This thread runs the work of the emulated device,
                        // whose memory it can reach.
                        reported(unsafe { compute::<O>(body, &processor, &mut held) })
                    })))
                }
                Device::Cuda => {
                    let on_card = on_card.expect("an operation without it is refused");
                    let (card, addresses) = (self.on_card(), O::on_card(&held));
                    Ok(Some(Box::new(move || reported(on_card(&card, addresses)))))
                }
            }
        })
    }

    /// Calls `prepare` once, which claims the operands and runs the operation, or returns what is to run in its place in
    /// the stream of this handle. `shapes` is given on all devices but the processor.
    fn run_held(
        &self,
        op: Op,
        shapes: Option<Shapes>,
        prepare: &mut dyn FnMut(&mut Holding<'_>) -> Result<Option<Body>>,
    ) -> Result<()> {
        let mut claims = Claims::new();
        match shapes.filter(|_| self.device() != Device::Meta) {
            None => {
                prepare(&mut Holding::new(self, op.name, None, &mut claims))?;
            }
            Some(shapes) => {
                self.stream().launch(op.name, shapes, |event| {
                    let body = prepare(&mut Holding::new(self, op.name, Some(event), &mut claims))?;
                    Ok::<_, KernelError>(body.expect("a stream has work"))
                })?;
            }
        }
        if let Some(shapes) = shapes.filter(|_| self.device() == Device::Meta) {
            lock(&self.rehearsal).count(op, shapes.bytes);
        }
        Ok(())
    }

    /// The stream in which a body for cards launches kernels.
    fn on_card(&self) -> OnCard {
        let stream = self.stream().card().expect("memory of a card has its stream").clone();
        OnCard::new(stream, self.rounds_to_tf32)
    }

    fn stream(&self) -> &DeviceStream {
        self.allocator.home().expect("memory of a device has a stream")
    }
}

/// Calls the body. Not inlined: bodies are large, and are called at two places.
///
/// # Safety
///
/// As for [`Operands::views`].
#[inline(never)]
unsafe fn compute<O: Operands>(
    body: impl for<'a> FnOnce(&Processor, O::Views<'a>) -> Result<()>,
    processor: &Processor,
    held: &mut O::Held,
) -> Result<()> {
    // SAFETY: required of the caller.
    body(processor, unsafe { O::views(held) })
}

fn work_of(op: Op, operands: &impl Operands) -> Shapes {
    let mut inputs = InputShapes::default();
    operands.inputs(&mut inputs);
    inputs.shapes(op)
}

/// The outcome of a body in the form that streams report.
fn reported<E: ToString>(outcome: std::result::Result<(), E>) -> std::result::Result<(), String> {
    outcome.map_err(|error| error.to_string())
}

/// Launches an operation on images with the element types of a layer: `$X` of its input (or the input's gradient), `$S` of its
/// output (or the output's gradient), and `$P` of its parameters. All are f32, or all are f64, or `$S` is of 16 bits
/// (bf16 or f16); then `$X` is f32 or `$S`, and `$P` is f32. The operands, and the body for cards, are stated once for all types.
/// Bodies get a pair of operands and scratch memory, which is `$memory`, or nothing in f64.
macro_rules! for_images {
    (
        $compute:expr, $op:expr, ($input:expr, $output:expr), ($X:ident, $S:ident, $P:ident) => $operands:expr,
        memory: $memory:expr,
        f64: $plain:expr,
        f32: $fast:expr,
        card: $card:expr $(,)?
    ) => {{
        use paceline_memory::DType::{BF16, F16, F32, F64};
        macro_rules! with {
            ($x:ty, $s:ty, $p:ty, $of_types:expr, $body:expr, $on_card:expr) => {{
                type $X = $x;
                type $S = $s;
                type $P = $p;
                let op = $op.needs($crate::CardNeeds::of_products::<$S>());
                $compute.launch_with_card(op, ($operands, $of_types), $body, $on_card)
            }};
        }
        match ($input.dtype(), $output.dtype()) {
            (F64, F64) => with!(f64, f64, f64, None::<$crate::Scratch<f32>>, $plain, $card),
            (F32, F32) => with!(f32, f32, f32, $memory, $fast, $card),
            (F32, BF16) => with!(f32, half::bf16, f32, $memory, $fast, $card),
            (BF16, BF16) => with!(half::bf16, half::bf16, f32, $memory, $fast, $card),
            (F32, F16) => with!(f32, half::f16, f32, $memory, $fast, $card),
            (F16, F16) => with!(half::f16, half::f16, f32, $memory, $fast, $card),
            // The input is fine by itself, so the output is of the wrong type.
            (expected @ (F32 | F64 | BF16 | F16), got) => {
                Err(paceline_memory::MemoryError::WrongType { expected, got }.into())
            }
            (dtype, _) => Err($crate::KernelError::DType { op: $op.name, dtype }),
        }
    }};
}
pub(crate) use for_images;
