//! Memory of the card and of the host, copies and fills.

use std::sync::Arc;

use crate::boundary::{InPtr, OutPtr, Outcome, Status, export};

use super::pinned::PinnedMemory;
use super::state::{Driver, enter, enter_stream, guard};
use super::streams::wait;
use super::work::CardWork;

/// Refuses a range that is not the card's, as the driver does before it queues a copy.
fn check(driver: &mut Driver, card: usize, at: u64, len: usize) -> Outcome {
    let result = driver.cards[card].memory.check(at, len);
    result.map_err(|fault| driver.refuse(Status::INVALID_VALUE, fault.message))
}

fn upload(to: u64, from: InPtr<u8>, len: usize, stream: usize, now: bool) -> Outcome {
    let (mut driver, card, stream) = enter_stream(stream)?;
    if len == 0 {
        return Ok(());
    }
    check(&mut driver, card, to, len)?;
    if now {
        driver.refuse_null_stream(stream)?;
    }
    let work = match driver.pinned.find(from.address(), len) {
        Some(from) => CardWork::Upload { to, from },
        None => {
            driver.refuse_captured(stream, "a copy from memory that is not pinned")?;
            let bytes: Arc<[u8]> = from.bytes(len).ok_or(Status::INVALID_VALUE)?.into();
            CardWork::UploadStaged { to, bytes }
        }
    };
    driver.submit(stream, work)?;
    finish(driver, card, stream, now)
}

fn download(to: usize, from: u64, len: usize, stream: usize, now: bool) -> Outcome {
    let (mut driver, card, stream) = enter_stream(stream)?;
    if len == 0 {
        return Ok(());
    }
    check(&mut driver, card, from, len)?;
    if to == 0 {
        return Err(Status::INVALID_VALUE);
    }
    if now {
        driver.refuse_null_stream(stream)?;
    }
    let pinned = driver.pinned.find(to, len);
    if pinned.is_none() {
        driver.refuse_captured(stream, "a copy to memory that is not pinned")?;
    }
    let range = pinned.unwrap_or(PinnedMemory::unpinned(to, len));
    driver.submit(stream, CardWork::Download { to: range, from })?;
    // A copy to memory that is not pinned is over when the call returns.
    finish(driver, card, stream, now || pinned.is_none())
}

fn finish(
    driver: std::sync::MutexGuard<'static, Driver>,
    card: usize,
    stream: usize,
    now: bool,
) -> Outcome {
    let needed = driver.all_of(stream);
    if now { wait(driver, card, needed) } else { Ok(()) }
}

fn fill(at: u64, pattern: &[u8], count: usize, stream: usize) -> Outcome {
    let (mut driver, card, stream) = enter_stream(stream)?;
    if !at.is_multiple_of(pattern.len() as u64) {
        return Err(
            driver.refuse(Status::INVALID_VALUE, "memset of an address that is not aligned")
        );
    }
    if count == 0 {
        return Ok(());
    }
    check(&mut driver, card, at, count * pattern.len())?;
    driver.submit(stream, CardWork::Fill { at, pattern: pattern.into(), count })
}

export! { guard;
fn cuMemAlloc_v2(address: OutPtr<u64>, bytes: usize) {
    let (mut driver, card) = enter()?;
    driver.refuse_unsafe("cuMemAlloc")?;
    if bytes == 0 || address.is_null() {
        return Err(Status::INVALID_VALUE);
    }
    match driver.cards[card].memory.allocate(bytes) {
        Some(at) => {
            address.set(at);
            Ok(())
        }
        None => {
            let memory = &driver.cards[card].memory;
            let free = memory.capacity() - memory.used();
            let why = format!("asked for {bytes} bytes, {free} are free");
            Err(driver.refuse(Status::OUT_OF_MEMORY, why))
        }
    }
}
/// Frees memory of the card at once: work that still uses it fails.
fn cuMemFree_v2(address: u64) {
    let (mut driver, card) = enter()?;
    if address == 0 {
        return Ok(());
    }
    driver.refuse_unsafe("cuMemFree")?;
    if driver.cards[card].memory.free(address) { Ok(()) } else { Err(driver.refuse(Status::INVALID_VALUE, format!("cuMemFree of {address:#x}"))) }
}
fn cuMemHostAlloc(address: OutPtr<usize>, bytes: usize, _flags: u32) {
    let (mut driver, _) = enter()?;
    driver.refuse_unsafe("cuMemHostAlloc")?;
    if bytes == 0 || address.is_null() {
        return Err(Status::INVALID_VALUE);
    }
    address.set(driver.pinned.allocate(bytes).ok_or(Status::OUT_OF_MEMORY)?);
    Ok(())
}
/// Frees pinned memory at once: copies that still use it fail.
fn cuMemFreeHost(address: usize) {
    let (mut driver, _) = enter()?;
    driver.refuse_unsafe("cuMemFreeHost")?;
    if driver.pinned.free(address) { Ok(()) } else { Err(Status::INVALID_VALUE) }
}
fn cuMemHostRegister_v2(address: usize, bytes: usize, _flags: u32) {
    let (mut driver, _) = enter()?;
    driver.refuse_unsafe("cuMemHostRegister")?;
    if address == 0 || bytes == 0 {
        return Err(Status::INVALID_VALUE);
    }
    if driver.pinned.register(address, bytes) { Ok(()) } else { Err(Status::HOST_ALREADY_REGISTERED) }
}
fn cuMemHostUnregister(address: usize) {
    let (mut driver, _) = enter()?;
    driver.refuse_unsafe("cuMemHostUnregister")?;
    if driver.pinned.unregister(address) { Ok(()) } else { Err(Status::HOST_NOT_REGISTERED) }
}
/// Copies to the card in stream order. Memory that is not pinned is read now.
fn cuMemcpyHtoDAsync_v2(to: u64, from: InPtr<u8>, len: usize, stream: usize) {
    upload(to, from, len, stream, false)
}
/// Copies to the host in stream order. A copy to memory that is not pinned is waited for.
fn cuMemcpyDtoHAsync_v2(to: usize, from: u64, len: usize, stream: usize) {
    download(to, from, len, stream, false)
}
fn cuMemcpyDtoDAsync_v2(to: u64, from: u64, len: usize, stream: usize) {
    let (mut driver, card, stream) = enter_stream(stream)?;
    if len == 0 {
        return Ok(());
    }
    check(&mut driver, card, to, len)?;
    check(&mut driver, card, from, len)?;
    driver.submit(stream, CardWork::Copy { to, from, len })
}
fn cuMemcpyHtoD_v2(to: u64, from: InPtr<u8>, len: usize) { upload(to, from, len, 0, true) }
fn cuMemcpyDtoH_v2(to: usize, from: u64, len: usize) { download(to, from, len, 0, true) }
fn cuMemsetD8Async(at: u64, value: u8, count: usize, stream: usize) { fill(at, &[value], count, stream) }
fn cuMemsetD32Async(at: u64, value: u32, count: usize, stream: usize) {
    fill(at, &value.to_le_bytes(), count, stream)
}
}
