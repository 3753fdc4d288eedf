//! The resources of a kernel: its device, vector instructions, threads and scratch memory.

use std::sync::{Arc, Mutex};

use paceline_memory::{Allocator, DType, Device};
use paceline_trace::{Event, Shapes, Span, Track, lock, now_ns};

use crate::rehearsal::OpCounts;
use crate::tiles::Ways;
use crate::{Bf16Products, CardNeeds, Result, SimdLevel, Threads};

/// The instructions and threads with which the body of an operation computes.
#[derive(Debug)]
pub struct Processor {
    pub(crate) simd: SimdLevel,
    /// How products in bf16 are computed at the level that has AVX-512.
    pub(crate) bf16_products: Bf16Products,
    /// The threads that share the work of a kernel.
    pub threads: Threads,
}

/// The resources with which one rank computes.
#[derive(Debug)]
pub struct Compute {
    pub(crate) processor: Arc<Processor>,
    /// Where scratch memory comes from.
    pub allocator: Allocator,
    /// Memory of the host, for numbers that the host reads or writes; that of `allocator` on the processor.
    pub host: Allocator,
    track: Option<Arc<Track>>,
    /// Whether a card may round the factors of products and convolutions in f32 to TF32.
    pub(crate) rounds_to_tf32: bool,
    /// Counted on a device without contents only.
    pub(crate) rehearsal: Mutex<OpCounts>,
}

impl Compute {
    /// Computes with `num_threads` threads and the vector instructions of this process ([`SimdLevel::of_process`]), in the
    /// memory of the allocator's device. Errors if the system refuses the threads. [`Device::Meta`] starts no thread, but takes
    /// the scratch memory of this number of threads.
    ///
    /// The thread that launches an operation is one of the threads. While one does, another that uses the same handle computes
    /// alone.
    pub fn new(num_threads: usize, allocator: Allocator) -> Result<Self> {
        let threads = match allocator.device() {
            Device::Cpu | Device::Sim => Threads::new(num_threads)?,
            // A card has its own.
            Device::Cuda | Device::Meta => Threads::none(num_threads),
        };
        Ok(Self {
            processor: Arc::new(Processor {
                simd: SimdLevel::of_process(),
                bf16_products: Bf16Products::of_process(),
                threads,
            }),
            host: match allocator.home() {
                Some(stream) => Allocator::pinned(stream.accelerator()),
                None => allocator.clone(),
            },
            allocator,
            track: None,
            rounds_to_tf32: false,
            rehearsal: Mutex::default(),
        })
    }

    /// Lets a card multiply in f32 on its tensor cores, with factors that are rounded to 10 bits of mantissa (TF32), in linear
    /// layers and convolutions. See docs/devices.md, "Precision". No effect on other devices.
    pub fn with_tf32(self) -> Self {
        Self { rounds_to_tf32: true, ..self }
    }

    /// Whether it rounds f32 factors to TF32 on a card.
    pub fn rounds_to_tf32(&self) -> bool {
        self.rounds_to_tf32
    }

    /// The device that computes.
    pub fn device(&self) -> Device {
        self.allocator.device()
    }

    /// Whether a card computes: some scratch memory has another size there.
    pub(crate) fn is_card(&self) -> bool {
        self.device() == Device::Cuda
    }

    /// The floating-point operations of all forward products so far: linear layers, heads, convolutions, and the pairs of
    /// positions that attention's causal mask leaves. A multiplication and an addition count as one each. Only a handle of
    /// [`Device::Meta`] counts them. Element-wise operations, norms and pooling are left out, as is usual.
    pub fn forward_flops(&self) -> u64 {
        lock(&self.rehearsal).forward_flops
    }

    /// The same for backward passes: the gradients of weights and of the inputs that were asked for, without what attention
    /// computes again.
    pub fn backward_flops(&self) -> u64 {
        lock(&self.rehearsal).backward_flops
    }

    /// The bytes of the operands that all operations so far have read and written, twice for an operand that is changed in
    /// place: what operations move if nothing stays in a cache. Scratch memory is left out. Only a handle of [`Device::Meta`]
    /// counts them.
    pub fn moved_bytes(&self) -> u64 {
        lock(&self.rehearsal).moved_bytes
    }

    /// The needs of all operations so far, if they ran on a card. Only a handle of [`Device::Meta`] notes them.
    pub fn card_needs(&self) -> CardNeeds {
        lock(&self.rehearsal).card_needs
    }

