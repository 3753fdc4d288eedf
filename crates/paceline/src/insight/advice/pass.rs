//! Advice from the replay of a backward pass: bucket sizes, buckets at all, compression, and the blocking sums of a
//! synchronized batch norm.
//!
//! Input: the anatomy of a step, and what an operation costs. Output: sentences, each with what the step would gain.

use paceline_model::Layout;
use paceline_strategies::BucketCaps;

use super::{Cost, NEGLIGIBLE_PCT};
use crate::insight::replay::{Backward, Blocking, BucketTimes, Played};
use crate::metrics::anatomy::{Anatomy, OpLine, ReadyLine};
use crate::text::plural;

/// When the gradients of a layout are final; `None` if this time is not known for some gradient. The waits for
/// `statistics`, the sums of a synchronized batch norm, are taken out of the times.
pub fn backward<'a>(
    ready: &[ReadyLine],
    [begin, end]: [f64; 2],
    statistics: &[OpLine],
    layout: &'a Layout,
) -> Option<Backward<'a>> {
    let within = || statistics.iter().filter(|op| op.ready_ms >= begin);
    let waited = |until: f64| -> f64 {
        within().filter(|op| op.done_ms <= until).map(|op| op.done_ms - op.ready_ms).sum()
    };
    let mut times = vec![0.0; layout.params().len()];
    for (id, param) in layout.trained() {
        let at = ready.iter().find(|line| line.param == param.name)?.ready_ms;
        times[id.0] = at - waited(at);
    }
    let blocking =
        within().map(|op| Blocking { at: op.ready_ms - waited(op.ready_ms), bytes: op.bytes });
    Some(Backward {
        layout,
        ready: times,
        begin,
        end: end - waited(end),
        blocking: blocking.collect(),
    })
}

/// A measured backward pass, which can be replayed.
pub struct Pass<'a> {
    strategy: &'a str,
    caps: BucketCaps,
    anatomy: &'a Anatomy,
    backward: Backward<'a>,
    cost: &'a Cost,
}

impl<'a> Pass<'a> {
    /// From what a run has measured; `None` if it is not known when some gradient was final.
    pub fn measured(
        strategy: &'a str,
        caps: BucketCaps,
        anatomy: &'a Anatomy,
        layout: &'a Layout,
        cost: &'a Cost,
    ) -> Option<Self> {
        let pass = [anatomy.backward_begin_ms, anatomy.backward_end_ms];
        let backward = backward(&anatomy.ready, pass, &anatomy.statistics, layout)?;
        Some(Self { strategy, caps, anatomy, backward, cost })
    }

    fn ddp(&self) -> Played {
        self.backward.play(self.caps, self.cost, self.cost)
    }

    fn is_worth(&self, gain: f64) -> bool {
        gain > self.anatomy.wall_ms * NEGLIGIBLE_PCT / 100.0
    }

    /// For strategies that block where `ddp` would communicate beside the pass.
    pub fn of_blocking(&self) -> Option<String> {
        let least = self.ddp().exposed() + self.forward_statistics();
        let gain = self.anatomy.exposed_ms - least;
        let buckets = || {
            format!(
                "{} leaves {:.2} ms exposed; the same bytes in buckets during backward (--strategy ddp) would leave \
                 about {least:.2}",
                self.strategy, self.anatomy.exposed_ms
            )
        };
        match of_statistics(self.anatomy, None) {
            Some((more, text)) if more > gain => Some(text),
            _ => self.is_worth(gain).then(buckets),
        }
    }

    /// For strategies that compress gradients, which takes time too.
    pub fn of_compression(&self) -> Option<String> {
        let (exposed, compression) = (self.anatomy.exposed_ms, self.anatomy.sync_ms);
        let (least, gain) = self.uncompressed();
        let pays = || match self.is_worth(gain) {
            true => format!(
                "{exposed:.2} ms stay exposed and compression itself takes {compression:.2} ms: --strategy ddp would \
                 leave about {least:.2} exposed and compress nothing, {gain:.2} ms less per step"
            ),
            false => format!(
                "{exposed:.2} ms stay exposed and compression itself takes {compression:.2} ms: without it \
                 (--strategy ddp) about {least:.2} would be exposed, so the step would {}",
                if self.is_worth(-gain) {
                    format!("take {:.2} ms more", -gain)
                } else {
                    "take about as long".to_owned()
                }
            ),
        };
        match of_statistics(self.anatomy, None) {
            Some((more, text)) if more > gain => Some(text),
            _ => Some(pays()),
        }
    }

    /// Whether the step would be shorter without compression.
    pub fn gains_without_compression(&self) -> bool {
        self.is_worth(self.uncompressed().1)
    }

    /// What would be exposed without compression, and what the step would gain.
    fn uncompressed(&self) -> (f64, f64) {
        let pass = self.without_compression();
        let least =
            pass.play(self.caps, self.cost, self.cost).exposed() + self.forward_statistics();
        (least, self.anatomy.exposed_ms + self.anatomy.sync_ms - least)
    }

