//! The functions of NVML that tell how busy a card is and how much of its memory is used. The memory is what the driver has
//! given out; how busy the card is, and which function fails, says the environment.

use std::sync::atomic::{AtomicU32, Ordering};

use crate::boundary::{CText, OutPtr, Outcome, StaticText, Status, export, stop_panics};
use crate::driver::{card_at, monitored};

const UNINITIALIZED: Status = Status(1);
const INVALID_ARGUMENT: Status = Status(2);
const NOT_FOUND: Status = Status(6);
const UNKNOWN: Status = Status(999);

/// The handle of card 0.
const FIRST: usize = 0x700;

static STARTED: AtomicU32 = AtomicU32::new(0);

fn guard(body: impl FnOnce() -> Outcome) -> u32 {
    stop_panics(UNKNOWN.0, body)
}

/// Fails if the environment says so, or if the library has not been started.
fn enter(function: &str) -> Outcome {
    refuse(function)?;
    match STARTED.load(Ordering::SeqCst) {
        0 => Err(UNINITIALIZED),
        _ => Ok(()),
    }
}

fn refuse(function: &str) -> Outcome {
    match monitored().failing {
        Some((failing, status)) if failing == function => Err(Status(status)),
        _ => Ok(()),
    }
}

export! { guard;
/// Starts the library once more.
fn nvmlInit_v2() {
    refuse("nvmlInit_v2")?;
    STARTED.fetch_add(1, Ordering::SeqCst);
    Ok(())
}
fn nvmlShutdown() {
    enter("nvmlShutdown")?;
    STARTED.fetch_sub(1, Ordering::SeqCst);
    Ok(())
}
fn nvmlDeviceGetHandleByPciBusId_v2(bus_id: CText, device: OutPtr<usize>) {
    enter("nvmlDeviceGetHandleByPciBusId_v2")?;
    let card = card_at(&bus_id.get().ok_or(INVALID_ARGUMENT)?).ok_or(NOT_FOUND)?;
    device.give(FIRST + card, INVALID_ARGUMENT)
}
fn nvmlDeviceGetUtilizationRates(device: usize, utilization: OutPtr<[u32; 2]>) {
    enter("nvmlDeviceGetUtilizationRates")?;
    let of = monitored();
    if device.checked_sub(FIRST).is_none_or(|card| card >= of.memory.len()) {
        return Err(INVALID_ARGUMENT);
    }
    utilization.give([of.utilization, 0], INVALID_ARGUMENT)
}
/// Bytes of memory: in all, free, and used.
fn nvmlDeviceGetMemoryInfo(device: usize, memory: OutPtr<[u64; 3]>) {
    enter("nvmlDeviceGetMemoryInfo")?;
    let of = device.checked_sub(FIRST).and_then(|card| monitored().memory.get(card).copied());
    let (used, total) = of.ok_or(INVALID_ARGUMENT)?;
    memory.give([total, total - used, used], INVALID_ARGUMENT)
}
}

/// A sentence about a status.
#[unsafe(no_mangle)]
#[allow(non_snake_case)]
pub extern "C" fn nvmlErrorString(status: u32) -> StaticText {
    StaticText::new(match status {
        0 => c"The operation was successful",
        1 => c"Uninitialized",
        2 => c"Invalid Argument",
        3 => c"Not Supported",
        6 => c"Not Found",
        9 => c"Driver Not Loaded",
        18 => c"Driver/library version mismatch",
        _ => c"Unknown Error",
    })
}
