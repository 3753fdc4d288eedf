//! Brings batches to the device that computes.
//!
//! The stream of the device's kernels comes after the copies. Pinned memory, which the loader fills, makes copies faster; for
//! non-blocking copies the host does not wait; and in a stream of their own, the copies of the next batch run beside this step. On
//! the processor, batches stay where they are.

use paceline_data::Batch;
use paceline_failure::Result;
use paceline_memory::{Allocator, DeviceStream, Event};
use paceline_settings::flags::CopyFlags;
use paceline_strategies::MicroBatch;

use crate::batches::share_of;

/// The batches that the loader has made for a step.
#[derive(Debug)]
pub struct Loaded {
    /// The batches of the step; `None` if they are on the device already.
    pub now: Option<Vec<Option<Batch>>>,
    /// The batches of the next step, if they are to be brought meanwhile.
    pub next: Option<Vec<Option<Batch>>>,
}

/// The batches of a step on the device.
#[derive(Debug, Default)]
pub struct Brought {
    /// The batches.
    pub batches: Vec<Option<MicroBatch>>,
    /// Their copies.
    pub copies: Vec<Event>,
}

/// Brings batches to the device.
#[derive(Debug)]
pub struct ToDevice {
    memory: Allocator,
    /// The streams of copies and of kernels, if there is a device to copy to.
    streams: Option<(DeviceStream, DeviceStream)>,
    is_non_blocking: bool,
    looks_ahead: bool,
    next: Option<Brought>,
}

impl ToDevice {
    /// To `memory`. Errors if the system refuses a thread for a stream.
    pub fn new(memory: &Allocator, copies: CopyFlags) -> Result<Self> {
        let streams = match memory.home() {
            Some(home) if copies.copy_stream => {
                Some((home.accelerator().stream("copy")?, home.clone()))
            }
            Some(home) => Some((home.clone(), home.clone())),
            None => None,
        };
        let CopyFlags { non_blocking: is_non_blocking, copy_stream: own_stream, .. } = copies;
        let looks_ahead = own_stream && streams.is_some();
        Ok(Self { memory: memory.clone(), streams, is_non_blocking, looks_ahead, next: None })
    }

    /// Whether the batches of the next step are to be brought during this one.
    pub fn looks_ahead(&self) -> bool {
        self.looks_ahead
    }

    /// Whether the batches of the next step are on their way already.
    pub fn has_next(&self) -> bool {
        self.next.is_some()
    }

    /// Brings the batches of this step, and begins to bring those of the next one.
    pub fn bring(&mut self, Loaded { now, next }: Loaded) -> Result<Brought> {
        let brought = match (self.next.take(), now) {
            (Some(brought), _) => brought,
            (None, now) => self.copy(now.unwrap_or_default())?,
        };
        if let Some((copies, kernels)) = &self.streams
            && copies.stream() != kernels.stream()
        {
            brought.copies.iter().for_each(|copied| kernels.wait(copied));
        }
        self.next = next.map(|next| self.copy(next)).transpose()?;
        Ok(brought)
    }

    /// Puts the copies of batches into their stream, and waits for them if the host does.
    fn copy(&self, batches: Vec<Option<Batch>>) -> Result<Brought> {
        let mut copies = Vec::new();
        let shares = batches.into_iter().map(|batch| {
            let Some(MicroBatch { batch, global_count }) = batch.map(share_of) else {
                return Ok(None);
            };
            let batch = match &self.streams {
                Some((stream, _)) => batch.to_device(&self.memory, stream, &mut copies)?,
                None => batch,
            };
            Ok(Some(MicroBatch { batch, global_count }))
        });
        let batches = shares.collect::<Result<Vec<_>>>()?;
        if !self.is_non_blocking {
            // The next work returns a failure.
            copies.iter().for_each(|copied| {
                copied.wait();
            });
        }
        Ok(Brought { batches, copies })
    }
}

#[cfg(test)]
mod tests {
    use paceline_data::Position;
    use paceline_memory::{Accelerator, Category, DType, SimSpec};

    use super::*;

    #[test]
    fn kernels_wait_for_copies_on_another_stream_of_the_same_name() {
        let home = Accelerator::sim(SimSpec::late(0)).stream("copy").unwrap();
        let memory = Allocator::on(&home);
        let copies = CopyFlags { non_blocking: true, copy_stream: true, ..CopyFlags::default() };
        let mut to_device = ToDevice::new(&memory, copies).unwrap();
        let host = Allocator::pinned(home.accelerator());
        let inputs = host.tensor(DType::F32, [4], Category::Data).unwrap();
        inputs.write::<f32>().unwrap().fill(3.0);
        let tensors = vec![("inputs", inputs)];
        let batch = Batch { position: Position::default(), tensors, global_count: 4 };
        let brought = to_device.bring(Loaded { now: Some(vec![Some(batch)]), next: None }).unwrap();
        let inputs = brought.batches[0].as_ref().unwrap().batch.inputs().clone();
        assert_eq!(inputs.to_host().unwrap().read::<f32>().unwrap().to_vec(), [3.0; 4]);
    }
}
