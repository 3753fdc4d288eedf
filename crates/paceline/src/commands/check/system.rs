//! Reports the system's limits for this process: memory, locked memory, open files.

use paceline_host::resources;
use paceline_launch::device::Device;
use rustix::process::{Resource, getrlimit};

use super::{Answers, Status};

/// With less memory per rank than this, the answer is a warning.
const LITTLE_BYTES: u64 = 256 << 20;

/// Open files that a rank needs in addition to its connections to other ranks.
const OWN_FILES: u64 = 64;

/// Reports how much memory the ranks of this host have, and the limit of their control group.
pub(super) fn memory(local_ranks: usize, answers: &mut Answers) {
    let gb = |bytes: u64| format!("{:.1} GB", bytes as f64 / 1e9);
    let limit = match resources::memory_limit_bytes() {
        Some(bytes) => format!("the control group allows {}", gb(bytes)),
        None => "no limit by a control group".to_owned(),
    };
    match resources::available_bytes() {
        Some(bytes) if bytes / (local_ranks as u64) < LITTLE_BYTES => {
            let text = format!("only {} available to {local_ranks} ranks; {limit}", gb(bytes));
            answers.add(Status::Warn, "memory", &text);
        }
        Some(bytes) => {
            let text = format!("{} available; {limit}; /dev/shm is not needed", gb(bytes));
            answers.add(Status::Ok, "memory", &text);
        }
        None => {
            answers.add(Status::Warn, "memory", "the system does not say how much is available")
        }
    }
}

/// Reports how much memory this process may lock, and how many files it may open.
pub(super) fn limits(world: usize, device: Device, answers: &mut Answers) {
    let locked = match getrlimit(Resource::Memlock).current {
        Some(bytes) => format!("{:.1} MB", bytes as f64 / 1e6),
        None => "unlimited".to_owned(),
    };
    answers.add(
        Status::Ok,
        "locked memory",
        &format!("{locked}; none is needed on device={device}"),
    );
    let files = getrlimit(Resource::Nofile).current;
    let needed = OWN_FILES + 4 * world as u64;
    let text = files.map_or("unlimited".to_owned(), |files| format!("{files} at once"));
    if files.is_some_and(|files| files < needed) {
        let text = format!("{text}, but {world} ranks may need {needed}; raise it with ulimit -n");
        answers.add(Status::Warn, "open files", &text);
    } else {
        answers.add(Status::Ok, "open files", &format!("{text}; {needed} are needed"));
    }
}
