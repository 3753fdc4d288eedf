//! The changes that fit the strategy of a run, for [advice](paceline_analysis::advice).
//!
//! Each measured step of a run ([`Situation`]) is replayed as it was and changed. Advice names a change by its flags. This
//! module does not choose between changes, and adds only the reason if none helps.

#[cfg(test)]
mod tests;

use paceline_analysis::advice::cost::{Cost, cost_of};
use paceline_analysis::advice::gain::{Gain, Remedy, best};
use paceline_analysis::advice::observed::Observed;
use paceline_analysis::advice::passes::{Passes, Unprepared, without_blocking};
use paceline_analysis::advice::{Changes, Told, advise};
use paceline_choices::strategies::Advice;
use paceline_host::text::plural;
use paceline_model::Layout;
use paceline_strategies::BucketCaps;

use crate::insight::anatomy::{Anatomy, GatherLine};
use crate::insight::buckets::{ELEM_BYTES, LOSS_BYTES, plan, plans};
use crate::insight::conversion::Conversion;
use crate::insight::gathers::Uses;
use crate::record::readiness::Moments;

/// The facts about a run for which advice is wanted.
pub struct Situation<'a> {
    /// The strategy.
    pub strategy: &'a str,
    /// The kind of advice that fits it.
    pub kind: Advice,
    /// The sizes of its buckets.
    pub caps: BucketCaps,
    /// Means over ranks and steps.
    pub anatomy: &'a Anatomy,
    /// Single steps.
    pub observed: &'a Observed,
    /// The moments of these steps.
    pub moments: &'a [Moments],
    /// Where the gradients lie.
    pub layout: &'a Layout,
    /// The cost of an operation on the emulated link, and whether ranks divide layers and wait for all exchanges within them; `None`
    /// without a link, where exchanges are copies that take as long wherever they happen.
    pub link: Option<(Cost, bool)>,
    /// Measures the time of converting gradients to 16 bits here; `None` if this fails. Called only if it matters.
    pub conversion: &'a dyn Fn() -> Option<Conversion>,
}

/// Returns the advice, or `None` if the figures need no advice.
pub fn advice(mut of: Situation) -> Option<Told> {
    let (link, layers_block) = of.link.take().unzip();
    let cost = cost_of(of.observed, link);
    let Situation { strategy, kind, caps, anatomy, observed, layout, .. } = of;
    let means = anatomy.means;
    let passes = Passes::measured(observed, plan(layout, caps), Some(LOSS_BYTES), &*cost);
    let passes = passes.as_ref();
    // Compression can cost more than all that is exposed.
    let compressed = passes.filter(|_| kind == Advice::CompareWithDdp);
    let uncompressed = compressed.and_then(Passes::unprepared);
    let without_compression = uncompressed.map(|Unprepared { gain, removes_ms, .. }| Remedy {
        removes_ms,
        changes_weights: true,
        ..Remedy::new("`--strategy ddp`", gain)
    });
    advise(&means, anatomy.slowest, observed, without_compression, || {
        let mut note = None;
        let mut otherwise = None;
        let unblocked = || no_statistics(without_blocking(observed));
        let mut remedies = match kind {
            Advice::ChooseBuckets => {
                let least_ms = means.negligible_ms();
                let (buckets, is_certain) = passes
                    .map_or((None, false), |passes| passes.other_buckets(plans(layout), least_ms));
                if is_certain {
                    note = Some("No bucket size hides them");
                    let more =
                        "More computation per step would hide them: pass a larger --batch-size";
                    otherwise = Some(more.to_owned());
                }
                let statistics = no_statistics(passes.and_then(Passes::without_blocking));
                let half = passes.and_then(|passes| half_the_bytes(passes, (of.conversion)()?));
                vec![buckets.map(other_buckets), statistics, half]
            }
            Advice::UseBuckets => vec![passes.and_then(with_ddp), unblocked()],
            Advice::CompareWithDdp => {
                otherwise = uncompressed.map(|of| compression_words(anatomy, of));
                vec![unblocked()]
            }
            Advice::AverageLess { every } => vec![average_less(every, observed)],
            Advice::ChooseGathers { prefetch } => {
                otherwise = Some(gather_words(anatomy));
                vec![prefetch.and_then(|ahead| gather_more(ahead, &of)), unblocked()]
            }
            Advice::ShardWith(other) => {
                otherwise = Some(format!(
                    "The operations of {strategy} block. `--strategy {other}` divides the model too, and communicates \
                     while the ranks compute"
                ));
                Vec::new()
            }
        };
        remedies.push(layers_block.filter(|blocks| *blocks).and_then(|_| overlapped(observed)));
        let unexplained_ms = passes.and_then(Passes::unexplained_ms);
        Changes { remedies, note, unexplained_ms, otherwise }
    })
}

fn other_buckets((caps, gain): (BucketCaps, Gain)) -> Remedy {
    let [size, first] = [caps.bytes, caps.first_bytes].map(mib);
    Remedy::new(format!("`--bucket-cap-mb {size} --first-bucket-mb {first}`"), gain)
}

/// Of the five exchanges of a divided layer, which move as many bytes, two could travel while the ranks compute. About
/// half of that is gained, since an exchange takes a part of the cores.
fn overlapped(observed: &Observed) -> Option<Remedy> {
    let moving = observed.steps.iter().map(|step| (step.exposed - step.waiting) / 5.0);
    let also = Some("It takes more memory".to_owned());
    Some(Remedy { also, ..Remedy::new("`--overlap-tp`", Gain::of(moving)?) })
}

