//! Operations on the memory of an accelerator: through memory of the host.
//!
//! The data that an operation reads are copied to the host after all earlier work of the memory's stream. The operation runs
//! there, and its result is copied back. Each of the three waits for the one before it, and nobody else waits, so a bucket travels
//! while the next one is computed. Copies back have a stream of their own: they wait for operations, and would hold up the
//! copies of later operations to the host. This module knows nothing of operations.

use paceline_memory::{Access, Allocator, Category, DeviceStream, Event, MemoryError, Tensor};

/// The streams of a group's copies.
#[derive(Debug)]
pub(crate) struct Staging {
    host: Allocator,
    from_device: DeviceStream,
    to_device: DeviceStream,
}

/// Memory that an operation uses after work of a device: a copy on the host, or the device's own memory.
#[derive(Clone, Debug)]
pub(crate) struct DeviceOperand {
    pub(crate) memory: Tensor,
    pub(crate) access: Access,
    /// The operation begins after this event: the end of the copy to the host, or of all work so far.
    pub(crate) ready: Event,
}

/// The operands of an operation on memory of a device, and the result that is copied back.
#[derive(Debug, Default)]
pub(crate) struct Staged {
    pub(crate) operands: Vec<DeviceOperand>,
    result: Option<StagedResult>,
}

/// The result of an operation on the host, and the memory of the device to which a stream copies it.
#[derive(Debug)]
struct StagedResult {
    host: Tensor,
    device: Tensor,
    to_device: DeviceStream,
}

impl Staging {
    /// The streams for a device. `home` is a stream of the device.
    pub(crate) fn new(home: &DeviceStream) -> Result<Self, MemoryError> {
        let stream = |name| home.accelerator().stream(name);
        let (from_device, to_device) = (stream("from device")?, stream("to device")?);
        Ok(Self { host: Allocator::pinned(home.accelerator()), from_device, to_device })
    }

    /// Memory of the host for the contents of `tensor`, which are copied there if they are read, and will be copied back if
    /// they are written.
    pub(crate) fn stage(
        &self,
        tensor: &Tensor,
        (is_read, is_written): (bool, bool),
        staged: &mut Staged,
    ) -> Result<Tensor, MemoryError> {
        let host = self.host.tensor(tensor.dtype(), tensor.shape(), Category::Communication)?;
        let mut ready = Event::complete();
        if is_read {
            let home = tensor.buffer().allocator().home().expect("memory of a device");
            self.from_device.wait(&home.record());
            // Earlier results may still be on their way back there.
            self.from_device.wait(&self.to_device.record());
            ready = self.from_device.copy(tensor, &host)?;
        }
        staged.operands.push(DeviceOperand { memory: host.clone(), access: Access::Write, ready });
        if is_written {
            let (host, device) = (host.clone(), tensor.clone());
            staged.result = Some(StagedResult { host, device, to_device: self.to_device.clone() });
        }
        Ok(host)
    }
}

impl Staged {
    /// Copies the result back once the operation is done. Returns the event of the copy's end, or `done` if there is no result.
    pub(crate) fn copy_back(&self, done: &Event) -> Result<Event, MemoryError> {
        let Some(StagedResult { host, device, to_device }) = &self.result else {
            return Ok(done.clone());
        };
        let home = device.buffer().allocator().home().expect("memory of a device");
        to_device.wait(&home.record());
        to_device.wait(done);
        to_device.copy(host, device)
    }
}
