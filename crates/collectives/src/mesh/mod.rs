//! Ranks in a grid with named axes, and a group for each axis.
//!
//! On each axis, a rank is in a group with the ranks that differ from it in their place on this axis only. These
//! groups share the rank's emulated network card and its record of operations. An error in one does
//! not affect the others.
//!
//! Input: a group and the sizes of the axes. Output: the groups of this rank.
//! This module does not know what the ranks along an axis do.

mod shape;
#[cfg(all(test, not(loom)))]
mod tests;

use paceline_memory::{Allocator, Buffer, Category};

pub use shape::{Axis, MeshError, MeshShape};

use crate::{Group, Result};

/// One rank's place in a grid of ranks, and its groups.
///
/// ```
/// use paceline_collectives::{Axis, Group, Mesh, MeshShape, ReduceOp};
///
/// let shape: MeshShape = "dp=2,shard=2".parse()?;
/// let sums: Vec<i64> = std::thread::scope(|scope| {
///     let ranks = Group::threads(4).into_iter().map(|world| {
///         let shape = &shape;
///         scope.spawn(move || {
///             let mesh = Mesh::new(world, shape).unwrap();
///             let mut sum = [mesh.world().rank() as i64];
///             mesh.group(Axis::Shard).unwrap().all_reduce_slice(&mut sum, ReduceOp::Sum).unwrap();
///             sum[0]
///         })
///     });
///     ranks.collect::<Vec<_>>().into_iter().map(|rank| rank.join().unwrap()).collect()
/// });
/// // The last axis varies fastest: ranks 0 and 1 form a group, and ranks 2 and 3.
/// assert_eq!(sums, [1, 1, 5, 5]);
/// # Ok::<(), paceline_collectives::MeshError>(())
/// ```
#[derive(Debug)]
pub struct Mesh {
    world: Group,
    shape: MeshShape,
    /// The group of each axis of the shape.
    groups: Vec<Group>,
}

impl Mesh {
    /// Arranges the ranks of `world` in a grid and forms the groups of its axes. A collective call: every rank passes the
    /// same shape.
    ///
    /// Steps: one [`Group::split`] for each axis. The group of an axis with all ranks is `world` itself, and that of an
    /// axis with one rank is formed without a message. So a mesh with a single axis costs nothing.
    ///
    /// Errors if the sizes do not multiply to the number of ranks, and with the errors of [`Group::split`].
    pub fn new(world: Group, shape: &MeshShape) -> Result<Self> {
        shape.check(world.world_size())?;
        let rank = world.rank();
        let mut groups = Vec::new();
        for &(axis, size) in shape.axes() {
            let stride = shape.stride(axis);
            // Numbers the groups of the axis: the rank without its place on the axis.
            let color = rank / (stride * size) * stride + rank % stride;
            groups.push(if size == world.world_size() {
                world.clone()
            } else if size == 1 {
                world.only_self(axis.name(), color)?
            } else {
                let group = world.split_as(Some(color as u32), Some(axis.name()))?;
                group.expect("a rank that passes a color gets a group")
            });
        }
        Ok(Self { world, shape: shape.clone(), groups })
    }

    /// The mesh with only the axis [`Axis::Dp`], along which all ranks lie. Costs nothing.
    pub fn replicas(world: Group) -> Self {
        let shape = MeshShape::replicas(world.world_size());
        Self { groups: vec![world.clone()], world, shape }
    }

    /// The group of all ranks.
    pub fn world(&self) -> &Group {
        &self.world
    }

    /// The axes and their sizes.
    pub fn shape(&self) -> &MeshShape {
        &self.shape
    }

    /// This rank's place on an axis. 0 if the mesh does not have the axis.
    pub fn coordinate(&self, axis: Axis) -> usize {
        self.shape.coordinate(axis, self.world.rank())
    }

    /// The group of the ranks that differ from this rank in their place on `axis` only, ordered by that place. `None` if
    /// the mesh does not have the axis.
    pub fn group(&self, axis: Axis) -> Option<&Group> {
        let place = self.shape.axes().iter().position(|(own, _)| *own == axis)?;
        self.groups.get(place)
    }

    /// Allocates zeroed memory on every rank, which the groups of all axes use in place. A collective call of all ranks,
    /// with the steps and errors of [`Group::allocate`].
    pub fn allocate(
        &self,
        allocator: &Allocator,
        len_bytes: usize,
        category: Category,
    ) -> Result<Buffer> {
        self.world.allocate(allocator, len_bytes, category)
    }
}

impl From<Group> for Mesh {
    fn from(world: Group) -> Self {
        Self::replicas(world)
    }
}
