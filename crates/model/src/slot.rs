//! A slot: memory in which one unit at a time is open.

use paceline_memory::{Allocator, Category, Tensor};

use crate::{Layout, Precision, Result, UnitId, View};

/// Memory for any one unit, for strategies that do not hold all parameters at once. A strategy fills the slot with a
/// unit's values before the unit is used, and frees the slot afterwards.
///
/// In builds with debug assertions, a free slot holds poison: not-a-number everywhere. So a layer that uses a unit after
/// its slot was freed computes not-a-number, and not something that looks right.
#[derive(Debug)]
pub struct Slot {
    values: Tensor,
    grads: Tensor,
}

impl Slot {
    /// A free slot with room for the largest unit: for its values in the compute type, and for its gradients.
    pub fn new(layout: &Layout, precision: Precision, allocator: &Allocator) -> Result<Self> {
        let len = layout.units().iter().map(|unit| unit.range.len()).max().unwrap_or(0);
        let values = allocator.tensor(precision.compute, [len], Category::Unsharded)?;
        let grads = allocator.tensor(precision.grads, [len], Category::Unsharded)?;
        let slot = Self { values, grads };
        slot.free()?;
        Ok(slot)
    }

    /// The memory for the values of a unit, with its padding.
    pub fn values(&self, layout: &Layout, unit: UnitId) -> Result<Tensor> {
        Ok(self.values.slice(0..layout.unit(unit).range.len())?)
    }

    /// The memory for the gradients of a unit, with its padding.
    pub fn grads(&self, layout: &Layout, unit: UnitId) -> Result<Tensor> {
        Ok(self.grads.slice(0..layout.unit(unit).range.len())?)
    }

    /// A view of a unit whose values the caller has put into [`Slot::values`]. Its gradients start anew.
    pub fn view(&self, layout: &Layout, unit: UnitId) -> Result<View> {
        View::of_unit(layout, unit, &self.values, Some(&self.grads))
    }

    /// Frees the slot: its contents are no longer needed.
    pub fn free(&self) -> Result<()> {
        if cfg!(debug_assertions) {
            for tensor in [&self.values, &self.grads] {
                // All bits set is not-a-number in every floating-point type.
                tensor.as_bytes().write::<u8>()?.fill(0xFF);
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use paceline_memory::DType;

    use super::*;
    use crate::{Init, LayoutBuilder};

    #[test]
    fn a_free_slot_holds_poison() {
        let mut builder = LayoutBuilder::new();
        let unit = builder.unit("a");
        builder.param("weight", [20], Init::Constant(1.0));
        let layout = builder.finish(1);
        for dtype in [DType::F32, DType::F64] {
            let slot = Slot::new(&layout, dtype.into(), &Allocator::new()).unwrap();
            let is_poison = |tensor: Tensor| !crate::storage::is_finite(&tensor).unwrap();
            let both = || [slot.values(&layout, unit).unwrap(), slot.grads(&layout, unit).unwrap()];
            assert!(both().into_iter().all(is_poison), "{dtype}");
            both().iter().for_each(|tensor| tensor.fill_zero().unwrap());
            slot.free().unwrap();
            assert!(both().into_iter().all(is_poison), "{dtype}");
        }
    }
}
