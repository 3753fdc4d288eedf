//! Names for people in reports of ranks that have computed on a CPU.
//!
//! A [`Report`] goes in, and its charts and tables come out with plain names. Traces of paceline name communication and
//! launches as CUDA does, because Holistic Trace Analysis finds them by these names. Nothing in such a run
//! is CUDA, so a report says what it is instead.

use crate::report::chart::Chart;
use crate::report::{Body, Report};
use crate::table::Cell;
use crate::timeline::Timeline;

/// Whether the ranks have computed on a device that is emulated.
pub(super) fn are_emulated(timelines: &[Timeline]) -> bool {
    timelines.iter().any(|timeline| timeline.run_facts.contains_key("emulated_device"))
}

/// Whether the ranks have computed on a CPU: those of paceline, and those whose traces have operators but no kernels.
pub(super) fn are_of_cpu(timelines: &[Timeline]) -> bool {
    timelines.iter().any(|timeline| timeline.run_facts.contains_key("lanes"))
        || timelines.iter().any(|timeline| !timeline.operators.is_empty())
            && !timelines
                .iter()
                .any(|of| of.has_device_work() || of.names_a_card() || of.lost_kernels())
}

/// The name for people.
pub(super) fn plain(name: &str) -> Option<String> {
    if let Some(operation) = name.strip_prefix("ncclDevKernel_") {
        // `AllReduce_Sum_f32_Shm` is `all_reduce sum f32 shm`.
        let (first, rest) = operation.split_once('_').unwrap_or((operation, ""));
        let mut plain = String::new();
        for letter in first.chars() {
            if letter.is_uppercase() && !plain.is_empty() {
                plain.push('_');
            }
            plain.extend(letter.to_lowercase());
        }
        let words = rest.split('_').filter(|word| !word.is_empty());
        words.for_each(|word| plain = format!("{plain} {}", word.to_lowercase()));
        return Some(plain);
    }
    match name {
        "cudaLaunchKernel" => Some("start of work".to_owned()),
        "Memcpy HtoH (Pageable -> Pageable)" => Some("copy".to_owned()),
        _ => None,
    }
}

/// Puts plain names into all charts and tables.
pub(super) fn make_plain(report: &mut Report) {
    let rename = |name: &mut String| {
        if let Some(plain) = plain(name) {
            *name = plain;
        }
    };
    for panel in report.sections.iter_mut().flat_map(|section| &mut section.panels) {
        match &mut panel.body {
            Body::Chart(Chart::Rows(all)) => {
                for row in &mut all.rows {
                    rename(&mut row.label);
                    row.segments.iter_mut().for_each(|segment| rename(&mut segment.name));
                }
            }
            Body::Chart(Chart::Lines(all)) => {
                all.series.iter_mut().for_each(|line| rename(&mut line.name));
            }
            Body::Table(table) => {
                for cell in table.rows.iter_mut().flatten() {
                    if let Cell::Text(text) = cell {
                        rename(text);
                    }
                }
            }
            Body::Nothing(_) => {}
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_say_what_happens_on_a_cpu() {
        let all = [
            ("ncclDevKernel_AllReduce_Sum_f32_Shm", "all_reduce sum f32 shm"),
            ("ncclDevKernel_ReduceScatter_Avg_bf16_Tcp", "reduce_scatter avg bf16 tcp"),
            ("ncclDevKernel_Broadcast_f32_Hybrid", "broadcast f32 hybrid"),
            ("cudaLaunchKernel", "start of work"),
            ("Memcpy HtoH (Pageable -> Pageable)", "copy"),
        ];
        for (name, expected) in all {
            assert_eq!(plain(name).as_deref(), Some(expected));
        }
        assert_eq!(plain("conv2d_forward"), None);
    }
}
