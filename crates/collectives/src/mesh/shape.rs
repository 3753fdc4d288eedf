//! The axes of a mesh and their sizes, before there are any ranks.
//!
//! Input: words such as `dp=2,shard=4`. Output: a checked list of axes. This module knows nothing of groups.

use std::fmt::{self, Display, Formatter};
use std::str::FromStr;

use serde::{Serialize, Serializer};

/// An axis of a mesh, named after the way in which the ranks along it divide the work.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Axis {
    /// Data parallelism: the ranks hold replicas, and each has its own samples.
    Dp,
    /// Sharding: each rank holds a part of parameters, gradients or optimizer state.
    Shard,
    /// Pipeline parallelism: each rank holds a stage of the model. Neighbors exchange messages.
    Pp,
    /// Tensor parallelism: each rank computes a part of a layer.
    Tp,
}

impl Axis {
    /// All axes.
    pub const ALL: [Axis; 4] = [Axis::Dp, Axis::Shard, Axis::Pp, Axis::Tp];

    /// The name used on the command line, in errors and in reports.
    pub fn name(self) -> &'static str {
        match self {
            Axis::Dp => "dp",
            Axis::Shard => "shard",
            Axis::Pp => "pp",
            Axis::Tp => "tp",
        }
    }
}

impl Display for Axis {
    fn fmt(&self, f: &mut Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

impl FromStr for Axis {
    type Err = MeshError;

    fn from_str(text: &str) -> Result<Self, MeshError> {
        let found = Axis::ALL.into_iter().find(|axis| axis.name() == text);
        found.ok_or_else(|| MeshError::UnknownAxis(text.into()))
    }
}

/// A mistake in the axes of a mesh.
#[derive(Clone, PartialEq, Eq, thiserror::Error)]
pub enum MeshError {
    /// An axis that does not exist.
    #[error("{0:?} is no axis of a mesh; the axes are dp, shard, pp and tp")]
    UnknownAxis(String),
    /// An axis is named twice.
    #[error("the axis {0} is there twice; name each axis once")]
    AxisTwice(Axis),
    /// The size of an axis is not a number of at least 1.
    #[error("the size of the axis {axis} is {size:?}; it must be a number of at least 1")]
    Size {
        /// The axis.
        axis: Axis,
        /// Its size, as it was stated.
        size: String,
    },
    /// A word that does not have the form `axis=size`.
    #[error("{0:?} is no axis with a size, such as dp=2")]
    Form(String),
    /// The sizes of the axes do not multiply to the number of ranks.
    #[error("the mesh {shape} has {}, but the group has {world_size}", .shape.describe_ranks())]
    Ranks {
        /// The mesh.
        shape: MeshShape,
        /// The number of ranks.
        world_size: usize,
    },
}

impl fmt::Debug for MeshError {
    /// The message, because `main` and `unwrap` print this form.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

/// The axes of a mesh and their sizes. The last axis varies fastest, as in PyTorch's `DeviceMesh`: ranks 0 and 1 are
/// neighbors on the last axis.
///
/// ```
/// use paceline_collectives::{Axis, MeshShape};
///
/// let shape: MeshShape = "dp=2,shard=4".parse()?;
/// assert_eq!(shape.size(Axis::Shard), 4);
/// assert_eq!(shape.coordinate(Axis::Dp, 5), 1);
/// # Ok::<(), paceline_collectives::MeshError>(())
/// ```
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct MeshShape {
    axes: Vec<(Axis, usize)>,
}

impl MeshShape {
    /// A mesh with these axes. Errors if an axis is named twice or has no ranks.
    pub fn new(axes: &[(Axis, usize)]) -> Result<Self, MeshError> {
        for (place, &(axis, size)) in axes.iter().enumerate() {
            if axes[..place].iter().any(|(earlier, _)| *earlier == axis) {
                return Err(MeshError::AxisTwice(axis));
            }
            if size == 0 {
                return Err(MeshError::Size { axis, size: "0".into() });
            }
        }
        Ok(Self { axes: axes.to_vec() })
    }

    /// The mesh with only the axis `dp`.
    pub fn replicas(world_size: usize) -> Self {
        Self { axes: vec![(Axis::Dp, world_size)] }
    }

    /// The axes and their sizes, in order.
    pub fn axes(&self) -> &[(Axis, usize)] {
        &self.axes
    }

    /// The number of parts of a model, of which each rank has one: stages of a pipeline, and parts of layers.
    pub fn num_parts(&self) -> usize {
        self.size(Axis::Pp) * self.size(Axis::Tp)
    }

    /// The ranks that have the same part of a model as `rank`: their mesh, and the place of `rank` among them.
    pub fn of_part(&self, rank: usize) -> (Self, usize) {
        let part = |rank| [Axis::Pp, Axis::Tp].map(|axis| self.coordinate(axis, rank));
        let before = (0..rank).filter(|other| part(*other) == part(rank)).count();
        (self.without(Axis::Pp).without(Axis::Tp), before)
    }

    /// The mesh without an axis; with only the axis `dp` of one rank if no axis is left.
    pub fn without(&self, axis: Axis) -> Self {
        let axes: Vec<_> = self.axes.iter().filter(|(own, _)| *own != axis).copied().collect();
        if axes.is_empty() { Self::replicas(1) } else { Self { axes } }
    }

    /// The size of an axis. 1 if the mesh does not have the axis.
    pub fn size(&self, axis: Axis) -> usize {
        self.axes.iter().find(|(own, _)| *own == axis).map_or(1, |(_, size)| *size)
    }

    /// The place of `rank` on an axis. 0 if the mesh does not have the axis.
    pub fn coordinate(&self, axis: Axis, rank: usize) -> usize {
        rank / self.stride(axis) % self.size(axis)
    }

    /// The ranks that differ from `rank` in their place on an axis only, in the order of that place. `rank` is one of them.
    pub fn along(&self, axis: Axis, rank: usize) -> Vec<usize> {
        let stride = self.stride(axis);
        let first = rank - self.coordinate(axis, rank) * stride;
        (0..self.size(axis)).map(|place| first + place * stride).collect()
    }

    /// The distance between the numbers of two neighbors on an axis.
    pub(super) fn stride(&self, axis: Axis) -> usize {
        let after = self.axes.iter().rev().take_while(|(own, _)| *own != axis);
        after.map(|(_, size)| size).product()
    }

    /// Errors if the sizes do not multiply to the number of ranks.
    pub fn check(&self, world_size: usize) -> Result<(), MeshError> {
        if self.num_ranks() == Some(world_size) {
            return Ok(());
        }
        Err(MeshError::Ranks { shape: self.clone(), world_size })
    }

    /// The product of the sizes. `None` if it overflows.
    pub fn num_ranks(&self) -> Option<usize> {
        self.axes.iter().try_fold(1usize, |product, (_, size)| product.checked_mul(*size))
    }

    fn describe_ranks(&self) -> String {
        match self.num_ranks() {
            Some(1) => "1 rank".into(),
            Some(product) => format!("{product} ranks"),
            None => "too many ranks".into(),
        }
    }
}

impl Display for MeshShape {
    fn fmt(&self, f: &mut Formatter<'_>) -> fmt::Result {
        for (place, (axis, size)) in self.axes.iter().enumerate() {
            let comma = if place == 0 { "" } else { "," };
            write!(f, "{comma}{axis}={size}")?;
        }
        Ok(())
    }
}

/// As text: `dp=2,shard=2`.
impl Serialize for MeshShape {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(self)
    }
}

impl FromStr for MeshShape {
    type Err = MeshError;

    fn from_str(text: &str) -> Result<Self, MeshError> {
        let entry = |word: &str| {
            let (axis, size) = word.split_once('=').ok_or_else(|| MeshError::Form(word.into()))?;
            let axis: Axis = axis.trim().parse()?;
            let wrong = |_| MeshError::Size { axis, size: size.trim().into() };
            Ok((axis, size.trim().parse().map_err(wrong)?))
        };
        let axes = text.split(',').map(|word| entry(word.trim())).collect::<Result<Vec<_>, _>>()?;
        Self::new(&axes)
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    #[test]
    fn the_last_axis_varies_fastest() {
        let shape: MeshShape = " dp=2, shard=3 ,tp=2".parse().unwrap();
        assert_eq!(shape.to_string(), "dp=2,shard=3,tp=2");
        assert_eq!(shape.num_ranks(), Some(12));
        let place =
            |rank| [Axis::Dp, Axis::Shard, Axis::Tp].map(|axis| shape.coordinate(axis, rank));
        assert_eq!(place(0), [0, 0, 0]);
        assert_eq!(place(1), [0, 0, 1]);
        assert_eq!(place(2), [0, 1, 0]);
        assert_eq!(place(7), [1, 0, 1]);
        assert_eq!(place(11), [1, 2, 1]);
        assert_eq!((shape.size(Axis::Pp), shape.coordinate(Axis::Pp, 7)), (1, 0));
        assert_eq!(shape.along(Axis::Shard, 9), [7, 9, 11]);
        assert_eq!(shape.along(Axis::Dp, 9), [3, 9]);
        assert_eq!(shape.along(Axis::Pp, 9), [9]);
    }

    #[test]
    fn what_is_wrong_is_named() {
        let error = |text: &str| text.parse::<MeshShape>().unwrap_err().to_string();
        assert_eq!(error("dp=2,dp=2"), "the axis dp is there twice; name each axis once");
        let unknown = r#""ep" is no axis of a mesh; the axes are dp, shard, pp and tp"#;
        assert_eq!(error("ep=2"), unknown);
        let size = |stated: &str| {
            format!("the size of the axis tp is {stated:?}; it must be a number of at least 1")
        };
        for stated in ["0", "-1", "two", "", "99999999999999999999999"] {
            assert_eq!(error(&format!("dp=1,tp={stated}")), size(stated));
        }
        assert_eq!(error("dp"), r#""dp" is no axis with a size, such as dp=2"#);
        assert_eq!(error("dp=2,"), r#""" is no axis with a size, such as dp=2"#);
        let shape = MeshShape::new(&[(Axis::Dp, 2), (Axis::Pp, 3)]).unwrap();
        assert_eq!(shape.check(6), Ok(()));
        let error = shape.check(4).unwrap_err().to_string();
        assert_eq!(error, "the mesh dp=2,pp=3 has 6 ranks, but the group has 4");
        let huge = MeshShape::new(&[(Axis::Dp, usize::MAX), (Axis::Pp, 2)]).unwrap();
        assert!(huge.check(0).unwrap_err().to_string().contains("has too many ranks"));
    }
}
