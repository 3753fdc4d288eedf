//! Where a rank marks its steps and their parts for other tools, while they run: in the trace of the kernel if `--mark-ranges`
//! asks for it, and for a profiler that shows ranges of NVTX, such as Nsight Systems.

use std::path::Path;

use paceline_cuda::nvtx::Nvtx;
use paceline_failure::{Failure, Result};
use paceline_host::text::warn;
use paceline_trace::{KernelMarkers, Markers, TRACE_MARKERS};

/// All receivers of marks. If a profiler cannot be called, the first rank says so, and the run goes on without.
pub(crate) fn all(marks_ranges: bool, rank: usize) -> Result<Vec<Box<dyn Markers>>> {
    let mut all: Vec<Box<dyn Markers>> = Vec::new();
    if marks_ranges {
        all.push(Box::new(of_kernel()?));
    }
    match Nvtx::injected() {
        Ok(profiler) => all.extend(profiler.map(|of| Box::new(of) as Box<dyn Markers>)),
        Err(problem) if rank == 0 => warn(&format!("no ranges of NVTX are marked: {problem}")),
        Err(_) => {}
    }
    Ok(all)
}

/// The trace of the kernel.
pub(crate) fn of_kernel() -> Result<KernelMarkers> {
    let open = |path: &&str| paceline_files::open_to_write(Path::new(path));
    let mut refused = Vec::new();
    for path in &TRACE_MARKERS {
        match open(path) {
            Ok(file) => return Ok(KernelMarkers::new(file)),
            Err(error) => refused.push(format!("{path}: {error}")),
        }
    }
    Err(Failure::Usage(format!(
        "--mark-ranges: the kernel takes no marks here ({}); mount tracefs (mount -t tracefs nodev /sys/kernel/tracing), be \
         root or be allowed to write there, or leave it out",
        refused.join("; ")
    )))
}