    /// For `ddp` itself: other bucket sizes, no statistics, or fewer bytes, in this order where they gain equally.
    pub fn of_ddp(&self) -> Option<String> {
        let played = self.ddp();
        let (best, least) = self.backward.best_caps(self.cost);
        let gain = played.exposed() - least;
        if let Some((more, text)) = of_statistics(self.anatomy, Some(self))
            && more > gain
        {
            return Some(text);
        }
        let late = played.buckets.iter().enumerate().filter(|(_, bucket)| bucket.done > played.end);
        let needs = |of: &BucketTimes| of.done - of.sent;
        let Some((at, bucket)) = late.max_by(|a, b| needs(a.1).total_cmp(&needs(b.1))) else {
            return Some(format!(
                "{:.2} ms are exposed although the buckets should be done when backward ends: operations take \
                 longer than their size explains, look for what else uses the cores or the network",
                self.anatomy.exposed_ms
            ));
        };
        let queue = match bucket.sent > bucket.ready {
            true => format!(" after {:.2} ms in the queue", bucket.sent - bucket.ready),
            false => String::new(),
        };
        let why = format!(
            "bucket {at} is ready {:.2} ms before the end of backward and needs {:.2} ms{queue}: {:.2} ms stay exposed",
            played.end - bucket.ready,
            needs(bucket),
            played.exposed()
        );
        if self.is_worth(gain) {
            return Some(format!(
                "{why}; --bucket-cap-mb {} --first-bucket-mb {} would hide {gain:.2} of them",
                mb(best.bytes),
                mb(best.first_bytes)
            ));
        }
        let halved = self.backward.play(self.caps, self.cost, |bytes| (self.cost)(bytes / 2));
        let total: f64 = played.buckets.iter().map(needs).sum();
        let behind = played.end - played.buckets.first().map_or(0.0, |first| first.ready);
        let bound = match total > behind {
            true => format!(
                "all {total:.2} ms of communication cannot hide behind the {behind:.2} ms from the first gradient to \
                 the end of backward"
            ),
            false => {
                "it is the last to be ready, and nothing is left to compute behind it".to_owned()
            }
        };
        let why = format!("{why}, which no bucket size changes ({bound})");
        Some(match self.is_worth(played.exposed() - halved.exposed()) {
            true => format!(
                "{why}; half the bytes (--strategy bf16) would leave about {:.2}, and a larger batch would share them \
                 among more samples",
                halved.exposed()
            ),
            false => format!("{why}: more computation per step would"),
        })
    }

    /// The pass without the time that compression takes in it. Where in the pass it was is not known, so all of the pass
    /// becomes shorter alike.
    fn without_compression(&self) -> Backward<'a> {
        let Backward { begin, end, .. } = self.backward;
        let len = (end - begin).max(f64::MIN_POSITIVE);
        let factor = 1.0 - (self.anatomy.sync_ms / len).min(0.5);
        let moved = |at: f64| begin + (at - begin) * factor;
        let mut backward = self.backward.clone();
        backward.end = moved(end);
        backward.ready.iter_mut().for_each(|at| *at = moved(*at));
        backward.blocking.iter_mut().for_each(|of| of.at = moved(of.at));
        backward
    }

    /// For how long the forward pass waits for statistics.
    fn forward_statistics(&self) -> f64 {
        let forward = |op: &&OpLine| op.ready_ms < self.backward.begin;
        self.anatomy.statistics.iter().filter(forward).map(|op| op.done_ms - op.ready_ms).sum()
    }
}

/// Advice to do without synchronized batch norms, with what the step would gain in milliseconds. Without a replay, the
/// gain is for how long the passes wait. `None` if it is negligible.
pub fn of_statistics(anatomy: &Anatomy, pass: Option<&Pass>) -> Option<(f64, String)> {
    let waited = anatomy.statistics_ms();
    let gain = pass.map_or(waited, |pass| {
        let without = Backward { blocking: Vec::new(), ..pass.backward.clone() };
        let without = without.play(pass.caps, pass.cost, pass.cost).exposed();
        pass.forward_statistics() + pass.ddp().exposed() - without
    });
    (gain > anatomy.wall_ms * NEGLIGIBLE_PCT / 100.0).then(|| {
        let text = format!(
            "{} of synchronised batch norm make the passes wait {waited:.2} ms per step: without --sync-batch-norm the \
             step would take about {gain:.2} ms less, and each rank would normalize by its own samples; a larger batch \
             per rank needs it less",
            plural(anatomy.statistics.len(), "all-reduce")
        );
        (gain, text)
    })
}

/// A size in MB of 2^20 bytes, as a flag takes it.
fn mb(bytes: usize) -> String {
    // The smallest size that is tried, 2^14 bytes, has six decimals in MiB.
    let text = format!("{:.6}", bytes as f64 / 1048576.0);
    text.trim_end_matches('0').trim_end_matches('.').to_owned()
}
