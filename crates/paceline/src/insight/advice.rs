//! Turns the anatomy of a step into a sentence of advice: is communication hidden, and if not, why?
//!
//! The measured ready times are replayed with other bucket sizes ([`crate::insight::replay`]) to predict
//! what these would change. The sentence claims nothing that the figures of the run do not show.

use paceline_model::Layout;
use paceline_strategies::BucketCaps;

use crate::choices::strategies::Advice;
use crate::insight::gathers::Uses;
use crate::insight::replay::{self, Backward};
use crate::metrics::anatomy::{Anatomy, OpLine, ReadyLine, Slowest};

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
    if exposed_pct < NEGLIGIBLE_PCT {
        return Some(format!(
            "{:.2} ms of communication per step cost {exposed_pct:.1} % of it: there is nothing to gain from \
             hiding more",
            anatomy.communication_ms
        ));
    }
    if let Some(Slowest { rank, .. }) = anatomy.slowest
        && anatomy.exposed_wait_ms > anatomy.exposed_ms / 2.0
    {
        return Some(format!(
            "{:.2} of the {:.2} ms that are exposed are spent waiting, mostly for rank {rank}, and not moving \
             data: look at what else runs on its cores, and at its share of the data",
            anatomy.exposed_wait_ms, anatomy.exposed_ms
        ));
    }
    match kind {
        Advice::ChooseGathers { prefetch } => return of_gathers(prefetch, anatomy),
        Advice::ShardWith(other) => {
            return Some(format!(
                "{strategy} leaves {:.2} ms exposed, because its operations block: --strategy {other} divides the \
                 model too, and communicates while the ranks compute",
                anatomy.exposed_ms
            ));
        }
        _ => {}
    }
    let pass = [anatomy.backward_begin_ms, anatomy.backward_end_ms];
    let backward = backward(&anatomy.ready, pass, layout)?;
    match kind {
        Advice::ChooseBuckets => Some(of_ddp(caps, anatomy, &backward, cost)),
        Advice::AverageLess => Some(format!(
            "averages are exposed for {:.2} ms per step, taken over all steps: a larger --sync-every makes \
             them rarer",
            anatomy.exposed_ms
        )),
        Advice::CompareWithDdp => Some(format!(
            "{:.2} ms stay exposed and compression itself takes {:.2} ms: compare with --strategy ddp",
            anatomy.exposed_ms, anatomy.sync_ms
        )),
        Advice::ChooseGathers { .. } | Advice::ShardWith(_) => None,
        Advice::UseBuckets => {
            let least = replay::exposed(&backward.ddp(caps, cost), backward.end);
            let gain = anatomy.exposed_ms - least;
            (gain > anatomy.wall_ms * NEGLIGIBLE_PCT / 100.0).then(|| {
                format!(
                    "{} leaves {:.2} ms exposed; the same bytes in buckets during backward (--strategy ddp) would \
                     leave about {least:.2}",
                    strategy,
                    anatomy.exposed_ms
                )
            })
        }
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

/// When the gradients of a layout are final; `None` if this time is not known for some gradient.
pub fn backward<'a>(
    ready: &[ReadyLine],
    [begin, end]: [f64; 2],
    layout: &'a Layout,
) -> Option<Backward<'a>> {
    let mut times = vec![0.0; layout.params().len()];
    for (id, param) in layout.trained() {
        times[id.0] = ready.iter().find(|line| line.param == param.name)?.ready_ms;
    }
    Some(Backward { layout, ready: times, begin, end })
}

