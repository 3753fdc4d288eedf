//! The connection to a neighbor on an axis: a queue for each direction.
//!
//! A group executes its operations one after the other, so a receive that waits would delay a message to another
//! rank. Therefore each direction between two neighbors is a group of two ranks with a queue of its own. No message
//! waits for a message to or from another rank, or for a message in the other direction.
//!
//! Input: tensors. Output: the times of the messages. This module knows nothing of meshes.

use paceline_memory::Tensor;

use crate::{CollectiveError, Group, OpTimes, Work};

/// The connection of this rank to a neighbor on an axis.
///
/// Messages to the neighbor arrive in the order in which they are sent. They wait neither for messages from this neighbor
/// nor for messages to or from the other neighbor.
#[derive(Debug)]
pub struct Neighbor {
    coordinate: usize,
    to: Group,
    from: Group,
}

impl Neighbor {
    /// Both groups consist of this rank and the neighbor. Messages to the neighbor go through `to`, messages from the
    /// neighbor through `from`.
    pub(super) fn new(coordinate: usize, to: Group, from: Group) -> Self {
        Self { coordinate, to, from }
    }

    /// The neighbor's place on the axis.
    pub fn coordinate(&self) -> usize {
        self.coordinate
    }

    /// The neighbor's number in the group from which the mesh was made.
    pub fn rank(&self) -> usize {
        self.to.outermost_rank(peer(&self.to))
    }

    /// Sends `data` to the neighbor, which receives a tensor of the same type and length. Steps, bytes and errors
    /// are those of [`Group::send`].
    pub fn send(&self, data: &Tensor) -> Result<OpTimes, CollectiveError> {
        self.to.send(data, peer(&self.to))
    }

    /// Like [`Neighbor::send`], in the background.
    pub fn send_async(&self, data: &Tensor) -> Result<Work, CollectiveError> {
        self.to.send_async(data, peer(&self.to))
    }

    /// Receives `data` from the neighbor. Steps, bytes and errors are those of [`Group::recv`].
    pub fn recv(&self, data: &Tensor) -> Result<OpTimes, CollectiveError> {
        self.from.recv(data, peer(&self.from))
    }

    /// Like [`Neighbor::recv`], in the background.
    pub fn recv_async(&self, data: &Tensor) -> Result<Work, CollectiveError> {
        self.from.recv_async(data, peer(&self.from))
    }

    /// The groups for messages to and from the neighbor.
    #[cfg(all(test, not(loom)))]
    pub(super) fn groups(&self) -> [&Group; 2] {
        [&self.to, &self.from]
    }
}

/// The other rank of a group of two.
fn peer(group: &Group) -> usize {
    1 - group.rank()
}
