//! Turns measured steps into a few sentences of advice: is communication hidden, and if not, what would change that?
//!
//! Each measured step is replayed as it was and changed ([`crate::insight::replay`]), so a gain has the spread of the steps.
//! A gain that the spread hides is not promised. The sentences account for all exposed time: waiting for slower ranks,
//! what the change removes, and what remains.
//!
//! | file | what it has |
//! |---|---|
//! | here | the account, the choice, and the words |
//! | [`gain`] | a gain with its spread, and the choice between changes |
//! | [`pass`] | what the replay of backward passes can tell: buckets, compression, synchronized batch norm |

pub mod gain;
pub mod pass;
#[cfg(test)]
mod tests;

use gain::{Gain, Remedy, best};
use paceline_choices::strategies::Advice;
use paceline_host::text::plural;
use paceline_model::Layout;
use paceline_strategies::BucketCaps;
use paceline_table::stats::median;
use pass::{Conversion, Passes, waits_for_statistics};
use serde::Serialize;

use crate::insight::anatomy::{Anatomy, GatherLine, Slowest};
use crate::insight::gathers::Uses;
use crate::insight::observed::{Observed, Seen};

/// Exposed communication below this percentage of the step needs no advice, and no smaller gain is advised.
const NEGLIGIBLE_PCT: f64 = 2.0;

/// The percentage of the steps in which a rank has to be the last one to be blamed.
const BLAMED_PCT: f64 = 80.0;

/// The cost model of operations: the milliseconds that an operation on this many bytes takes.
pub type Cost = Box<dyn Fn(u64) -> f64>;

/// What is known of a run that advice is for.
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
    /// Where the gradients lie.
    pub layout: &'a Layout,
    /// What an operation takes on the emulated link; `None` if there is none.
    pub link: Option<Cost>,
    /// Measures what converting gradients to 16 bits takes here; `None` if this fails. Called if it matters only.
    pub conversion: &'a dyn Fn() -> Option<Conversion>,
}

/// Advice: its words, and its numbers.
#[derive(Clone, Debug, PartialEq)]
pub struct Told {
    /// Sentences. The last one has no full stop.
    pub text: String,
    /// The numbers.
    pub account: Account,
}

/// Where the exposed communication of a step comes from: waiting, what the change removes, and what remains add up to it.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct Account {
    /// Exposed communication: mean over ranks and steps.
    pub exposed_ms: f64,
    /// The part in which operations wait for slower ranks.
    pub waiting_ms: f64,
    /// The part that the change removes. Negative if more would be exposed.
    pub removed_ms: f64,
    /// The rest.
    pub remains_ms: f64,
    /// The change that is advised, as the sentences name it; `waiting` if there is none but to look for what slows a rank.
    pub remedy: Option<String>,
    /// What the step would gain.
    pub gain: Option<Gain>,
    /// By how much the mean steps of two such runs differ, as far as this run can tell: a gain has to be larger.
    pub apart_ms: Option<f64>,
    /// What the change itself takes, within the gain.
    pub costs_ms: f64,
    /// Whether the change changes the weights.
    pub changes_weights: bool,
}

/// The cost of operations as measured in these steps. On a link it is the link's time, and what the operations usually took
/// longer: to be noticed by all ranks, to begin and to end. Without a link, a latency and a time per byte are fitted.
pub fn cost_of(observed: &Observed, link: Option<Cost>) -> Cost {
    let times = |step: &Seen| {
        let mut free = f64::NEG_INFINITY;
        let of_op = |(at, bytes): (usize, &u64)| {
            let latest = |part: usize| {
                step.ranks.iter().map(|rank| rank.ops[at][part]).fold(f64::NEG_INFINITY, f64::max)
            };
            let (begin, done) = (free.max(latest(0)), latest(3));
            free = done;
            (*bytes, done - begin)
        };
        observed.bytes.iter().enumerate().map(of_op).collect::<Vec<(u64, f64)>>()
    };
    let steps: Vec<Vec<(u64, f64)>> = observed.alike().map(times).collect();
    match link {
        Some(link) => {
            let more = steps.iter().flatten().map(|(bytes, ms)| ms - link(*bytes));
            let more_ms = median(more).unwrap_or(0.0).max(0.0);
            Box::new(move |bytes| link(bytes) + more_ms)
        }
        None => {
            let of_op = |(at, bytes): (usize, &u64)| {
                Some((*bytes as f64, median(steps.iter().map(|step| step[at].1))?))
            };
            let points = observed.bytes.iter().enumerate().filter_map(of_op);
            measured_cost(&points.collect::<Vec<_>>())
        }
    }
}

