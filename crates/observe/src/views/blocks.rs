//! The text of a run that has ended: its result in a few lines, and the details. A view of the table of figures, which
//! gives names, units and decimals.

use paceline_analysis::advice::blame::{BLAMED_PCT, Slowest};
use paceline_analysis::limit::FEW;
use paceline_collectives::Transport;
use paceline_host::text::{plural, thousands};
use paceline_kernels::needed_for_same_bits;
use paceline_launch::device::Device;
use paceline_memory::Category;
use paceline_settings::named::PrecisionName;
use paceline_table::stats::noise_words;
use paceline_table::table::{Cell, Columns};

use crate::figures::facts::Facts;
use crate::figures::figure::Figure;
use crate::figures::table::{TABLE, printed};
use crate::insight::anatomy::{Anatomy, BucketLine, GatherLine};
use crate::record::memory::TOTAL;
use crate::record::op_moments::OpMoments;
use crate::record::ranks::Ranks;
use crate::record::steps::AllSteps;
use crate::views::console::answer_lines;
use crate::views::memory_lines::memory_lines;
use crate::views::{pipeline_lines, step_lines};

/// A number of a run as it is shown; a dash if nothing was measured.
fn number(facts: &Facts, name: &str) -> String {
    value(facts, name).map_or("-".to_owned(), |value| printed(name).shown(value))
}

/// A number of a run, if it was measured.
fn value(facts: &Facts, name: &str) -> Option<f64> {
    printed(name).of_run(facts)?.as_f64()
}

/// A number of a run with its unit; a dash if nothing was measured.
fn amount(facts: &Facts, name: &str) -> String {
    value(facts, name).map_or("-".to_owned(), |value| printed(name).with_unit(value))
}

/// A number of a run with commas between thousands, and its label; a dash if nothing was measured.
fn labeled(facts: &Facts, name: &str) -> String {
    let head = printed(name).head();
    let number = value(facts, name).map_or("-".to_owned(), |of| Cell::Number(of).shown(&head));
    format!("{number} {}", head.label)
}

/// Why nothing was measured.
fn unmeasured(facts: &Facts) -> String {
    let steps = plural(facts.outcome.num_steps as usize, "step");
    let warmup = facts.config.warmup_steps;
    format!("{steps} ran, all within --warmup-steps {warmup}: nothing was measured")
}

/// The end of a run: its result, where its time went, the change to make, and what its figures are worth. Tables fit `width`.
pub(crate) fn end_lines(facts: &Facts, width: Option<usize>) -> Vec<String> {
    let mut lines: Vec<String> = Vec::new();
    if let Some(steps) = facts.outcome.stopped_after {
        lines.push(format!(
            "Stopped after step {} of {}, by a signal: all figures are of the steps so far",
            thousands(steps),
            thousands(facts.config.total_steps())
        ));
    }
    lines.extend(answer_lines(facts));
    if facts.steps.count() == 0 {
        lines.push(format!("Total time: {}", amount(facts, "total_s")));
        lines.push(unmeasured(facts));
    } else {
        lines.extend(step_times(facts, width));
    }
    lines.extend(noise_words(value(facts, "cpu_wait_pct"), value(facts, "step_apart_pct")));
    lines.extend(link_line(facts));
    lines.extend(facts.told.iter().map(|told| format!("Advice: {}.", told.text)));
    if let Some(cost) = &facts.sync_cost {
        lines.push(format!(
            "Synchronization: {:.3} ms per step with it, {:.3} without (medians, in turns): {:+.2} %",
            cost.synchronized_ms, cost.unsynchronized_ms, cost.added_pct
        ));
    }
    lines.push(memory_line(facts));
    lines.extend(card_line(facts));
    let digest = facts.reports.first().map_or("", |report| &report.weights_sha256);
    lines.push(format!("Weights: sha256 {digest}"));
    lines.extend(scope_line(facts));
    if !facts.replicas_agree() {
        lines.push(format!(
            "The ranks hold different weights, as {} leaves them; those of rank 0 count",
            match facts.sync_cost {
                Some(_) => "a step without synchronization",
                None => facts.config.strategy.name(),
            }
        ));
    }
    let dropped = value(facts, "dropped_spans").unwrap_or(0.0);
    if dropped > 0.0 {
        lines.push(format!(
            "{dropped} spans or operations found no room; times and counts are too low"
        ));
    }
    lines
}

