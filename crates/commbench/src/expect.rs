//! `--expect`: compares bus bandwidths with those of the link, or of an earlier file.
//!
//! A size counts if latency does not decide about its time. On a link, by the cost model, more than half of the time is for bytes.
//! In a file, it took at least twice as long as another size, or it is the largest one.

use paceline_collectives::{Link, OpKind};
use paceline_failure::{Result, usage};

use super::configuration::Configuration;
use super::plan::Plan;
use super::result::Row;
use super::series::Measured;

/// Checks before anything starts that there is an expectation for a size.
pub(super) fn check(plan: &Plan) -> Result<()> {
    let Some(part) = plan.output.expect else { return Ok(()) };
    let operation = plan.operation;
    if operation.kind == OpKind::Barrier || (plan.comm.link.is_none() && plan.compared.is_empty()) {
        return usage(format!(
            "--expect {part}: pass an operation with sizes, and --link LINK, or --compare FILE with an earlier report"
        ));
    }
    let counts = |of: Configuration<'_>| {
        let mut sizes = plan.sizes.iter().map(|&size| operation.bytes(size, of.nproc));
        sizes.any(|bytes| expected_us(of, bytes).is_some())
    };
    if plan.configurations().any(counts) {
        return Ok(());
    }
    usage(format!(
        "--expect {part}: {} has no {} of these sizes, ranks and transports in which latency does not decide; pass \
         larger sizes, or those of that file",
        whose(plan),
        operation.kind.name()
    ))
}

fn whose(plan: &Plan) -> &'static str {
    if plan.comm.link.is_some() { "the link" } else { "--compare" }
}

/// The time to expect in microseconds. `None` for a size that does not count.
fn expected_us(of: Configuration<'_>, bytes: u64) -> Option<f64> {
    let (plan, kind) = (of.plan, of.plan.operation.kind);
    if let Some(link) = plan.comm.link {
        let algorithm = plan.comm.algorithm.recommended(kind, of.nproc, bytes, &link);
        let us = |link: Link| link.time(kind, algorithm, of.nproc, bytes).as_secs_f64() * 1e6;
        let whole = us(link);
        return (2.0 * us(Link { latency_s: 0.0, ..link }) > whole).then_some(whole);
    }
    let is_like = |one: &&Measured| {
        let is_ours = |own| own == of.algorithm() && one.name.starts_with(of.transport.name());
        (one.bytes, one.nproc) == (bytes, of.nproc)
            && one.is_of(kind.name())
            && one.algorithm.as_deref().is_none_or(is_ours)
    };
    let counts = |one: &&Measured| {
        let mut beside = plan.compared.iter().filter(|other| other.is_beside(one));
        beside.clone().all(|other| other.bytes <= bytes)
            || beside.any(|other| one.time_us >= 2.0 * other.time_us)
    };
    let like = plan.compared.iter().filter(is_like).filter(counts);
    like.map(|one| one.time_us).reduce(f64::min)
}

/// The outcome in words, and whether each size that counts reaches this part of its expectation.
pub(super) fn verdict(plan: &Plan, rows: &[Row], part: f64) -> (String, bool) {
    let reached = |row: &Row| {
        let is_its =
            |of: &Configuration<'_>| (of.transport.name(), of.nproc) == (&row.transport, row.nproc);
        let expected_us = expected_us(plan.configurations().find(is_its)?, row.bytes)?;
        Some(expected_us / row.timing().median_us)
    };
    let counted: Vec<(&Row, f64)> =
        rows.iter().filter_map(|row| Some((row, reached(row)?))).collect();
    let mut text = format!("{} measured sizes at which latency does not decide", counted.len());
    let mut how = "Bus bandwidth: at least";
    for (Row { bytes, nproc, transport, .. }, reached) in
        counted.iter().filter(|(_, of)| *of < part)
    {
        how = "Bus bandwidth below";
        text += &format!(
            "\n  {bytes} B, {nproc} ranks over {transport}: {reached:.3} of the expectation"
        );
    }
    let is_reached = !counted.is_empty() && counted.iter().all(|(_, of)| *of >= part);
    (format!("{how} {part} of {}'s, of {text}", whose(plan)), is_reached)
}
