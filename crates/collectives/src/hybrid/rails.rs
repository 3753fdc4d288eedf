//! How ranks of several hosts show each other their calls: first within each host, then along the rails.

use paceline_memory::DType;
use paceline_trace::now_ns;

use super::state::Hybrid;
use crate::call::{Call, Region};
use crate::context::OpContext;
use crate::header::{HEADER_BYTES, Header, decode_rows, encode_words, read_call};
use crate::meet::{CallsOfAll, ShowCalls};
use crate::tcp::headers::swap;
use crate::tcp::inner::Sockets;
use crate::{OpKind, Result};

/// The ranks of this host, and the connections to the ranks with the same local rank on the other hosts.
pub(super) struct Rails<'a> {
    pub(super) hybrid: &'a Hybrid,
    pub(super) inner: &'a mut Sockets,
}

impl ShowCalls for Rails<'_> {
    /// First the ranks of each host show each other their calls. Then each rank sends its rail all calls of
    /// its host.
    fn show_call(&mut self, context: &OpContext) -> Result<CallsOfAll> {
        let Self { hybrid, inner } = self;
        let within = hybrid.within_host(context, context.call);
        let here = hybrid.local.show(&within, |_, _| ())?;
        let mut message = Vec::new();
        for (&call, &operation) in here.calls.iter().zip(&here.operations) {
            message.extend(Header::Call { operation, call }.encode());
        }
        let headers = swap(inner, context, &hybrid.rail(), &message)?;
        let present_ns = now_ns();
        let (mut calls, mut operations) = (Vec::new(), Vec::new());
        for node in 0..hybrid.num_hosts() {
            let on_rail = hybrid.on_rail(node);
            let there = &headers[on_rail * message.len()..][..message.len()];
            for bytes in there.chunks_exact(HEADER_BYTES) {
                let (operation, call) = read_call(context, on_rail, bytes)?;
                calls.push(call);
                operations.push(operation);
            }
        }
        Ok(CallsOfAll { present_ns, calls, operations })
    }

    /// First an all-gather within the host, then an exchange along the rail.
    fn show_blocks(&mut self, context: &OpContext, own: &[u64]) -> Result<Vec<Vec<u64>>> {
        let Self { hybrid, inner } = self;
        let mut row = encode_words(own);
        let mut here = vec![0u8; row.len() * hybrid.local.world];
        // No segment has them, so they are staged, and no peer reaches them.
        let region = |bytes: &mut [u8]| Region::at(bytes.as_mut_ptr(), bytes.len());
        let (send, recv) = (region(&mut row), region(&mut here));
        let call = Call { send, recv, ..Call::new(OpKind::AllGather, DType::U8) };
        hybrid.local.run(&hybrid.within_host(context, &call))?;
        let all = swap(inner, context, &hybrid.rail(), &here)?;
        let of_host = |node| {
            let there = &all[hybrid.on_rail(node) * here.len()..][..here.len()];
            decode_rows(there, own.len())
        };
        Ok((0..hybrid.num_hosts()).flat_map(of_host).collect())
    }
}