/// Where the same run ends with the same weights. Cards and other libraries add up in orders of their own.
fn scope_line(facts: &Facts) -> Option<String> {
    let is_others = matches!(facts.config.device, Device::Cuda(_))
        || matches!(facts.outcome.transport, Transport::Mpi | Transport::Nccl);
    let needed = needed_for_same_bits(facts.config.precision == PrecisionName::Bf16);
    let layouts = facts.config.micro_batches.as_ref();
    let layouts = layouts.map_or(String::new(), |of| format!("any layout of {}, ", of.words()));
    (!is_others).then(|| {
        format!("  (the same with {layouts}any --threads, on any processor with {needed})")
    })
}

/// The speed of the measured steps, and where their time went.
fn step_times(facts: &Facts, width: Option<usize>) -> Vec<String> {
    let amount = |name| amount(facts, name);
    let tokens = value(facts, "tokens_per_s")
        .map_or(String::new(), |_| format!(", {}", labeled(facts, "tokens_per_s")));
    let mut lines = vec![
        format!("Total time: {}; {}{tokens}", amount("total_s"), labeled(facts, "samples_per_s")),
        format!(
            "Step: {} median, {} p99 over {} steps",
            amount("step_ms_median"),
            amount("step_ms_p99"),
            thousands(facts.steps.count()),
        ),
        format!(
            "Compute time: {}; communication: {}; exposed communication: {} of the step",
            amount("compute_ms"),
            amount("comm_ms"),
            amount("comm_overhead_pct")
        ),
    ];
    if has_anatomy(facts) {
        lines.extend(step_lines::drawing(facts, width));
    }
    lines.extend(facts.pipeline.iter().flat_map(|of| pipeline_lines::ledger(of, width)));
    lines
}

/// The peak of each category of memory that is not zero.
fn peak_line(facts: &Facts) -> String {
    let peaks = facts.peak_bytes(printed("peak_bytes").ranks);
    let categories = Category::ALL.into_iter().map(Category::name).chain([TOTAL]);
    let shown = categories.filter_map(|name| {
        let mb = format!("{:.2}", *peaks.get(name)? as f64 / 1e6);
        (mb != "0.00").then(|| format!("{name} {mb}"))
    });
    format!("Peak memory per rank, MB: {}", shown.collect::<Vec<_>>().join(", "))
}

/// The most memory in tensors, and the resident memory beside its prediction.
fn memory_line(facts: &Facts) -> String {
    let peak = facts.peak_bytes(printed("peak_bytes").ranks).get(TOTAL).copied().unwrap_or(0);
    let resident = value(facts, "resident_bytes").unwrap_or(0.0);
    let predicted = facts.predicted_resident_bytes().map_or(String::new(), |bytes| {
        let off = 100.0 * (resident / bytes - 1.0);
        format!(", predicted {:.1} MB ({off:+.1} %)", bytes / 1e6)
    });
    let [peak, resident] = [peak as f64, resident].map(|bytes| bytes / 1e6);
    format!("Memory of a rank: {peak:.2} MB in tensors, {resident:.1} MB resident{predicted}")
}

/// The details: where the time of a step goes, operation by operation, and the memory of each rank by phase.
pub(crate) fn detail_lines(facts: &Facts, width: Option<usize>) -> Vec<String> {
    let mut lines = Vec::new();
    lines.extend(value(facts, "mfu_pct").map(|_| {
        format!(
            "Model FLOP/s: {} G per rank, {} of the peak of {}, {} G",
            number(facts, "model_gflop_per_s"),
            amount(facts, "mfu_pct"),
            plural(facts.config.threads, "thread"),
            number(facts, "peak_gflop_per_s")
        )
    }));
    if let Some(operations) = facts.operations() {
        lines.push(operations.sentence());
        lines.push(operations.table(FEW).fitted(width));
    }
    if has_anatomy(facts) {
        let anatomy = &facts.anatomy;
        lines.extend(anatomy_lines(&facts.steps, anatomy, width));
        lines.extend((!anatomy.buckets.is_empty()).then(|| bucket_table(anatomy, width)));
        lines.extend((!anatomy.gathers.is_empty()).then(|| gather_table(anatomy, width)));
        lines.extend(unlike_line(facts));
    }
    if let Some(pipeline) = &facts.pipeline {
        lines.extend(pipeline_lines::drawings(pipeline, width));
    }
    lines.push(peak_line(facts));
    lines.extend(memory_lines(facts, width));
    lines
}

