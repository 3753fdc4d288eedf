//! Where a group comes from: its name, and the emulated network card that it shares with the groups it is
//! split from and with those split from it.

use std::sync::Arc;

use crate::emulator::Card;

/// A group's name, and the card of its rank.
#[derive(Clone, Debug)]
pub(crate) struct Origin {
    /// `world`, or `world/1.0` for the ranks of color 0 in its second split.
    pub(crate) name: String,
    /// The one network card of this rank. A group shares it with all groups that are split from it, so
    /// that their operations together move no more bytes than the link carries.
    pub(crate) card: Arc<Card>,
}

impl Origin {
    /// The origin of a group that is not split from another group.
    pub(crate) fn world() -> Self {
        Self { name: "world".into(), card: Arc::default() }
    }

    /// The origin of the sub-group of color `colour` in split number `split`.
    pub(super) fn sub_group(&self, split: u32, colour: i64) -> Self {
        Self { name: format!("{}/{split}.{colour}", self.name), card: self.card.clone() }
    }
}
