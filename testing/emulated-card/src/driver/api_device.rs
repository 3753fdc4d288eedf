//! `cuInit`, devices, contexts and error names.

use crate::boundary::{OutPtr, StaticText, Status, export, write_text};
use crate::cupti;

use super::state::{card_of, context_of, current_context, enter, guard, lock, set_current_context};
use super::status;
use super::streams::wait;

/// The answers of `cuDeviceGetAttribute` that do not follow from the settings: the numbers of an H100. Attributes that are not here
/// are 0.
const ATTRIBUTES: [(u32, i32); 29] = [
    (1, 1024), // threads of a block
    (2, 1024), // and its sizes
    (3, 1024),
    (4, 64),
    (5, 2_147_483_647), // sizes of a grid
    (6, 65_535),
    (7, 65_535),
    (8, 49_152),      // shared memory of a block
    (9, 65_536),      // constant memory
    (10, 32),         // threads of a warp
    (12, 65_536),     // registers of a block
    (13, 1_755_000),  // clock rate in kHz
    (16, 132),        // multiprocessors
    (19, 1),          // maps host memory
    (31, 1),          // runs several kernels at once
    (32, 1),          // ECC
    (36, 2_619_000),  // memory's clock rate in kHz
    (37, 5_120),      // width of the memory's bus
    (38, 52_428_800), // L2 cache
    (39, 2_048),      // threads of a multiprocessor
    (40, 3),          // copy engines
    (41, 1),          // one address space with the host
    (78, 1),          // priorities of streams
    (81, 233_472),    // shared memory of a multiprocessor
    (82, 65_536),     // registers of a multiprocessor
    (106, 32),        // blocks of a multiprocessor
    (111, 1_024),     // shared memory of a block that the system keeps
    (115, 0),         // no memory pools
    (119, 0),
];

fn check(device: i32) -> Result<usize, Status> {
    let driver = lock();
    if !driver.initialized {
        return Err(Status::NOT_INITIALIZED);
    }
    usize::try_from(device).ok().filter(|d| *d < driver.cards.len()).ok_or(Status::INVALID_DEVICE)
}

/// A card's id on the PCI bus.
pub(super) fn bus_id(card: usize) -> String {
    format!("0000:{:02x}:00.0", card + 1)
}

export! { guard;
fn cuInit(flags: u32) {
    let mut driver = lock();
    if flags != 0 {
        return Err(Status::INVALID_VALUE);
    }
    if driver.cards.is_empty() {
        return Err(Status::NO_DEVICE);
    }
    driver.initialized = true;
    Ok(())
}
fn cuDriverGetVersion(version: OutPtr<i32>) { version.give(lock().settings.version, Status::INVALID_VALUE) }
fn cuDeviceGetCount(count: OutPtr<i32>) {
    let driver = lock();
    if !driver.initialized {
        return Err(Status::NOT_INITIALIZED);
    }
    count.give(driver.cards.len() as i32, Status::INVALID_VALUE)
}
fn cuDeviceGet(device: OutPtr<i32>, ordinal: i32) {
    check(ordinal)?;
    device.give(ordinal, Status::INVALID_VALUE)
}
fn cuDeviceGetName(name: OutPtr<u8>, len: i32, device: i32) {
    check(device)?;
    write_text(name, len.max(0) as usize, "emulated card");
    Ok(())
}
fn cuDeviceTotalMem_v2(bytes: OutPtr<usize>, device: i32) {
    let card = check(device)?;
    bytes.give(lock().cards[card].memory.capacity(), Status::INVALID_VALUE)
}
fn cuDeviceGetAttribute(value: OutPtr<i32>, attribute: u32, device: i32) {
    let card = check(device)?;
    let known = ATTRIBUTES.iter().find(|(a, _)| *a == attribute);
    let settings = lock().settings.clone();
    let number = match attribute {
        75 => settings.capability.0 as i32,
        76 => settings.capability.1 as i32,
        // Shared memory of a block that asks for more.
        97 => settings.shared_bytes() as i32,
        // The card's slot on the PCI bus.
        33 => card as i32 + 1,
        _ => known.map_or(0, |(_, value)| *value),
    };
    value.give(number, Status::INVALID_VALUE)
}
fn cuDeviceGetUuid_v2(uuid: OutPtr<[u8; 16]>, device: i32) {
    let card = check(device)?;
    let mut bytes = *b"emulated card  #";
    bytes[15] = card as u8;
    uuid.give(bytes, Status::INVALID_VALUE)
}
fn cuDeviceGetPCIBusId(name: OutPtr<u8>, len: i32, device: i32) {
    write_text(name, len.max(0) as usize, &bus_id(check(device)?));
    Ok(())
}
fn cuDevicePrimaryCtxRetain(context: OutPtr<usize>, device: i32) {
    let card = check(device)?;
    lock().cards[card].retained += 1;
    context.give(context_of(card), Status::INVALID_VALUE)
}
fn cuDevicePrimaryCtxRelease_v2(device: i32) {
    let card = check(device)?;
    let retained = &mut lock().cards[card].retained;
    *retained = retained.checked_sub(1).ok_or(Status::INVALID_CONTEXT)?;
    Ok(())
}
fn cuCtxSetCurrent(context: usize) {
    if context != 0 && card_of(context, lock().cards.len()).is_none() {
        return Err(Status::INVALID_CONTEXT);
    }
    set_current_context(context);
    Ok(())
}
fn cuCtxGetCurrent(context: OutPtr<usize>) { context.give(current_context(), Status::INVALID_VALUE) }
/// Runs everything that the card has to do.
fn cuCtxSynchronize() {
    let (mut driver, card) = enter()?;
    driver.refuse_card(card, "cuCtxSynchronize")?;
    let needed = driver.all_of_card(card);
    cupti::called(17, || wait(driver, card, needed)).0
}
fn cuMemGetInfo_v2(free: OutPtr<usize>, total: OutPtr<usize>) {
    let (driver, card) = enter()?;
    let memory = &driver.cards[card].memory;
    free.give(memory.capacity() - memory.used(), Status::INVALID_VALUE)?;
    total.give(memory.capacity(), Status::INVALID_VALUE)
}
/// Tables that no header describes. The card has no such table, but NVRTC calls this function in every
/// `libcuda.so.1` that it finds, and crashes if the function does not exist.
fn cuGetExportTable(table: OutPtr<usize>, _id: usize) {
    table.set(0);
    Err(Status::NOT_FOUND)
}
fn cuGetErrorName(code: u32, name: OutPtr<StaticText>) {
    let text = status::name(code);
    name.set(text.map_or(StaticText::null(), StaticText::new));
    if text.is_some() { Ok(()) } else { Err(Status::INVALID_VALUE) }
}
fn cuGetErrorString(code: u32, text: OutPtr<StaticText>) {
    let sentence = status::description(code);
    text.set(sentence.map_or(StaticText::null(), StaticText::new));
    if sentence.is_some() { Ok(()) } else { Err(Status::INVALID_VALUE) }
}
}