/// Whether the parts of a step have a meaning: not without measurements, nor if two kinds of steps alternate.
pub(crate) fn has_anatomy(facts: &Facts) -> bool {
    facts.steps.count() > 0 && facts.sync_cost.is_none()
}

/// How many steps the times of single operations and gradients leave out, if any.
fn unlike_line(facts: &Facts) -> Option<String> {
    let num_unlike = value(facts, "unlike_steps").unwrap_or(0.0);
    (num_unlike > 0.0).then(|| {
        format!(
            "{} of {} steps have other operations or gradients than the first one: the times of buckets and \
             gradients leave them out",
            thousands(num_unlike as u64),
            thousands(facts.steps.count())
        )
    })
}

/// How busy the cards were and their memory, or why that is not known; `None` on other devices, and without measurements.
fn card_line(facts: &Facts) -> Option<String> {
    let busy = value(facts, "card_busy_pct").map(|of| printed("card_busy_pct").with_unit(of));
    let used = value(facts, "card_used_bytes").map(|of| format!("{:.1} MB used", of / 1e6));
    let known: Vec<String> = busy.map(|of| format!("busy {of}")).into_iter().chain(used).collect();
    let missing = facts.cards().find_map(|card| card.missing.as_deref());
    let missing = missing.map(|reason| {
        if known.is_empty() {
            format!("how busy it is and its memory are not known: {reason}")
        } else {
            format!("the rest is not known: {reason}")
        }
    });
    let parts: Vec<String> = known.into_iter().chain(missing).collect();
    (!parts.is_empty()).then(|| format!("Card: {}", parts.join(", ")))
}

/// Says that the emulated link was not kept, from a twentieth of a step. (On busy cores, the sending thread wakes up late
/// by some hundredths.)
fn link_line(facts: &Facts) -> Option<String> {
    let late_ms = value(facts, "link_late_ms")?;
    (late_ms >= 0.05 * value(facts, "wall_ms")?).then(|| {
        format!(
            "Emulated link: operations of a step end {} later in all than the link allows; this machine is too slow for it",
            amount(facts, "link_late_ms")
        )
    })
}

/// Where the time of a step goes.
fn anatomy_lines(steps: &AllSteps, anatomy: &Anatomy, width: Option<usize>) -> Vec<String> {
    let wall = [printed("wall_ms")];
    let parts = TABLE.iter().filter(|figure| figure.is_part_of_step).chain(wall);
    let ms = |figure: &Figure| figure.of_steps(steps).unwrap_or(0.0);
    // A part that takes no time is left out.
    let rows = parts.map(|figure| (figure, ms(figure)));
    let rows = rows.filter(|(figure, ms)| figure.shown(*ms) != "0.00");
    let wall_ms = anatomy.means.wall_ms;
    let rows = Columns::new()
        .add("", "Main thread", ("", 0), "", |(figure, _): &(&Figure, f64)| figure.label)
        .add("", "ms", ("", 2), "", |(_, ms)| *ms)
        .add("", "%", ("", 1), "", move |(_, ms)| 100.0 * ms / wall_ms)
        .table(rows)
        .fitted(width);
    let mut lines = vec!["Anatomy of a step, means over ranks and steps:".to_owned(), rows];
    if let Some(hidden) = steps.pct(Ranks::Mean, |t| t.hidden, |t| t.communicating) {
        let mean = |name| printed(name).with_unit(printed(name).of_steps(steps).unwrap_or(0.0));
        lines.push(format!(
            "Communication {}, {hidden:.0} % hidden; waiting for the slowest rank {}",
            mean("comm_ms"),
            mean("comm_wait_ms")
        ));
    }
    if !anatomy.statistics.is_empty() {
        lines.push(format!(
            "Synchronized batch norm: {}, for which the passes wait {:.2} ms per step",
            plural(anatomy.statistics.len(), "all-reduce"),
            anatomy.statistics.iter().map(|op| op.done_ms - op.ready_ms).sum::<f64>()
        ));
    }
    // Otherwise the ranks take turns, as they do beside other work.
    let slowest = anatomy.slowest.filter(|of| of.steps_pct >= BLAMED_PCT);
    if let Some(Slowest { rank, steps_pct, cost_ms }) = slowest {
        lines.push(format!(
            "Slowest: rank {rank}, last in {steps_pct:.0} % of steps; each other rank waits {cost_ms:.2} ms for it"
        ));
    }
    lines
}

