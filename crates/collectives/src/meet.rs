//! How the ranks of a group meet at the start of a collective operation and check that their calls match.
//!
//! Every rank shows the others its call. Then all ranks compare the same list, so all find
//! the same disagreement, before data move. How a call travels is up to the transport, which implements [`ShowCalls`].

use crate::Result;
use crate::call::{CallHeader, Shares, agree, blocks_agree};
use crate::context::OpContext;

/// The calls that all ranks have shown, in rank order.
pub(crate) struct CallsOfAll {
    /// When the last rank had shown its call, as far as this rank can tell.
    pub(crate) present_ns: u64,
    pub(crate) calls: Vec<CallHeader>,
    /// The sequence number of each call on its rank.
    pub(crate) operations: Vec<u32>,
}

/// The calls of all ranks, which agree.
pub(crate) struct AgreedCalls {
    /// As in [`CallsOfAll`].
    pub(crate) present_ns: u64,
    pub(crate) calls: Vec<CallHeader>,
    /// For an all-to-all, `sent[from][to]` elements go from one rank to the other. Otherwise empty.
    pub(crate) sent: Vec<Vec<u64>>,
}

impl AgreedCalls {
    pub(crate) fn shares(&self) -> Shares {
        shares(&self.calls)
    }
}

/// Which elements belong to which rank, by calls that agree.
pub(crate) fn shares(calls: &[CallHeader]) -> Shares {
    let kind = calls[0].kind().expect("calls that agree are of a known kind");
    Shares::new(kind, calls)
}

/// How the ranks of a transport show each other their calls.
pub(crate) trait ShowCalls {
    /// Shows this rank's call to every rank, and waits until all ranks have shown theirs.
    fn show_call(&mut self, context: &OpContext) -> Result<CallsOfAll>;

    /// Shows this rank's row of an all-to-all to every rank, and returns all rows. A row holds
    /// the number of elements that its rank sends to each rank, then the number that it expects from each.
    fn show_blocks(&mut self, context: &OpContext, own: &[u64]) -> Result<Vec<Vec<u64>>>;
}

/// Shows this rank's call to every rank, waits until all others have shown theirs, and compares the calls.
///
/// Inlined, because a small message between threads takes about a microsecond, and copying the lists took 1 % of that.
#[inline(always)]
pub(crate) fn meet(ranks: &mut impl ShowCalls, context: &OpContext) -> Result<AgreedCalls> {
    let CallsOfAll { present_ns, calls, operations } = ranks.show_call(context)?;
    let mut sent = Vec::new();
    let mut outcome = agree(&calls);
    if let (Ok(()), Some(blocks)) = (&outcome, &context.call.blocks) {
        let own: Vec<u64> = blocks.send.iter().chain(&blocks.recv).copied().collect();
        let mut rows = ranks.show_blocks(context, &own)?;
        let world = context.world;
        outcome =
            blocks_agree(&calls, |from, to| rows[from][to], |to, from| rows[to][world + from]);
        rows.iter_mut().for_each(|row| row.truncate(world));
        sent = rows;
    }
    match outcome {
        Ok(()) => Ok(AgreedCalls { present_ns, calls, sent }),
        Err(found) => Err(context.disagreement(found, |rank| (calls[rank], operations[rank]))),
    }
}
