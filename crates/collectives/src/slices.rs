//! The operations on plain slices: each goes through a tensor that lives as long as the operation. If the operation fails, a
//! peer may still use the tensor's memory, so that memory stays claimed, and the slice is unchanged.
//!
//! They copy the data. For large data, use tensors in memory from [`Group::allocate`].

use paceline_memory::{Category, Element, Tensor};

use crate::{Group, OpTimes, ReduceElement, ReduceOp, Result};

type Outcome = Result<OpTimes>;

impl Group {
    /// Like [`Group::all_reduce`], for a slice, which is copied.
    pub fn all_reduce_slice<T: ReduceElement>(&self, data: &mut [T], op: ReduceOp) -> Outcome {
        copy_back(self.copy_of(data)?, data, |tensor| self.all_reduce(tensor, op))
    }

    /// Like [`Group::broadcast`], for a slice, which is copied.
    pub fn broadcast_slice<T: Element>(&self, data: &mut [T], root: usize) -> Outcome {
        copy_back(self.copy_of(data)?, data, |tensor| self.broadcast(tensor, root))
    }

    /// Like [`Group::all_gather`], for slices, which are copied.
    pub fn all_gather_slice<T: Element>(&self, share: &[T], gathered: &mut [T]) -> Outcome {
        let share = self.copy_of(share)?;
        copy_back(self.room_for::<T>(gathered.len())?, gathered, |tensor| {
            self.all_gather(&share, tensor)
        })
    }

    /// Like [`Group::send`], for a slice, which is copied.
    pub fn send_slice<T: Element>(&self, data: &[T], to: usize) -> Outcome {
        self.send(&self.copy_of(data)?, to)
    }

    /// Like [`Group::recv`], for a slice, which is copied.
    pub fn recv_slice<T: Element>(&self, data: &mut [T], from: usize) -> Outcome {
        copy_back(self.room_for::<T>(data.len())?, data, |tensor| self.recv(tensor, from))
    }

    /// A tensor with the elements of a slice.
    pub(crate) fn copy_of<T: Element>(&self, data: &[T]) -> Result<Tensor> {
        let tensor = self.room_for::<T>(data.len())?;
        tensor.write()?.copy_from_slice(data);
        Ok(tensor)
    }

    /// A tensor for the elements of a slice.
    fn room_for<T: Element>(&self, len: usize) -> Result<Tensor> {
        Ok(self.memory().tensor(T::DTYPE, [len], Category::Communication)?)
    }
}

/// Runs an operation on a tensor, and copies the result to a slice.
fn copy_back<T: Element>(
    tensor: Tensor,
    data: &mut [T],
    operation: impl FnOnce(&Tensor) -> Outcome,
) -> Outcome {
    let times = operation(&tensor)?;
    data.copy_from_slice(&tensor.read()?);
    Ok(times)
}
