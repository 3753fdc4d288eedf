//! Measures how fast a trace file is read into a timeline, and how much memory that takes.
//!
//! `cargo run --release -p paceline-analysis --example parse_speed -- FILE [TIMES]` reads the file `TIMES`
//! times (default 3). It prints what came out, the speed in MB of JSON per second of wall clock and of
//! processor time of the reading thread, and the peak of resident memory as Linux counts it. MB are
//! 10^6 bytes.

use std::error::Error;
use std::path::PathBuf;
use std::time::Instant;

use rustix::time::{ClockId, clock_gettime};

fn main() -> Result<(), Box<dyn Error>> {
    let mut args = std::env::args_os().skip(1);
    let path = PathBuf::from(args.next().ok_or("give a trace file")?);
    let times: u32 = match args.next() {
        Some(text) => text.to_str().ok_or("how many times?")?.parse()?,
        None => 3,
    };
    let json_bytes = json_bytes(&path)?;
    for _ in 0..times {
        let (wall, busy) = (Instant::now(), thread_s());
        let timeline = paceline_analysis::read::open(&path)?;
        let (wall_s, busy_s) = (wall.elapsed().as_secs_f64(), thread_s() - busy);
        let kept = timeline.kernels.len()
            + timeline.launches.len()
            + timeline.operators.len()
            + timeline.annotations.len()
            + timeline.memory.len();
        let skipped: u64 = timeline.skipped.values().sum();
        let mb = json_bytes as f64 / 1e6;
        println!(
            "{mb:.1} MB of JSON, {kept} events kept, {skipped} skipped: {wall_s:.3} s, {:.0} MB/s; \
             {:.0} MB/s of the parsing thread; peak {:.0} MB resident",
            mb / wall_s,
            mb / busy_s,
            peak_bytes()? as f64 / 1e6,
        );
    }
    Ok(())
}

/// How many bytes of JSON a file holds when decompressed.
fn json_bytes(path: &std::path::Path) -> std::io::Result<u64> {
    let mut file = std::io::BufReader::new(std::fs::File::open(path)?);
    if std::io::BufRead::fill_buf(&mut file)?.starts_with(&[0x1f, 0x8b]) {
        std::io::copy(&mut flate2::bufread::MultiGzDecoder::new(file), &mut std::io::sink())
    } else {
        Ok(std::fs::metadata(path)?.len())
    }
}

/// Seconds of processor time that this thread has used.
fn thread_s() -> f64 {
    let time = clock_gettime(ClockId::ThreadCPUTime);
    time.tv_sec as f64 + time.tv_nsec as f64 / 1e9
}

/// The most memory that this process has ever had resident.
fn peak_bytes() -> Result<u64, Box<dyn Error>> {
    let status = std::fs::read_to_string("/proc/self/status")?;
    let line = status.lines().find_map(|line| line.strip_prefix("VmHWM:"));
    let kb = line.and_then(|line| line.trim().strip_suffix(" kB")).ok_or("no VmHWM")?;
    Ok(kb.trim().parse::<u64>()? * 1024)
}
