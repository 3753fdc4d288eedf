//! Memory as queues know it: work keeps it in place, and captured work uses it again at each replay.

use std::fmt::Debug;
use std::ops::Range;
use std::sync::Arc;

use super::event::Event;
use crate::Result;

/// How a claimed range will be used. Reads may share a range; a write excludes everything else.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Access {
    /// The contents do not change.
    Read,
    /// The contents change.
    Write,
}

impl Access {
    pub(crate) fn excludes(self, other: Self) -> bool {
        self == Self::Write || other == Self::Write
    }
}

/// Memory that queued work uses.
pub(crate) trait UsedMemory: Debug + Send + Sync {
    /// Notes that `op`, the work before `event`, uses a byte range. Errors if other uses of the range are not ordered before
    /// this one.
    fn queue_use(
        self: Arc<Self>,
        range: Range<usize>,
        access: Access,
        op: &'static str,
        event: &Event,
    ) -> Result<()>;
}

#[derive(Clone, Debug)]
pub(crate) struct CapturedUse {
    pub(crate) memory: Arc<dyn UsedMemory>,
    pub(crate) range: Range<usize>,
    pub(crate) access: Access,
    pub(crate) op: &'static str,
}