    /// Records each kernel on `kernels`, and the work of each thread of the pool on the track with its number.
    pub fn recorded(mut self, kernels: Arc<Track>, threads: Vec<Arc<Track>>) -> Self {
        self.track = Some(kernels);
        self.own_processor().threads.tracks = threads;
        self
    }

    /// The track on which this thread records what it computes, or rehearses. The stream of another device records its work itself.
    pub(crate) fn host_track(&self) -> Option<&Track> {
        let track = self.track.as_deref().filter(|track| track.is_on());
        track.filter(|_| self.allocator.home().is_none())
    }

    /// Times an operation from now until the returned value is dropped. `shapes` are those of what it reads.
    pub(crate) fn time(
        &self,
        name: &'static str,
        shapes: &dyn Fn() -> Shapes,
    ) -> Option<KernelTimer<'_>> {
        let track = self.host_track()?;
        Some(KernelTimer { track, name, shapes: shapes(), start_ns: now_ns() })
    }

    /// The same resources with different vector instructions. `None` if this processor does not have them.
    pub fn with_simd(mut self, simd: SimdLevel) -> Option<Self> {
        let is_there = SimdLevel::available().contains(&simd);
        self.own_processor().simd = simd;
        is_there.then_some(self)
    }

    /// The same resources with other instructions for products in bf16. `None` if this processor or [`Compute::simd`] does
    /// not have them. [`Compute::new`] chooses what is fastest on the processor.
    pub fn with_bf16_products(mut self, wanted: Bf16Products) -> Option<Self> {
        let can = self.simd() == SimdLevel::Avx512 && wanted.is_available();
        self.own_processor().bf16_products = wanted;
        (can || wanted == Bf16Products::Widened).then_some(self)
    }

    /// The processor, before any work is launched.
    fn own_processor(&mut self) -> &mut Processor {
        Arc::get_mut(&mut self.processor)
            .expect("queued work does not outlive the building of a handle")
    }

    /// Blocks until all work that was launched through this handle is done. Errors if work has failed on the device.
    pub fn synchronize(&self) -> Result<()> {
        // The processor runs work at once.
        let Some(stream) = self.allocator.home() else { return Ok(()) };
        let start_ns = now_ns();
        stream.synchronize()?;
        if let Some(track) = &self.track {
            track.record(Event::Synchronized { span: Span { start_ns, end_ns: now_ns() } });
        }
        Ok(())
    }

    /// How products in bf16 are computed.
    pub fn bf16_products(&self) -> Bf16Products {
        self.processor.bf16_products()
    }

    /// Which vector instructions fast paths use.
    pub fn simd(&self) -> SimdLevel {
        self.processor.simd
    }

    /// The instructions and threads of bodies, if the device is the processor.
    pub fn processor(&self) -> &Processor {
        &self.processor
    }

    /// The threads that share the work of an operation.
    pub fn threads(&self) -> &Threads {
        &self.processor.threads
    }
}

impl Processor {
    /// How products in bf16 are computed.
    pub fn bf16_products(&self) -> Bf16Products {
        if self.simd == SimdLevel::Avx512 { self.bf16_products } else { Bf16Products::Widened }
    }

    /// Which vector instructions fast paths use.
    pub fn simd(&self) -> SimdLevel {
        self.simd
    }

    /// The instructions for products of numbers of this type.
    pub(crate) fn ways(&self, dtype: DType) -> Ways {
        let tiles = match (dtype, self.bf16_products()) {
            #[cfg(test)]
            (DType::BF16, _) if crate::tiles::EMULATES.get() => {
                Some(crate::tiles::TilesOf::Emulated)
            }
            #[cfg(target_arch = "x86_64")]
            (DType::BF16, Bf16Products::Amx) => Some(crate::tiles::TilesOf::Processor),
            _ => None,
        };
        Ways { simd: self.simd, tiles, dtype }
    }
}

/// Records the operation when dropped.
#[must_use = "the kernel is timed until this is dropped"]
#[derive(Debug)]
pub(crate) struct KernelTimer<'a> {
    track: &'a Track,
    name: &'static str,
    shapes: Shapes,
    start_ns: u64,
}

impl Drop for KernelTimer<'_> {
    fn drop(&mut self) {
        let Self { track, name, shapes, start_ns } = *self;
        let (launched, span) = (Span::at(start_ns), Span { start_ns, end_ns: now_ns() });
        track.record(Event::Kernel { name, launched, span, shapes });
    }
}
