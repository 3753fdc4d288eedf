//! Bytes in and out of tensors: at once on the host, and as work of a stream on an accelerator.
//!
//! Input: tensors. Output: copies and fills. This module knows nothing of arithmetic.

use paceline_trace::{Place, Shapes, Span, now_ns};

use crate::queues::work::{CopyKind, SendPtr, WorkKind};
use crate::{
    Access, Body, Category, Device, DeviceStream, Element, Event, MemoryError, Result, Tensor,
};

impl Tensor {
    /// Copies the elements of `from`; the shapes may differ. If one of the two lies on an accelerator, the copy is work of
    /// the stream of its memory, and this returns before it is done. Errors if the types or the numbers of elements differ,
    /// or if either tensor is in use.
    pub fn copy_from(&self, from: &Tensor) -> Result<()> {
        if from.dtype() != self.dtype() {
            return Err(MemoryError::WrongType { expected: self.dtype(), got: from.dtype() });
        }
        let from = from.view(self.shape())?;
        if let Some(stream) = self.home().or(from.home()) {
            return stream.copy(&from, self).map(drop);
        }
        self.as_bytes().write::<u8>()?.copy_from_slice(&from.as_bytes().read::<u8>()?);
        Ok(())
    }

    /// Sets all elements to zero, which is represented by zero bytes in every type. On an accelerator this is work of the
    /// stream of its memory. Errors while the tensor is in use.
    pub fn fill_zero(&self) -> Result<()> {
        self.fill_bytes(0)
    }

    /// Sets all bytes to a value. With 0xFF, every floating-point number is NaN, so that nobody reads it unnoticed. Works
    /// and errors as [`Tensor::fill_zero`].
    pub fn fill_bytes(&self, value: u8) -> Result<()> {
        match self.home() {
            Some(stream) => stream.fill(self, value).map(drop),
            None => {
                self.as_bytes().write::<u8>()?.fill(value);
                Ok(())
            }
        }
    }

    /// The tensor where the host can read it: itself, or a copy from the accelerator after all work before.
    pub fn to_host(&self) -> Result<Tensor> {
        let Some((host, stream)) = self.staging()? else { return Ok(self.clone()) };
        stream.copy(self, &host)?.wait();
        stream.accelerator().check()?;
        Ok(host)
    }

    /// Overwrites all elements with values from the host: `fill` gets elements with unspecified values. They are copied
    /// to an accelerator as work of the stream of its memory. Returns what `fill` returns. Errors if the tensor has another
    /// type, or while it is in use.
    pub fn overwrite<T: Element, R>(&self, fill: impl FnOnce(&mut [T]) -> R) -> Result<R> {
        let Some((host, stream)) = self.staging()? else { return Ok(fill(&mut self.write()?)) };
        let filled = fill(&mut host.write()?);
        stream.copy(&host, self)?;
        Ok(filled)
    }

    /// The stream of the accelerator's memory in which the tensor lies.
    fn home(&self) -> Option<&DeviceStream> {
        self.buffer().allocator().home()
    }

    /// Memory of the host for a copy from or to this tensor of a device, and the stream of the copy.
    fn staging(&self) -> Result<Option<(Tensor, &DeviceStream)>> {
        let staging = self.buffer().allocator().staging();
        let staged = staging.map(|(memory, home)| {
            Ok((memory.tensor(self.dtype(), self.shape(), Category::Data)?, home))
        });
        staged.transpose()
    }
}

/// The kind of memory of a tensor, as copies know it.
fn place_of(tensor: &Tensor) -> Place {
    match tensor.device() {
        Device::Cpu if tensor.buffer().allocator().is_pinned() => Place::Pinned,
        Device::Cpu => Place::Pageable,
        Device::Meta | Device::Sim | Device::Cuda => Place::Device,
    }
}

impl DeviceStream {
    /// Copies a tensor into another one with the same number of bytes; at least one of them lies on this device. From or to
    /// memory of the host that is not pinned, it returns when the copy is done, as on a card.
    pub fn copy(&self, from: &Tensor, to: &Tensor) -> Result<Event> {
        if from.num_bytes() != to.num_bytes() || from.dtype() != to.dtype() {
            return Err(MemoryError::WrongShape { from: from.shape(), to: to.shape() });
        }
        let copy = CopyKind { places: (place_of(from), place_of(to)), bytes: from.num_bytes() };
        let kind = WorkKind::Copy(copy);
        let started_ns = now_ns();
        let event = self.submit(kind, |event| self.copy_body((from, to), copy, event))?;
        if copy.is_pageable() {
            event.wait();
            self.accelerator().check()?;
            let launched = Span { start_ns: started_ns, end_ns: now_ns() };
            if let (Some(track), Some(ran)) = (self.track(), event.ran()) {
                kind.record_on(track, launched, ran);
            }
        }
        Ok(event)
    }

    fn copy_body(
        &self,
        (from, to): (&Tensor, &Tensor),
        CopyKind { places, bytes }: CopyKind,
        event: &Event,
    ) -> Result<Body> {
        let source = SendPtr(from.queue(Access::Read, "copy", event)?.base().as_ptr());
        let target = SendPtr(to.queue(Access::Write, "copy", event)?.base().as_ptr());
        let Some(stream) = self.card().cloned() else {
            return Ok(Box::new(move || {
                // SAFETY: both ranges have this length. They are queued for this work, so they stay in place, nobody else
                // writes to them meanwhile, and they do not overlap, since one is read and one is written.
                unsafe { target.get().copy_from_nonoverlapping(source.get(), bytes) };
                Ok(())
            }));
        };
        Ok(Box::new(move || {
            // SAFETY: as above.
            let copied = unsafe {
                match (places.0 == Place::Device, places.1 == Place::Device) {
                    (false, _) => stream.copy_to_card(source.get(), target.on_card(), bytes),
                    (true, false) => stream.copy_to_host(source.on_card(), target.get(), bytes),
                    (true, true) => stream.copy_on_card(source.on_card(), target.on_card(), bytes),
                }
            };
            copied.map_err(|error| error.to_string())
        }))
    }

    /// Sets all bytes of a tensor of this device.
    pub fn fill(&self, tensor: &Tensor, value: u8) -> Result<Event> {
        self.launch("fill", Shapes::default(), |event| {
            let claim = tensor.queue(Access::Write, "fill", event)?;
            let (target, bytes) = (SendPtr(claim.base().as_ptr()), tensor.num_bytes());
            let stream = self.card().cloned();
            let body: Body = Box::new(move || {
                // SAFETY: the range has this length, and is queued for this work.
                unsafe {
                    match &stream {
                        Some(stream) => stream.fill(target.on_card(), value, bytes),
                        None => {
                            target.get().write_bytes(value, bytes);
                            Ok(())
                        }
                    }
                }
                .map_err(|error| error.to_string())
            });
            Ok(body)
        })
    }
}

#[cfg(test)]
mod tests;
