//! The critical path of one rank, on timelines whose answers are known.

use crate::common::{Build, NCCL, OTHER, timeline, us};
use paceline_analysis::hta::{BoundBy, CriticalPath, Options, analyze};
use paceline_analysis::timeline::Timeline;

fn path(build: Timeline) -> CriticalPath {
    let analysis = analyze(&[build], &Options::default()).unwrap();
    analysis.ranks[0].critical_path.clone().unwrap()
}

fn bound(path: &CriticalPath, by: BoundBy) -> i64 {
    path.by_bound.iter().find(|of| of.0 == by).map_or(0, |of| of.1)
}

/// Name and length, in microseconds, of every piece that takes time.
fn pieces(path: &CriticalPath) -> Vec<(&str, i64)> {
    let timed = path.edges.iter().filter(|edge| edge.dur_ns > 0);
    timed.map(|edge| (edge.name.as_str(), edge.dur_ns / 1000)).collect()
}

#[test]
fn from_the_operator_through_launch_and_kernels() {
    let build = timeline(0)
        .operator("aten::mm", 0.0, 20.0)
        .launched("gemm", 7, 5.0, 8.0, 10.0, 60.0)
        .operator("aten::relu", 20.0, 40.0)
        .launched("relu", 7, 25.0, 28.0, 63.0, 70.0);
    let path = path(build);
    assert_eq!((path.step, path.total_ns), (None, 70_000));
    // The launch delay counts from the start of the call.
    let expected = [("aten::mm", 5), ("gemm", 5), ("gemm", 50), ("gemm", 3), ("relu", 7)];
    assert_eq!(pieces(&path), expected);
    assert_eq!(bound(&path, BoundBy::Cpu), 5_000);
    assert_eq!(bound(&path, BoundBy::LaunchDelay), 5_000);
    assert_eq!(bound(&path, BoundBy::KernelGap), 3_000);
    assert_eq!(path.by_bound[0], (BoundBy::GpuCompute, 57_000));
    assert_eq!((path.by_name[0].name.as_str(), path.by_name[0].pieces), ("gemm", 1));
}

#[test]
fn time_between_operators_within_another_is_the_outer_one_s() {
    let build = timeline(0)
        .operator("outer", 0.0, 100.0)
        .operator("inner", 10.0, 30.0)
        .operator("inner", 60.0, 90.0)
        .operator("next", 150.0, 160.0)
        .operator_on(OTHER, "aside", us(0.0, 105.0))
        .kernel("gemm", 7, 300.0, 301.0);
    let path = path(build);
    // Nothing accounts for the 50 us between `outer` and `next`.
    let expected = [
        ("outer", 10),
        ("inner", 20),
        ("outer", 30),
        ("inner", 30),
        ("outer", 10),
        ("next", 10),
        ("gemm", 2),
        ("gemm", 1),
    ];
    assert_eq!(pieces(&path), expected);
    assert_eq!((path.total_ns, bound(&path, BoundBy::Cpu)), (113_000, 110_000));
}

#[test]
fn a_wait_for_a_stream_leads_back_to_the_host() {
    let build = timeline(0)
        .step(1, 0.0, 200.0)
        .operator("aten::mm", 0.0, 10.0)
        .launched(NCCL, 20, 2.0, 4.0, 5.0, 90.0)
        .call("cudaStreamSynchronize", 50, 20.0, 92.0)
        .wait("Stream Sync", 20, 50, 21.0, 91.0)
        .operator("optimizer", 95.0, 140.0)
        .step(2, 200.0, 300.0);
    let path = path(build);
    assert_eq!(path.step, Some(1));
    // A blocked call takes no time of its own.
    let expected = [("aten::mm", 2), (NCCL, 3), (NCCL, 85), ("optimizer", 45)];
    assert_eq!(pieces(&path), expected);
    assert_eq!(bound(&path, BoundBy::GpuCommunication), 85_000);
    assert_eq!(path.edges.iter().filter(|edge| edge.bound_by.is_none()).count(), 2);
}

#[test]
fn a_wait_for_the_device_leads_to_the_streams_that_ended_last() {
    let mut build = timeline(0).operator("aten::mm", 0.0, 310.0);
    for stream in 0..300i64 {
        let at = stream as f64;
        let (name, end) = if stream == 299 { ("last", at + 201.0) } else { ("gemm", at + 2.0) };
        build = build.launched(name, stream, at, at + 0.5, at + 1.0, end);
    }
    let build = build
        .call("cudaDeviceSynchronize", 1000, 311.0, 505.0)
        .wait("Context Sync", -1, 1000, 312.0, 504.0)
        .operator("optimizer", 510.0, 550.0);
    let path = path(build);
    let pieces = pieces(&path);
    assert_eq!(pieces[pieces.len() - 2..], [("last", 200), ("optimizer", 40)]);
}

#[test]
fn one_stream_waits_for_another() {
    let build = timeline(0)
        .step(1, 0.0, 200.0)
        .operator("backward", 0.0, 30.0)
        .launched("gemm", 7, 2.0, 4.0, 5.0, 60.0)
        .call("cudaEventRecord", 50, 6.0, 7.0)
        .call("cudaStreamWaitEvent", 51, 8.0, 9.0)
        .wait("Stream Wait Event", 20, 51, 10.0, 11.0)
        .waits_for(7, 50)
        .launched(NCCL, 20, 12.0, 14.0, 62.0, 100.0)
        // A later kernel of stream 7, launched after the event was recorded: the wait does not include it.
        .launched("relu", 7, 16.0, 17.0, 61.0, 62.0)
        .step(2, 200.0, 300.0);
    let path = path(build);
    assert_eq!(pieces(&path), [("backward", 2), ("gemm", 3), ("gemm", 55), (NCCL, 38)]);
}

#[test]
fn work_that_waits_for_itself_is_said() {
    // The device says that the wait lasted until the kernel had ended. The host says that the wait was over
    // before it launched the kernel.
    let build = timeline(0)
        .operator("aten::mm", 10.0, 40.0)
        .call("cudaStreamSynchronize", 50, 11.0, 12.0)
        .wait("Stream Sync", 7, 50, 11.0, 90.0)
        .launched("gemm", 7, 20.0, 21.0, 25.0, 80.0);
    let analysis = analyze(&[build], &Options::default()).unwrap();
    assert!(analysis.ranks[0].critical_path.is_none());
    assert!(analysis.notes.iter().any(|note| note.contains("waits for itself")));
}

#[test]
fn launches_without_a_duration_count_where_the_trace_has_no_others() {
    let build = timeline(0)
        .operator("paceline::conv2d", 0.0, 30.0)
        .launched("conv2d", 7, 0.0, 0.0, 0.0, 30.0)
        .launched(NCCL, 20, 30.0, 30.0, 31.0, 90.0);
    let path = path(build);
    assert_eq!(bound(&path, BoundBy::GpuCommunication), 59_000);
    // If another launch has a duration, those without one are left out, as in HTA.
    let build = timeline(0)
        .operator("aten::mm", 0.0, 30.0)
        .launched("gemm", 7, 0.0, 0.0, 0.0, 90.0)
        .launched("relu", 7, 1.0, 2.0, 90.0, 91.0);
    assert_eq!(bound(&self::path(build), BoundBy::GpuCompute), 1_000);
}