/// A latency plus a time per byte, fitted by least squares to sizes in bytes and times in milliseconds. Neither is negative.
pub fn measured_cost(points: &[(f64, f64)]) -> Cost {
    let n = points.len().max(1) as f64;
    let mean = |part: fn(&(f64, f64)) -> f64| points.iter().map(part).sum::<f64>() / n;
    let (x, y) = (mean(|p| p.0), mean(|p| p.1));
    let covariance: f64 = points.iter().map(|p| (p.0 - x) * (p.1 - y)).sum();
    let variance: f64 = points.iter().map(|p| (p.0 - x) * (p.0 - x)).sum();
    let per_byte = if variance > 0.0 { (covariance / variance).max(0.0) } else { 0.0 };
    let latency = (y - per_byte * x).max(0.0);
    Box::new(move |bytes| latency + per_byte * bytes as f64)
}

/// Returns the advice, or `None` if the figures call for none.
pub fn advice(of: Situation) -> Option<Told> {
    let Situation { strategy, kind, caps, anatomy, observed, layout, link, conversion } = of;
    let Anatomy { wall_ms, apart_ms, exposed_ms, communication_ms, .. } = *anatomy;
    let exposed_pct = 100.0 * exposed_ms / wall_ms;
    if communication_ms == 0.0 || !exposed_pct.is_finite() {
        return None;
    }
    let negligible_ms = wall_ms * NEGLIGIBLE_PCT / 100.0;
    // Nobody could see a smaller gain.
    let least_ms = apart_ms.unwrap_or(0.0).max(negligible_ms);
    let cost = cost_of(observed, link);
    let passes = Passes::measured(caps, observed, layout, &*cost);
    let uncompressed = match kind {
        Advice::CompareWithDdp => passes.as_ref().and_then(Passes::without_compression),
        _ => None,
    };
    // Compression can cost more than everything that is exposed.
    let compression_costs =
        uncompressed.as_ref().is_some_and(|(remedy, _)| remedy.gain.holds(least_ms));
    if exposed_pct < NEGLIGIBLE_PCT && !compression_costs {
        let text = format!(
            "{communication_ms:.2} ms of communication per step cost {exposed_pct:.1} % of it: there is nothing to \
             gain from hiding more"
        );
        return Some(Told { text, account: Account::new(anatomy, None) });
    }
    let mut no_bucket_helps = false;
    let passes = passes.as_ref();
    let remedies = match kind {
        Advice::ChooseBuckets => {
            let (buckets, is_certain) =
                passes.map_or((None, false), |passes| passes.other_buckets(negligible_ms));
            no_bucket_helps = is_certain;
            let half = passes.and_then(|passes| passes.half_the_bytes(conversion()?));
            vec![buckets, passes.and_then(Passes::without_statistics), half]
        }
        Advice::UseBuckets => {
            vec![passes.and_then(Passes::with_ddp), waits_for_statistics(observed)]
        }
        Advice::CompareWithDdp => vec![
            uncompressed.as_ref().map(|(remedy, _)| remedy.clone()),
            waits_for_statistics(observed),
        ],
        Advice::AverageLess { every } => vec![average_less(every, observed)],
        Advice::ChooseGathers { prefetch } => {
            let more =
                prefetch.and_then(|ahead| gather_more(ahead, anatomy, observed, negligible_ms));
            vec![more, waits_for_statistics(observed)]
        }
        Advice::ShardWith(_) => Vec::new(),
    };
    let remedy = best(remedies, least_ms);
    let account = Account::new(anatomy, remedy.as_ref());
    if account.is_mostly_waiting() && !compression_costs {
        let account = Account { remedy: Some("waiting".to_owned()), ..Account::new(anatomy, None) };
        let text = format!("{}. {}", account.words(), waiting(anatomy, observed));
        return Some(Told { text, account });
    }
    let mut sentences = vec![account.words()];
    if no_bucket_helps {
        sentences.push("No bucket size hides them".to_owned());
    }
    match &remedy {
        Some(remedy) => sentences.extend(remedy_words(remedy, anatomy)),
        None => sentences.push(match kind {
            _ if passes.and_then(Passes::unexplained_ms).is_some_and(|ms| ms > account.remains_ms / 2.0) => {
                "Operations take longer than their size explains: look for what else uses the cores or the network"
                    .to_owned()
            }
            Advice::ChooseBuckets if no_bucket_helps => {
                "More computation per step would hide them: pass a larger --batch-size".to_owned()
            }
            Advice::ShardWith(other) => format!(
                "The operations of {strategy} block. `--strategy {other}` divides the model too, and communicates \
                 while the ranks compute"
            ),
            Advice::CompareWithDdp => compression_words(anatomy, uncompressed.as_ref()),
            Advice::ChooseGathers { .. } => gather_words(anatomy),
            _ => no_gain(anatomy),
        }),
    }
    Some(Told { text: sentences.join(". "), account })
}

