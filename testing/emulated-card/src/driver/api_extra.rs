//! Functions that CUDA does not have, for tests: what went wrong, what ran, and what was not freed.

use crate::boundary::{OutPtr, Status, export, write_text};

use super::state::{Driver, guard, lock};

fn counts(driver: &Driver) -> [u64; 13] {
    let counts = driver.counts;
    let memory = || driver.cards.iter().map(|card| &card.memory);
    let variables: usize =
        driver.objects.modules.values().map(|module| module.variables.len()).sum();
    let streams =
        driver.objects.streams.iter().filter(|(handle, _)| !Driver::is_null_stream(**handle));
    let live: [usize; 8] = [
        memory().map(|memory| memory.live()).sum::<usize>() - variables,
        memory().map(|memory| memory.used()).sum(),
        driver.pinned.live(),
        streams.count(),
        driver.objects.events.len(),
        driver.objects.modules.len(),
        driver.objects.graphs.len(),
        driver.objects.executables.len(),
    ];
    let mut all = [0; 13];
    all[..4].copy_from_slice(&[counts.instructions, counts.launches, counts.tasks, counts.copies]);
    all[4..12].copy_from_slice(&live.map(|count| count as u64));
    all[12] = counts.submissions;
    all
}

export! { guard;
/// Writes why the card failed, or else why the last call was refused. The text is empty if nothing went wrong.
fn paceline_emulated_fault(text: OutPtr<u8>, len: usize) {
    let driver = lock();
    let fault = driver.cards.iter().find_map(|card| card.fault.as_ref());
    write_text(text, len, fault.map_or(&driver.refusal, |fault| &fault.message));
    Ok(())
}
/// Writes `len` numbers of these 13: PTX instructions, kernels, products and collectives, copies and fills; then what
/// is alive: allocations, their bytes (with variables of modules), pinned ranges, streams, events, modules, graphs, and
/// graphs that can be launched; and how often a kernel, a product or a graph was put into a stream.
fn paceline_emulated_counts(numbers: OutPtr<u64>, len: usize) {
    let all = counts(&lock());
    numbers.set_all(&all[..len.min(all.len())]);
    Ok(())
}
/// Makes a range of the card's memory uninitialized again, for allocators that hand out old memory.
fn paceline_emulated_forget(at: u64, len: usize) {
    let mut driver = lock();
    let forgotten = driver.cards.iter_mut().any(|card| card.memory.forget(at, len).is_ok());
    if forgotten { Ok(()) } else { Err(Status::INVALID_VALUE) }
}
/// Starts over with the settings of the environment, as a new process would. Other threads must not be in a call.
fn paceline_emulated_reset() {
    lock().reset();
    Ok(())
}
}
