//! The order in which gradients are communicated: the same on every rank.
//!
//! Ranks must call the same operations in the same order. But on a rank whose step leaves out a layer,
//! gradients become final in a different order. So strategies that communicate each parameter separately
//! go from the last parameter to the first. Gradients usually become final in this order.

use paceline_model::{Layout, ParamId};

/// Parameters that are ready, given out from the last registered to the first.
#[derive(Debug, Default)]
pub(crate) struct InOrder {
    /// The trained parameters, last to first.
    ids: Vec<ParamId>,
    /// Whether a parameter is ready, by its number.
    is_ready: Vec<bool>,
    next: usize,
}

impl InOrder {
    pub(crate) fn new(layout: &Layout) -> Self {
        let ids = layout.trained().rev().map(|(id, _)| id).collect();
        Self { ids, is_ready: vec![false; layout.params().len()], next: 0 }
    }

    pub(crate) fn ready(&mut self, id: ParamId) {
        self.is_ready[id.0] = true;
    }

    /// The next parameter in order, if it is ready.
    pub(crate) fn pop(&mut self) -> Option<ParamId> {
        let id = *self.ids.get(self.next)?;
        self.is_ready[id.0].then(|| {
            self.next += 1;
            id
        })
    }

    /// Ends a step: all parameters have been given out.
    pub(crate) fn finish(&self) {
        debug_assert_eq!(self.next, self.ids.len(), "a step announces every gradient");
    }

    /// Begins a new step, also after one that has failed.
    pub(crate) fn restart(&mut self) {
        self.is_ready.fill(false);
        self.next = 0;
    }
}

#[cfg(test)]
mod tests {
    use paceline_model::{Init, LayoutBuilder};

    use super::*;

    #[test]
    fn the_order_is_from_last_to_first_whatever_comes() {
        let mut builder = LayoutBuilder::new();
        let mut unit = builder.unit("a");
        for _ in 0..4 {
            unit.param("weight", [1], Init::Constant(0.0));
        }
        let mut order = InOrder::new(&builder.finish(1));
        let mut announce = |at| {
            order.ready(ParamId(at));
            std::iter::from_fn(|| order.pop()).map(|id| id.0).collect::<Vec<_>>()
        };
        assert_eq!([announce(3), announce(0), announce(1)], [vec![3], vec![], vec![]]);
        assert_eq!(announce(2), [2, 1, 0]);
        order.finish();
        order.restart();
        assert_eq!(order.pop(), None);
    }
}