impl Account {
    fn new(anatomy: &Anatomy, remedy: Option<&Remedy>) -> Self {
        let exposed_ms = anatomy.exposed_ms;
        let waiting_ms = anatomy.exposed_wait_ms.min(exposed_ms);
        let transfer = exposed_ms - waiting_ms;
        // A change removes no more than there is, even if the steps that were replayed have more than the mean.
        let removed_ms = remedy.map_or(0.0, |remedy| remedy.removes_ms.min(transfer));
        Self {
            exposed_ms,
            waiting_ms,
            removed_ms,
            remains_ms: transfer - removed_ms,
            remedy: remedy.map(|remedy| remedy.change.clone()),
            gain: remedy.map(|remedy| remedy.gain),
            apart_ms: anatomy.apart_ms,
            costs_ms: remedy.and_then(|remedy| remedy.costs).map_or(0.0, |(_, ms)| ms),
            changes_weights: remedy.is_some_and(|remedy| remedy.changes_weights),
        }
    }

    /// Whether waiting is the largest part.
    fn is_mostly_waiting(&self) -> bool {
        self.waiting_ms > self.removed_ms.max(self.remains_ms)
    }

    /// Where the exposed time comes from, in a sentence.
    fn words(&self) -> String {
        let Self { exposed_ms, waiting_ms, removed_ms, remains_ms, .. } = self;
        let head = format!(
            "{exposed_ms:.2} ms of communication per step are exposed: {waiting_ms:.2} waiting for slower ranks"
        );
        match &self.remedy {
            Some(change) if self.gain.is_some() && *removed_ms >= 0.0 => format!(
                "{head}, {removed_ms:.2} that {change} would remove, and {remains_ms:.2} that would remain"
            ),
            _ => format!("{head}, and {:.2} of transfer", removed_ms + remains_ms),
        }
    }
}

/// What the step would gain, and what else a change does.
fn remedy_words(remedy: &Remedy, anatomy: &Anatomy) -> Vec<String> {
    let less = remedy.gain.words("less");
    let mut gain = match remedy.removes_ms < 0.0 {
        true => format!("With {} the step would take {less}", remedy.change),
        false => format!("The step would take {less}"),
    };
    if let Some((what, ms)) = remedy.costs {
        gain += &format!(", the {ms:.2} ms for {what} taken off");
    }
    let apart =
        anatomy.apart_ms.map(|ms| format!("Two runs like this one differ by at least {ms:.2} ms"));
    let sync_ms = anatomy.sync_ms;
    let compressing =
        (sync_ms > remedy.gain.ms / 2.0).then(|| format!("Compressing takes {sync_ms:.2} ms now"));
    let changes = remedy.changes_weights.then(|| "It changes the weights".to_owned());
    [Some(gain), apart, compressing, remedy.also.clone(), changes].into_iter().flatten().collect()
}

/// The sentence for steps whose noise hides every gain.
fn no_gain(anatomy: &Anatomy) -> String {
    let noise = anatomy.apart_ms.map_or_else(
        || "the steps differ from each other".to_owned(),
        |ms| format!("two runs like this one differ, which is about {ms:.2} ms"),
    );
    format!("No other setting would gain more than {noise}")
}

/// The sentences for a step that mostly waits.
fn waiting(anatomy: &Anatomy, observed: &Observed) -> String {
    let look = "look at what else runs on its cores, and at its share of the data";
    let Some(Slowest { rank, steps_pct, .. }) = anatomy.slowest else {
        return "Look for what else uses the cores".to_owned();
    };
    if steps_pct < BLAMED_PCT {
        return "The ranks take turns at being late: look for what else uses the cores".to_owned();
    }
    let cost = |step: &Seen| {
        let own = step.ranks.get(rank)?.waiting;
        let others = step.ranks.len().checked_sub(1).filter(|others| *others > 0)?;
        Some(step.ranks.iter().map(|of| of.waiting - own).sum::<f64>() / others as f64)
    };
    let blamed = format!("Most of the waiting is for rank {rank}: {look}");
    let least_ms = anatomy.apart_ms.unwrap_or(0.0);
    match Gain::of(observed.steps.iter().filter_map(cost)).filter(|gain| gain.holds(least_ms)) {
        Some(gain) => format!(
            "{blamed}. Were it as fast as the others, the step would take about {}",
            gain.words("less")
        ),
        None => blamed,
    }
}

