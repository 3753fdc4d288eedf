//! Measures what recording costs: nanoseconds per event while the recorder is on and while it is off, and the
//! seconds that writing the events of a rank (a million by default) takes. The results are one line of JSON.
//!
//! `cargo run --release -p paceline-analysis --example recorder_speed [EVENTS]`

use std::error::Error;
use std::hint::black_box;

use paceline_analysis::kineto;
use paceline_trace::{Event, Recorder, Shapes, Span, Track, now_ns};

fn main() -> Result<(), Box<dyn Error>> {
    let wanted: u64 = std::env::args().nth(1).map_or(Ok(1_000_000), |text| text.parse())?;
    // One recorded kernel makes five events in the file: operator, launch, kernel, and both ends of an arrow.
    let num_kernels = wanted.div_ceil(5) as usize;
    let mut recorder = Recorder::new();
    let track = recorder.track("main", num_kernels);

    let off_ns = time_per_event(&track, num_kernels);
    recorder.set_on(true);
    let on_ns = time_per_event(&track, num_kernels);
    recorder.set_on(false);

    let folder = std::env::temp_dir().join(format!("paceline-recorder-{}", std::process::id()));
    std::fs::create_dir(&folder)?;
    let path = folder.join("worker_0.1.pt.trace.json.gz");
    let begin = now_ns();
    let written = std::fs::File::create(&path)
        .and_then(|mut file| kineto::write_compressed(&mut file, &header(), &[&track]));
    let seconds = (now_ns() - begin) as f64 / 1e9;
    let bytes = path.metadata().map(|file| file.len());
    std::fs::remove_dir_all(&folder)?;
    let (events, bytes) = (written?, bytes?);
    println!(
        "{{\"off_ns_per_event\": {off_ns:.1}, \"on_ns_per_event\": {on_ns:.1}, \"events\": {events}, \
         \"write_s\": {seconds:.3}, \"file_bytes\": {bytes}}}"
    );
    Ok(())
}

/// Nanoseconds per event, recorded as a kernel does it: two readings of the clock and an entry in the track.
fn time_per_event(track: &Track, count: usize) -> f64 {
    let begin = now_ns();
    for at in 0..count {
        if black_box(track).is_on() {
            let start_ns = now_ns();
            let shapes = Shapes::new([&[64, 28, 28, at % 7][..], &[3, 3, 1, 32]]);
            let span = Span { start_ns, end_ns: now_ns() };
            track.record(Event::Kernel {
                name: "conv_relu_pool_forward",
                launched: Span::at(span.start_ns),
                span,
                shapes,
            });
        }
    }
    (now_ns() - begin) as f64 / count as f64
}

fn header() -> kineto::Header {
    kineto::Header {
        rank: 0,
        world_size: 1,
        run_id: "17".into(),
        transport: "shm".into(),
        device: "none".into(),
        ran_on: kineto::RanOn::Host,
        pid: std::process::id(),
        base_ns: paceline_trace::realtime_at_zero_ns(),
        run_facts: Vec::new(),
        steps: Vec::new(),
        activities: Vec::new(),
    }
}
