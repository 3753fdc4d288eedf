//! Whether a trace has steps with work.
//!
//! PyTorch's profiler writes a last trace with an empty step if a schedule without `repeat` begins another cycle when
//! the program ends. Reading stops as soon as there is a good deal of work, so a long trace is not read to its end.

use std::path::Path;

use super::events::Reader;
use super::file::with_json;
use super::top::each_list;
use crate::TraceError;
use crate::json::Pull;
use crate::timeline::{TimeRange, Timeline};

/// A trace with this many operators and kernels has work: loading a batch takes fewer.
const ENOUGH: usize = 10_000;

/// Whether a trace has steps with work: a kernel, or an operator that does not only load data. A trace that names no
/// steps counts as one step.
pub(super) fn has_work(path: &Path) -> Result<bool, TraceError> {
    with_json(path, |input| {
        let mut reader = Reader::default();
        match each_list(&mut Pull::new(input), |pull| reader.events(pull, ENOUGH)) {
            Ok(true) => Ok(true),
            // The events before the end of a file that is cut off count.
            Err(err) if !err.is_cut_off() => Err(err),
            _ => Ok(works(&reader.finish())),
        }
    })
}

fn works(timeline: &Timeline) -> bool {
    let is_loading = |name: &str| name.starts_with("enumerate(DataLoader)");
    let spans = timeline.annotations.iter().filter(|of| is_loading(timeline.names.text(of.name)));
    let loading: Vec<TimeRange> = spans.map(|span| span.time).collect();
    let loads = |time: TimeRange| {
        let holds =
            |span: &TimeRange| span.start_ns <= time.start_ns && time.end_ns() <= span.end_ns();
        loading.iter().any(holds)
    };
    timeline.has_device_work() || timeline.operators.iter().any(|operator| !loads(operator.time))
}
