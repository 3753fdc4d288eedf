//! Turns the anatomy of a step into a sentence of advice: is communication hidden, and if not, why?
//!
//! The measured ready times are replayed with other bucket sizes ([`crate::insight::replay`]) to predict
//! what these would change. The sentence claims nothing that the figures of the run do not show.
//!
//! | file | what it advises on |
//! |---|---|
//! | here | waiting, averages, gathers |
//! | [`pass`] | what the replay of a backward pass can tell: buckets, compression, synchronized batch norm |

pub mod pass;
#[cfg(test)]
mod tests;

use paceline_model::Layout;
use paceline_strategies::BucketCaps;

use crate::choices::strategies::Advice;
use crate::insight::gathers::Uses;
use crate::metrics::anatomy::{Anatomy, OpLine, Slowest};
use pass::Pass;

/// Exposed communication below this percentage of the step needs no advice.
const NEGLIGIBLE_PCT: f64 = 2.0;

/// The cost model of operations: the milliseconds that an operation on this many bytes takes.
pub type Cost = Box<dyn Fn(u64) -> f64>;

/// The cost of operations as measured by this run: a latency plus a time per byte, fitted by least
/// squares. Neither is negative.
pub fn measured_cost(ops: &[OpLine]) -> Cost {
    let points: Vec<(f64, f64)> =
        ops.iter().map(|op| (op.bytes as f64, op.done_ms - op.present_ms)).collect();
    let n = points.len().max(1) as f64;
    let mean = |part: fn(&(f64, f64)) -> f64| points.iter().map(part).sum::<f64>() / n;
    let (x, y) = (mean(|p| p.0), mean(|p| p.1));
    let covariance: f64 = points.iter().map(|p| (p.0 - x) * (p.1 - y)).sum();
    let variance: f64 = points.iter().map(|p| (p.0 - x) * (p.0 - x)).sum();
    let per_byte = if variance > 0.0 { (covariance / variance).max(0.0) } else { 0.0 };
    let latency = (y - per_byte * x).max(0.0);
    Box::new(move |bytes| latency + per_byte * bytes as f64)
}

/// Returns the sentence of advice, or `None` if the figures call for none.
pub fn advice(
    strategy: &str,
    kind: Advice,
    caps: BucketCaps,
    anatomy: &Anatomy,
    layout: &Layout,
    cost: &Cost,
) -> Option<String> {
    let exposed_pct = 100.0 * anatomy.exposed_ms / anatomy.wall_ms;
    if anatomy.communication_ms == 0.0 || !exposed_pct.is_finite() {
        return None;
    }
    // Compression can cost more than everything that is exposed.
    let pass = Pass::measured(strategy, caps, anatomy, layout, cost);
    if kind == Advice::CompareWithDdp
        && let Some(pass) = &pass
        && pass.gains_without_compression()
    {
        return pass.of_compression();
    }
    if exposed_pct < NEGLIGIBLE_PCT {
        return Some(format!(
            "{:.2} ms of communication per step cost {exposed_pct:.1} % of it: there is nothing to gain from \
             hiding more",
            anatomy.communication_ms
        ));
    }
    if let Some(Slowest { rank, cost_ms, .. }) = anatomy.slowest
        && anatomy.exposed_wait_ms > anatomy.exposed_ms / 2.0
    {
        return Some(format!(
            "{:.2} of the {:.2} ms that are exposed are spent waiting, mostly for rank {rank}, and not moving \
             data: look at what else runs on its cores, and at its share of the data; were it as fast as the \
             others, the step would take up to {cost_ms:.2} ms less",
            anatomy.exposed_wait_ms, anatomy.exposed_ms
        ));
    }
    if let Advice::AverageLess { every } = kind {
        return Some(format!(
            "averages are exposed for {:.2} ms per step, taken over all steps: --sync-every {} would leave about {:.2}",
            anatomy.exposed_ms,
            2 * every,
            anatomy.exposed_ms / 2.0
        ));
    }
    match kind {
        Advice::AverageLess { .. } => None,
        Advice::ChooseGathers { prefetch } => {
            let statistics = pass::of_statistics(anatomy, None);
            let statistics = statistics.filter(|(gain, _)| *gain > anatomy.exposed_ms / 2.0);
            statistics.map(|(_, text)| text).or_else(|| of_gathers(prefetch, anatomy))
        }
        Advice::ShardWith(other) => Some(format!(
            "{strategy} leaves {:.2} ms exposed, because its operations block: --strategy {other} divides the \
             model too, and communicates while the ranks compute",
            anatomy.exposed_ms
        )),
        Advice::ChooseBuckets => pass?.of_ddp(),
        Advice::CompareWithDdp => pass?.of_compression(),
        Advice::UseBuckets => pass?.of_blocking(),
    }
}

/// The most units that advice lets be gathered ahead: each takes memory.
const MAX_PREFETCH: usize = 8;

/// Advice on how many units to gather ahead, and on their sizes.
fn of_gathers(prefetch: Option<usize>, anatomy: &Anatomy) -> Option<String> {
    let uses = Uses::measured(&anatomy.gathers, anatomy.backward_end_ms)?;
    let measured: f64 = anatomy.gathers.iter().map(|line| line.exposed_ms).sum();
    let (gathering, wall) = (uses.gathering(), anatomy.wall_ms);
    if measured < wall * NEGLIGIBLE_PCT / 100.0 {
        return Some(format!(
            "{gathering:.2} ms of gathers per step are hidden but for {measured:.2}: what is exposed besides are \
             reductions and waiting"
        ));
    }
    if let Some(prefetch) = prefetch {
        let units = anatomy.gathers.iter().filter(|line| !line.is_backward).count();
        let most = MAX_PREFETCH.min(units.saturating_sub(1));
        let now = uses.exposed(prefetch);
        let more = (prefetch + 1..=most).map(|ahead| (ahead, uses.exposed(ahead)));
        if let Some((best, least)) = more.min_by(|a, b| a.1.total_cmp(&b.1))
            && now - least > wall * NEGLIGIBLE_PCT / 100.0
        {
            return Some(format!(
                "passes wait {measured:.2} ms for gathers: --prefetch {best} would leave about {least:.2}, for the \
                 memory of {} more",
                crate::text::plural(best - prefetch, "unit")
            ));
        }
    }
    let largest = anatomy.gathers.iter().max_by(|a, b| a.move_ms.total_cmp(&b.move_ms))?;
    Some(match largest.move_ms > gathering / 3.0 {
        true => format!(
            "passes wait {measured:.2} ms for gathers; {} alone takes {:.2} of {gathering:.2} ms, so smaller units \
             would hide better",
            largest.unit, largest.move_ms
        ),
        false => format!(
            "passes wait {measured:.2} ms for gathers, which move data for {gathering:.2}: a larger batch gives them \
             more to hide behind"
        ),
    })
}