/// Averages half as often. Waiting does not get less: ranks drift apart for longer.
fn average_less(every: usize, observed: &Observed) -> Option<Remedy> {
    let mean = observed.steps.iter().map(|step| step.exposed).sum::<f64>()
        / observed.steps.len().max(1) as f64;
    let averages = observed.steps.iter().filter(|step| step.exposed > mean / 2.0);
    let gain = Gain::of(averages.map(|step| (step.exposed - step.waiting) / 2.0 / every as f64))?;
    Some(Remedy {
        change: format!("`--sync-every {}`", 2 * every),
        removes_ms: gain.ms,
        gain,
        costs: None,
        also: None,
        changes_weights: true,
    })
}

/// The most units that advice lets be gathered ahead: each takes memory.
const MAX_PREFETCH: usize = 8;

/// More units gathered ahead.
fn gather_more(
    prefetch: usize,
    anatomy: &Anatomy,
    observed: &Observed,
    least_ms: f64,
) -> Option<Remedy> {
    let units = anatomy.gathers.iter().filter(|line| !line.is_backward).count();
    let most = MAX_PREFETCH.min(units.saturating_sub(1));
    let of_step = |step: &Seen| {
        let lines = anatomy.gathers.iter().zip(&step.gathers);
        let lines = lines.map(
            |(line, &[submitted_ms, sent_ms, present, done_ms, needed_ms, exposed_ms])| {
                let move_ms = done_ms - present;
                GatherLine {
                    submitted_ms,
                    sent_ms,
                    done_ms,
                    needed_ms,
                    exposed_ms,
                    move_ms,
                    ..line.clone()
                }
            },
        );
        let lines: Vec<GatherLine> = lines.collect();
        (lines.len() == anatomy.gathers.len()).then(|| Uses::measured(&lines, step.backward_end))?
    };
    let steps: Vec<Uses> = observed.alike().filter_map(of_step).collect();
    let more = (prefetch + 1..=most).map(|ahead| {
        let gain = Gain::of(steps.iter().map(|uses| uses.exposed(prefetch) - uses.exposed(ahead)))?;
        let memory = plural(ahead - prefetch, "more unit");
        Some(Remedy {
            change: format!("`--prefetch {ahead}`"),
            removes_ms: gain.ms,
            gain,
            costs: None,
            also: Some(format!("It takes the memory of {memory}")),
            changes_weights: false,
        })
    });
    best(more, least_ms / 2.0)
}

/// Why gathers stay exposed that no prefetch hides.
fn gather_words(anatomy: &Anatomy) -> String {
    let measured: f64 = anatomy.gathers.iter().map(|line| line.exposed_ms).sum();
    let gathering: f64 = anatomy.gathers.iter().map(|line| line.move_ms).sum();
    let largest = anatomy.gathers.iter().max_by(|a, b| a.move_ms.total_cmp(&b.move_ms));
    match largest {
        None => "Reductions and waiting are exposed".to_owned(),
        Some(_) if measured < anatomy.wall_ms * NEGLIGIBLE_PCT / 100.0 => format!(
            "{gathering:.2} ms of gathers per step are hidden but for {measured:.2}: what is exposed besides are \
             reductions and waiting"
        ),
        Some(line) if line.move_ms > gathering / 3.0 => format!(
            "Passes wait {measured:.2} ms for gathers. {} alone takes {:.2} of their {gathering:.2} ms, so smaller \
             units would hide better",
            line.unit, line.move_ms
        ),
        Some(_) => format!(
            "Passes wait {measured:.2} ms for gathers, which move data for {gathering:.2}. A larger batch gives them \
             more to hide behind"
        ),
    }
}

/// Whether compression pays.
fn compression_words(anatomy: &Anatomy, uncompressed: Option<&(Remedy, f64)>) -> String {
    let Some((Remedy { gain, .. }, least)) = uncompressed else {
        return no_gain(anatomy);
    };
    let head = format!(
        "Compressing takes {:.2} ms. Without it (`--strategy ddp`) about {least:.2} would be exposed",
        anatomy.sync_ms
    );
    let more = Gain { ms: -gain.ms, low_ms: -gain.high_ms, high_ms: -gain.low_ms, ..*gain };
    match more.holds(anatomy.wall_ms * NEGLIGIBLE_PCT / 100.0) {
        true => format!("{head}, and the step would take {}", more.words("more")),
        false => format!("{head}, and the step would take about as long"),
    }
}