fn gather_table(anatomy: &Anatomy, width: Option<usize>) -> String {
    let (words, two) = (("", 0), ("", 2));
    // Without a gather the unit was still there.
    let of_op = |get: fn(&OpMoments) -> f64| {
        move |of: &GatherLine| Some(&of.op).filter(|op| op.bytes > 0).map(get)
    };
    let table = Columns::new()
        .add("", "Unit", words, "", |of: &GatherLine| of.unit.clone())
        .add("", "Pass", words, "", |of| {
            let pass = if of.is_backward { "backward" } else { "forward" };
            format!("{pass}{}", if of.op.bytes > 0 { "" } else { ", kept" })
        })
        .add("", "MB", two, "", of_op(|op| op.bytes as f64 / 1e6))
        .add("", "Submitted (ms)", two, "", of_op(|op| op.ready_ms))
        .add("", "Started (ms)", two, "", of_op(|op| op.sent_ms))
        .add("", "Done (ms)", two, "", of_op(|op| op.done_ms))
        .add("", "Needed (ms)", two, "", |of| of.needed_ms)
        .add("", "Exposed (ms)", two, "", |of| of.exposed_ms)
        .table(&anatomy.gathers);
    format!(
        "Units (ms after the batch arrived; backward ends at {:.2} ms):\n{}",
        anatomy.backward_end_ms,
        table.fitted(width)
    )
}

fn bucket_table(anatomy: &Anatomy, width: Option<usize>) -> String {
    let (whole, two) = (("", 0), ("", 2));
    let table = Columns::new()
        .add("", "Bucket", whole, "", |(at, _): &(usize, &BucketLine)| *at)
        .add("", "MB", two, "", |(_, of)| of.op.bytes as f64 / 1e6)
        .add("", "Ready (ms)", two, "", |(_, of)| of.op.ready_ms)
        .add("", "Started (ms)", two, "", |(_, of)| of.op.sent_ms)
        .add("", "Done (ms)", two, "", |(_, of)| of.op.done_ms)
        .add("", "Hidden (%)", whole, "", |(_, of)| of.op.hidden_pct())
        .add("", "Gradients of", whole, "", |(_, of)| of.units.join(" "))
        .table(anatomy.buckets.iter().enumerate());
    format!(
        "Buckets (ms after the batch arrived; backward ends at {:.2} ms):\n{}",
        anatomy.backward_end_ms,
        table.fitted(width)
    )
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::insight::anatomy::tests::report;

    #[test]
    fn the_lines_of_a_run() {
        let layout = paceline_model::LayoutBuilder::new().finish(1);
        let reports = [report(&[1, 1]), report(&[2, 2])];
        let steps = AllSteps::new(reports.iter().map(|report| &report.steps));
        let anatomy = Anatomy::new(&steps, &reports, &layout, &[vec!["fc1".into(), "fc0".into()]]);
        insta::assert_snapshot!(anatomy_lines(&steps, &anatomy, None).join("\n"));
    }

    #[test]
    fn every_figure_of_the_console_is_in_the_table() {
        let text = [include_str!("blocks.rs"), include_str!("console.rs")].concat();
        let calls = ["number(\"", "amount(\"", "(facts, \"", "printed(\""];
        let names = calls.iter().flat_map(|call| text.split(call).skip(1));
        let names: Vec<&str> = names.filter_map(|rest| rest.split('"').next()).collect();
        assert!(names.len() > 10, "{names:?}");
        for name in names
            .into_iter()
            .filter(|name| name.chars().all(|c| c.is_ascii_lowercase() || c == '_'))
        {
            assert!(crate::figures::table::find(name).is_some(), "{name}");
        }
    }
}