fn half_the_bytes(passes: &Passes, conversion: Conversion) -> Option<Remedy> {
    let elems = |bytes: u64| bytes as f64 / ELEM_BYTES as f64;
    let narrow = |bytes: u64| conversion.narrow_ms * elems(bytes);
    let widen = |bytes: u64| conversion.widen_ms * elems(bytes);
    let (gain, converting) = passes.half_the_bytes(narrow, widen)?;
    Some(Remedy {
        removes_ms: gain.ms + converting,
        costs: Some(("converting", converting)),
        changes_weights: true,
        ..Remedy::new("`--strategy bf16`", gain)
    })
}

fn with_ddp(passes: &Passes) -> Option<Remedy> {
    let also = Some("It sends the same bytes in buckets during the backward pass".to_owned());
    Some(Remedy { also, ..Remedy::new("`--strategy ddp`", passes.beside_the_pass()?) })
}

fn no_statistics(gain: Option<Gain>) -> Option<Remedy> {
    Some(Remedy {
        also: Some("Each rank would normalize by its own samples".to_owned()),
        changes_weights: true,
        ..Remedy::new("leaving out `--sync-batch-norm`", gain?)
    })
}

/// A size in MiB, as a flag takes it.
fn mib(bytes: usize) -> String {
    // The smallest size that is tried, 2^14 bytes, has six decimals in MiB.
    let text = format!("{:.6}", bytes as f64 / 1048576.0);
    text.trim_end_matches('0').trim_end_matches('.').to_owned()
}

/// Waiting does not get less: ranks drift apart for longer.
fn average_less(every: usize, observed: &Observed) -> Option<Remedy> {
    let mean = observed.steps.iter().map(|step| step.exposed).sum::<f64>()
        / observed.steps.len().max(1) as f64;
    let averages = observed.steps.iter().filter(|step| step.exposed > mean / 2.0);
    let gain = Gain::of(averages.map(|step| (step.exposed - step.waiting) / 2.0 / every as f64))?;
    let change = format!("`--sync-every {}`", 2 * every);
    Some(Remedy { changes_weights: true, ..Remedy::new(change, gain) })
}

/// The most units that advice lets be gathered ahead: each takes memory.
const MAX_PREFETCH: usize = 8;

fn gather_more(prefetch: usize, of: &Situation) -> Option<Remedy> {
    let lines = &of.anatomy.gathers;
    let units = lines.iter().filter(|line| !line.is_backward).count();
    let most = MAX_PREFETCH.min(units.saturating_sub(1));
    let of_step = |moments: &Moments| {
        let reduces = lines.iter().map(|line| line.reduce_ms);
        let seen = moments.gathers.iter().zip(reduces);
        let seen = seen.map(|(of, reduce_ms)| GatherLine { reduce_ms, ..GatherLine::of(of) });
        let seen: Vec<GatherLine> = seen.collect();
        (seen.len() == lines.len()).then(|| Uses::measured(&seen, moments.passes[2]))?
    };
    let whole =
        of.observed.steps.iter().zip(of.moments).filter(|(step, _)| of.observed.is_whole(step));
    let steps: Vec<Uses> = whole.filter_map(|(_, moments)| of_step(moments)).collect();
    let more = (prefetch + 1..=most).filter_map(|ahead| {
        let gain = Gain::of(steps.iter().map(|uses| uses.exposed(prefetch) - uses.exposed(ahead)))?;
        let memory = plural(ahead - prefetch, "more unit");
        Some(Remedy {
            also: Some(format!("It takes the memory of {memory}")),
            ..Remedy::new(format!("`--prefetch {ahead}`"), gain)
        })
    });
    best(more, |remedy| remedy.gain, of.anatomy.means.negligible_ms() / 2.0)
}

/// Why gathers stay exposed that no prefetch hides.
fn gather_words(anatomy: &Anatomy) -> String {
    let measured: f64 = anatomy.gathers.iter().map(|line| line.exposed_ms).sum();
    let gathering: f64 = anatomy.gathers.iter().map(|line| line.op.move_ms()).sum();
    let largest = anatomy.gathers.iter().max_by(|a, b| a.op.move_ms().total_cmp(&b.op.move_ms()));
    match largest {
        None => "Reductions and waiting are exposed".to_owned(),
        Some(_) if measured < anatomy.means.negligible_ms() => format!(
            "{gathering:.2} ms of gathers per step are hidden but for {measured:.2}: what is exposed besides are \
             reductions and waiting"
        ),
        Some(line) if line.op.move_ms() > gathering / 3.0 => format!(
            "Passes wait {measured:.2} ms for gathers. {} alone takes {:.2} of their {gathering:.2} ms, so smaller \
             units would hide better",
            line.unit,
            line.op.move_ms()
        ),
        Some(_) => format!(
            "Passes wait {measured:.2} ms for gathers, which move data for {gathering:.2}. A larger batch gives them \
             more to hide behind"
        ),
    }
}

fn compression_words(anatomy: &Anatomy, uncompressed: Unprepared) -> String {
    let Unprepared { gain, exposed_ms, .. } = uncompressed;
    let head = format!(
        "Compressing takes {:.2} ms. Without it (`--strategy ddp`) about {exposed_ms:.2} would be exposed",
        anatomy.means.sync_ms
    );
    let more = Gain { ms: -gain.ms, low_ms: -gain.high_ms, high_ms: -gain.low_ms, ..gain };
    if more.holds(anatomy.means.negligible_ms()) {
        format!("{head}, and the step would take {}", more.words("more"))
    } else {
        format!("{head}, and the step would take about as long")
    }
}
