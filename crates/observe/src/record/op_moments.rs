//! The moments of one operation of a step. This file does not know what the operation is for.

use paceline_collectives::OpRecord;
use serde::{Deserialize, Serialize};

/// The moments of an operation, in milliseconds since its step began: since the batch arrived.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct OpMoments {
    /// Size of the message in bytes.
    pub bytes: u64,
    /// When it was submitted. For a bucket, this is when its gradients were final.
    pub ready_ms: f64,
    /// When it started.
    pub sent_ms: f64,
    /// When all ranks had arrived.
    pub present_ms: f64,
    /// When the result was there.
    pub done_ms: f64,
    /// The part of its time during which the main thread computed, if that was asked for.
    pub hidden_ms: f64,
}

impl OpMoments {
    /// Those of an operation. `since` gives the milliseconds since the step began.
    pub fn of(OpRecord { bytes, times, .. }: &OpRecord, since: impl Fn(u64) -> f64) -> Self {
        Self {
            bytes: *bytes as u64,
            ready_ms: since(times.submitted_ns),
            sent_ms: since(times.started_ns),
            present_ms: since(times.present_ns),
            done_ms: since(times.finished_ns),
            hidden_ms: 0.0,
        }
    }

    /// How long it moved data, after all ranks had arrived.
    pub fn move_ms(&self) -> f64 {
        self.done_ms - self.present_ms
    }

    /// The percentage of its time during which the main thread computed.
    pub fn hidden_pct(&self) -> f64 {
        let whole_ms = self.done_ms - self.sent_ms;
        if whole_ms > 0.0 { 100.0 * self.hidden_ms / whole_ms } else { 0.0 }
    }

    /// Its times: submitted, started, all ranks there, done, and the hidden part.
    pub fn times(&mut self) -> [&mut f64; 5] {
        let Self { ready_ms, sent_ms, present_ms, done_ms, hidden_ms, .. } = self;
        [ready_ms, sent_ms, present_ms, done_ms, hidden_ms]
    }
}

#[cfg(test)]
pub(crate) mod tests {
    use paceline_collectives::{OpKind, OpTimes, Purpose, ReduceOp};
    use paceline_memory::DType;

    use super::*;

    /// An all-reduce of two ranks that was submitted, started, had all ranks and finished at these times.
    pub fn record(
        purpose: Purpose,
        [submitted_ns, started_ns, present_ns, finished_ns]: [u64; 4],
    ) -> OpRecord {
        OpRecord {
            kind: OpKind::AllReduce,
            group: 0,
            seq: 0,
            ranks: 2,
            bytes: 8,
            dtype: DType::F32,
            op: ReduceOp::Sum,
            send_bytes: 8,
            recv_bytes: 8,
            purpose,
            times: OpTimes {
                submitted_ns,
                started_ns,
                present_ns,
                finished_ns,
                ..Default::default()
            },
        }
    }
}
