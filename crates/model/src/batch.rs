//! A batch as a model sees it: tensors with names.

use paceline_memory::{Allocator, Category, DType, DeviceStream, Event, Tensor};

use crate::Result;

/// The samples of one rank in one pass, as named tensors, such as inputs and targets. The first extent of each tensor
/// is the number of samples, which may be zero.
///
/// ```
/// use paceline_memory::{Allocator, Category, DType};
/// use paceline_model::Batch;
///
/// let memory = Allocator::new();
/// let inputs = memory.tensor(DType::F32, [64, 2], Category::Data)?;
/// let classes = memory.tensor(DType::I64, [64], Category::Data)?;
/// assert_eq!(Batch::new(inputs, classes).num_samples(), 64);
/// # Ok::<(), paceline_memory::MemoryError>(())
/// ```
#[derive(Clone, Debug)]
pub struct Batch {
    tensors: Vec<(&'static str, Tensor)>,
    /// The same tensors where the host can read them, if the batch lies on an accelerator.
    on_host: Option<Vec<(&'static str, Tensor)>>,
}

impl Batch {
    /// The name of the tensor that the first block takes.
    pub const INPUTS: &'static str = "inputs";
    /// The name of the tensor that most objectives compare the output with.
    pub const TARGETS: &'static str = "targets";

    /// The name of the tensor with the samples' lengths, i64 (n), if some are padded.
    pub const LENGTHS: &'static str = "lengths";

    /// A batch of inputs (n, ...) and targets: labels (n) or values (n, columns).
    pub fn new(inputs: Tensor, targets: Tensor) -> Self {
        Self::of(vec![(Self::INPUTS, inputs), (Self::TARGETS, targets)])
    }

    /// A batch of these tensors; the first block takes the first one. The host cannot look into those of an
    /// accelerator: all their targets count, and no sample is padded; otherwise use [`Batch::to_device`]. Panics without
    /// tensors.
    pub fn of(tensors: Vec<(&'static str, Tensor)>) -> Self {
        assert!(!tensors.is_empty(), "a batch has at least the tensor that the first block takes");
        Self { tensors, on_host: None }
    }

    /// The batch in the memory of a device, with the events of the copies. `stream` copies after all kernels so far. The
    /// tensors of the host stay, so that the host can still read, for example, the number of targets.
    pub fn to_device(
        self,
        memory: &Allocator,
        stream: &DeviceStream,
        copies: &mut Vec<Event>,
    ) -> Result<Self> {
        if memory.device() == self.inputs().device() {
            return Ok(self);
        }
        // The memory may have been used by kernels before.
        memory.home().into_iter().for_each(|home| stream.wait(&home.record()));
        let mut copy = |(name, tensor): &(&'static str, Tensor)| {
            let copied = memory.tensor(tensor.dtype(), tensor.shape(), Category::Data)?;
            copies.push(stream.copy(tensor, &copied)?);
            Ok((*name, copied))
        };
        let tensors = self.tensors.iter().map(&mut copy).collect::<Result<Vec<_>>>()?;
        Ok(Self { tensors, on_host: Some(self.tensors) })
    }

    /// The tensor of this name on the host. `None` in a batch that was made on an accelerator.
    pub fn on_host(&self, name: &str) -> Option<&Tensor> {
        let tensors = self.on_host.as_ref().unwrap_or(&self.tensors);
        let found = tensors.iter().find(|(own, _)| *own == name).map(|(_, tensor)| tensor);
        found.filter(|tensor| tensor.buffer().allocator().home().is_none())
    }

    /// The same batch with one more tensor, for example a mask.
    pub fn with(mut self, name: &'static str, tensor: Tensor) -> Self {
        self.tensors.push((name, tensor));
        self
    }

    /// The tensor of this name.
    pub fn get(&self, name: &str) -> Option<&Tensor> {
        self.tensors.iter().find(|(own, _)| *own == name).map(|(_, tensor)| tensor)
    }

    /// The tensor that the first block takes.
    pub fn inputs(&self) -> &Tensor {
        &self.tensors[0].1
    }

    /// All tensors, by name.
    pub fn tensors(&self) -> &[(&'static str, Tensor)] {
        &self.tensors
    }

    /// The number of tokens without padding: the sum of the lengths, or all inputs if there are none. Zero if the inputs are
    /// no integers. Errors if the memory is in use.
    pub fn num_tokens(&self) -> Result<usize> {
        let inputs = self.inputs();
        match self.on_host(Self::LENGTHS) {
            _ if inputs.dtype() != DType::I64 => Ok(0),
            Some(lengths) => Ok(lengths.read::<i64>()?.iter().sum::<i64>() as usize),
            None => Ok(inputs.num_elems()),
        }
    }

    /// The number of samples.
    pub fn num_samples(&self) -> usize {
        self.inputs().dims().first().copied().unwrap_or(0)
    }
}