fn of_ddp(caps: BucketCaps, anatomy: &Anatomy, backward: &Backward, cost: &Cost) -> String {
    let end = backward.end;
    let times = backward.ddp(caps, cost);
    let exposed = replay::exposed(&times, end);
    let total: f64 = times.iter().map(|bucket| bucket.done - bucket.sent).sum();
    let first = times.first().map_or(0.0, |bucket| bucket.ready);
    let (best, least) = backward.best_caps(cost);
    let mb = |bytes: usize| {
        // The smallest size that is tried, 2^14 bytes, has six decimals in MiB.
        let text = format!("{:.6}", bytes as f64 / 1048576.0);
        text.trim_end_matches('0').trim_end_matches('.').to_owned()
    };
    let better =
        format!("--bucket-cap-mb {} --first-bucket-mb {}", mb(best.bytes), mb(best.first_bytes));
    let worst = times.iter().enumerate().filter(|(_, bucket)| bucket.done > end);
    let Some((at, bucket)) = worst.max_by(|a, b| {
        let cost = |p: &replay::BucketTimes| p.done - p.sent;
        cost(a.1).total_cmp(&cost(b.1))
    }) else {
        return format!(
            "{:.2} ms are exposed although the buckets should be done when backward ends: operations take \
             longer than their size explains, look for what else uses the cores or the network",
            anatomy.exposed_ms
        );
    };
    let (needs, left) = (bucket.done - bucket.sent, end - bucket.ready);
    let why = format!(
        "bucket {at} is ready {left:.2} ms before the end of backward and needs {needs:.2} ms{}: {exposed:.2} ms \
         stay exposed",
        if bucket.sent > bucket.ready {
            format!(" after {:.2} ms in the queue", bucket.sent - bucket.ready)
        } else {
            String::new()
        }
    );
    let gain = exposed - least;
    if gain > anatomy.wall_ms * NEGLIGIBLE_PCT / 100.0 {
        return format!("{why}; {better} would hide {gain:.2} of them");
    }
    let bound = if total > end - first {
        format!(
            "all {total:.2} ms of communication cannot hide behind the {:.2} ms from the first gradient to the \
             end of backward",
            end - first
        )
    } else {
        "it is the last to be ready, and nothing is left to compute behind it".to_owned()
    };
    format!(
        "{why}, which no bucket size changes ({bound}): fewer bytes or more computation per step would"
    )
}

#[cfg(test)]
mod tests {
    use paceline_model::{Init, LayoutBuilder};

    use super::*;

    const MB: usize = 1 << 20;

    fn layout() -> Layout {
        let mut builder = LayoutBuilder::new();
        for at in 0..4 {
            builder.unit(format!("u{at}"));
            builder.param("weight", [MB / 4], Init::Constant(0.0));
        }
        builder.finish(1)
    }

    /// Four gradients of 1 MiB, ready at 40, 30, 20, 10 ms; backward ends at 40 ms.
    fn anatomy(exposed_ms: f64) -> Anatomy {
        let ready =
            |at| ReadyLine { param: format!("u{at}.weight"), ready_ms: 10.0 * f64::from(4 - at) };
        Anatomy {
            wall_ms: 50.0,
            exposed_ms,
            communication_ms: 40.0,
            backward_end_ms: 40.0,
            ready: (0..4).rev().map(ready).collect(),
            ..Anatomy::default()
        }
    }

    fn say(kind: Advice, caps: BucketCaps, exposed_ms: f64, ms_per_mb: f64) -> String {
        let cost: Cost = Box::new(move |bytes| ms_per_mb * bytes as f64 / MB as f64);
        let name = if kind == Advice::UseBuckets { "simple_ddp" } else { "ddp" };
        advice(name, kind, caps, &anatomy(exposed_ms), &layout(), &cost).unwrap()
    }

    #[test]
    fn what_a_run_is_told() {
        let small = BucketCaps { first_bytes: MB, bytes: MB };
        let large = BucketCaps { first_bytes: 4 * MB, bytes: 4 * MB };
        let all = [
            say(Advice::ChooseBuckets, large, 32.0, 8.0),
            say(Advice::ChooseBuckets, small, 8.0, 8.0),
            say(Advice::ChooseBuckets, small, 50.0, 20.0),
            say(Advice::UseBuckets, small, 32.0, 8.0),
            say(Advice::ChooseBuckets, small, 0.5, 0.1),
            say(Advice::AverageLess, small, 5.0, 8.0),
        ];
        insta::assert_snapshot!(all.join("\n"));
    }

    #[test]
    fn waiting_is_not_the_links_fault() {
        let slowest = Some(Slowest { rank: 3, steps_pct: 90.0, cost_ms: 7.0 });
        let anatomy = Anatomy { slowest, exposed_wait_ms: 5.0, ..anatomy(8.0) };
        let cost: Cost = Box::new(|_| 1.0);
        let caps = BucketCaps::new(MB);
        let kind = Advice::ChooseBuckets;
        let text = advice("ddp", kind, caps, &anatomy, &layout(), &cost).unwrap();
        assert!(text.contains("mostly for rank 3"), "{text}");
    }

    #[test]
    fn costs_are_fitted() {
        let op = |bytes: u64, ms: f64| OpLine {
            bytes,
            ready_ms: 0.0,
            sent_ms: 1.0,
            present_ms: 2.0,
            done_ms: 2.0 + ms,
            hidden_pct: 0.0,
        };
        let cost = measured_cost(&[op(100, 1.5), op(300, 2.5)]);
        assert!((cost(0) - 1.0).abs() < 1e-9 && (cost(1000) - 6.0).abs() < 1e-9);
        assert_eq!(measured_cost(&[op(100, 3.0)])(7), 3.0);
        assert_eq!(measured_cost(&[])(7), 0.0);
    }
}
