//! The operations on plain slices: each goes through a tensor that lives as long as the operation. If the operation fails, a
//! peer may still use the tensor's memory, so that memory stays claimed, and the slice is unchanged.

use paceline_memory::{Category, Element, Tensor};

use crate::{Group, OpTimes, ReduceElement, ReduceOp, Result};

type Outcome = Result<OpTimes>;

impl Group {
    /// Like [`Group::all_reduce`], for a slice.
    pub fn all_reduce_slice<T: ReduceElement>(&self, data: &mut [T], op: ReduceOp) -> Outcome {
        self.on_copy(data, |tensor| self.all_reduce(tensor, op))
    }

    /// Like [`Group::broadcast`], for a slice.
    pub fn broadcast_slice<T: Element>(&self, data: &mut [T], root: usize) -> Outcome {
        self.on_copy(data, |tensor| self.broadcast(tensor, root))
    }

    /// Like [`Group::all_gather`], for slices.
    pub fn all_gather_slice<T: Element>(&self, share: &[T], gathered: &mut [T]) -> Outcome {
        let share = self.copy_of(share)?;
        self.on_copy(gathered, |tensor| self.all_gather(&share, tensor))
    }

    /// Like [`Group::send`], for a slice.
    pub fn send_slice<T: Element>(&self, data: &[T], to: usize) -> Outcome {
        self.send(&self.copy_of(data)?, to)
    }

    /// Like [`Group::recv`], for a slice.
    pub fn recv_slice<T: Element>(&self, data: &mut [T], from: usize) -> Outcome {
        self.on_copy(data, |tensor| self.recv(tensor, from))
    }

    /// A tensor with the elements of a slice.
    pub(crate) fn copy_of<T: Element>(&self, data: &[T]) -> Result<Tensor> {
        let tensor = self.memory().tensor(T::DTYPE, [data.len()], Category::Communication)?;
        tensor.write()?.copy_from_slice(data);
        Ok(tensor)
    }

    /// Runs an operation on a copy of a slice, and copies the result back.
    fn on_copy<T: Element>(
        &self,
        data: &mut [T],
        operation: impl FnOnce(&Tensor) -> Outcome,
    ) -> Outcome {
        let tensor = self.copy_of(data)?;
        let times = operation(&tensor)?;
        data.copy_from_slice(&tensor.read()?);
        Ok(times)
    }
}
