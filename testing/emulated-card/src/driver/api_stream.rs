//! Streams, events, captures and graphs.

use crate::boundary::{OutPtr, Status, export};
use crate::cupti::called;

use super::graph::{CaptureMode, GraphRun};
use super::state::{Driver, EmulatedEvent, Recording, enter, enter_stream, guard};
use super::streams::{EmulatedStream, Needed, query, wait};
use super::work::CardWork;

/// `CU_STREAM_NON_BLOCKING`
const NON_BLOCKING: u32 = 1;
/// `CU_EVENT_DISABLE_TIMING`
const DISABLE_TIMING: u32 = 2;

/// The work before an event. An event that was never recorded has none.
fn before_event(driver: &mut Driver, handle: usize, call: &str) -> Result<Needed, Status> {
    match &driver.objects.events.get(&handle).ok_or(Status::INVALID_HANDLE)?.recorded {
        Recording::Never => Ok(Needed::new()),
        Recording::Stream { stream, number } => Ok(Needed::from([(*stream, *number)])),
        Recording::Capture { capture, .. } => {
            let id = *capture;
            if let Some(capture) = driver.objects.captures.get_mut(&id) {
                capture.invalid = true;
            }
            let why = format!("{call} of an event that was recorded in a capture");
            Err(driver.refuse(Status::CAPTURED_EVENT, why))
        }
    }
}

fn create_stream(stream: OutPtr<usize>, flags: u32) -> Result<(), Status> {
    let (mut driver, card) = enter()?;
    if flags > 1 || stream.is_null() {
        return Err(Status::INVALID_VALUE);
    }
    let handle = driver.objects.handle();
    driver.objects.streams.insert(handle, EmulatedStream::new(card, flags & NON_BLOCKING == 0));
    stream.set(handle);
    Ok(())
}

fn elapsed(milliseconds: OutPtr<f32>, start: usize, end: usize) -> Result<(), Status> {
    let (mut driver, _) = enter()?;
    let mut times = Vec::new();
    for handle in [start, end] {
        let needed = before_event(&mut driver, handle, "cuEventElapsedTime")?;
        let event = driver.objects.events.get(&handle).ok_or(Status::INVALID_HANDLE)?;
        if !event.has_time || needed.is_empty() {
            return Err(Status::INVALID_HANDLE);
        }
        times.push(event.at.ok_or(Status::NOT_READY)?);
    }
    let time = match times[1].checked_duration_since(times[0]) {
        Some(time) => time.as_secs_f32(),
        None => -times[0].duration_since(times[1]).as_secs_f32(),
    };
    milliseconds.give(time * 1e3, Status::INVALID_VALUE)
}

export! { guard;
fn cuStreamCreate(stream: OutPtr<usize>, flags: u32) { create_stream(stream, flags) }
/// A new stream; its priority has no effect.
fn cuStreamCreateWithPriority(stream: OutPtr<usize>, flags: u32, _priority: i32) {
    create_stream(stream, flags)
}
/// Ends a stream. Its work still runs when somebody waits for it.
fn cuStreamDestroy_v2(stream: usize) {
    let (mut driver, _, handle) = enter_stream(stream)?;
    if Driver::is_null_stream(handle) {
        return Err(Status::INVALID_HANDLE);
    }
    let _ = driver.refuse_captured(handle, "cuStreamDestroy");
    if let Some(stream) = driver.objects.streams.get_mut(&handle) {
        stream.destroyed = true;
    }
    driver.bury(handle);
    Ok(())
}
/// Runs the stream's work.
fn cuStreamSynchronize(stream: usize) {
    let (mut driver, card, stream) = enter_stream(stream)?;
    driver.refuse_captured(stream, "cuStreamSynchronize")?;
    let needed = driver.all_of(stream);
    called(126, || wait(driver, card, needed)).0
}
fn cuStreamQuery(stream: usize) {
    let (mut driver, card, stream) = enter_stream(stream)?;
    driver.refuse_captured(stream, "cuStreamQuery")?;
    let needed = driver.all_of(stream);
    query(driver, card, needed)
}
fn cuStreamWaitEvent(stream: usize, event: usize, _flags: u32) {
    let (mut driver, _, stream) = enter_stream(stream)?;
    driver.wait_event(stream, event)
}
fn cuEventCreate(event: OutPtr<usize>, flags: u32) {
    let (mut driver, card) = enter()?;
    if event.is_null() {
        return Err(Status::INVALID_VALUE);
    }
    let handle = driver.objects.handle();
    let has_time = flags & DISABLE_TIMING == 0;
    let new = EmulatedEvent { card, has_time, recorded: Recording::Never, at: None };
    driver.objects.events.insert(handle, new);
    event.set(handle);
    Ok(())
}
/// Ends an event. What waits for it still does.
fn cuEventDestroy_v2(event: usize) {
    let (mut driver, _) = enter()?;
    driver.objects.events.remove(&event).map(|_| ()).ok_or(Status::INVALID_HANDLE)
}
fn cuEventRecord(event: usize, stream: usize) {
    let (mut driver, _, stream) = enter_stream(stream)?;
    let owner = driver.objects.events.get(&event).ok_or(Status::INVALID_HANDLE)?.card;
    if driver.objects.streams.get(&stream).is_none_or(|s| s.card != owner) {
        return Err(driver.refuse(Status::INVALID_HANDLE, "event and stream are of different cards"));
    }
    driver.record_event(event, stream)
}
fn cuEventQuery(event: usize) {
    let (mut driver, card) = enter()?;
    let needed = before_event(&mut driver, event, "cuEventQuery")?;
    driver.refuse_unsafe("cuEventQuery")?;
    query(driver, card, needed)
}
/// Runs the work before an event.
fn cuEventSynchronize(event: usize) {
    let (mut driver, card) = enter()?;
    let needed = before_event(&mut driver, event, "cuEventSynchronize")?;
    driver.refuse_unsafe("cuEventSynchronize")?;
    called(121, || wait(driver, card, needed)).0
}
fn cuEventElapsedTime(milliseconds: OutPtr<f32>, start: usize, end: usize) {
    elapsed(milliseconds, start, end)
}
fn cuEventElapsedTime_v2(milliseconds: OutPtr<f32>, start: usize, end: usize) {
    elapsed(milliseconds, start, end)
}

fn cuStreamBeginCapture_v2(stream: usize, mode: u32) {
    let (mut driver, _, stream) = enter_stream(stream)?;
    let mode = match mode {
        0 => CaptureMode::Global,
        1 => CaptureMode::ThreadLocal,
        2 => CaptureMode::Relaxed,
        _ => return Err(Status::INVALID_VALUE),
    };
    driver.begin_capture(stream, mode)
}
/// Ends the capture. An invalid one gives no graph.
fn cuStreamEndCapture(stream: usize, graph: OutPtr<usize>) {
    let (mut driver, _, stream) = enter_stream(stream)?;
    graph.set(0);
    let captured = driver.end_capture(stream)?;
    let handle = driver.objects.handle();
    driver.objects.graphs.insert(handle, captured);
    graph.give(handle, Status::INVALID_VALUE)
}
/// 0 for no, 1 for yes, 2 for an invalid capture.
fn cuStreamIsCapturing(stream: usize, status: OutPtr<u32>) {
    let (driver, _, stream) = enter_stream(stream)?;
    status.give(driver.capture_status(stream), Status::INVALID_VALUE)
}
fn cuGraphInstantiateWithFlags(executable: OutPtr<usize>, graph: usize, _flags: u64) {
    let (mut driver, _) = enter()?;
    let graph = driver.objects.graphs.get(&graph).cloned().ok_or(Status::INVALID_HANDLE)?;
    let handle = driver.objects.handle();
    driver.objects.executables.insert(handle, graph);
    executable.give(handle, Status::INVALID_VALUE)
}
/// Runs a graph in stream order, as one piece of work.
fn cuGraphLaunch(executable: usize, stream: usize) {
    let (mut driver, _, stream) = enter_stream(stream)?;
    let graph = driver.objects.executables.get(&executable).cloned().ok_or(Status::INVALID_HANDLE)?;
    driver.refuse_captured(stream, "cuGraphLaunch")?;
    if graph.is_empty() {
        return Ok(());
    }
    driver.submit(stream, CardWork::Graph(GraphRun::new(graph)))
}
fn cuGraphDestroy(graph: usize) {
    let (mut driver, _) = enter()?;
    driver.objects.graphs.remove(&graph).map(|_| ()).ok_or(Status::INVALID_HANDLE)
}
fn cuGraphExecDestroy(executable: usize) {
    let (mut driver, _) = enter()?;
    driver.objects.executables.remove(&executable).map(|_| ()).ok_or(Status::INVALID_HANDLE)
}
}
