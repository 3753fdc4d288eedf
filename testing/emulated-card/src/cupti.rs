//! The functions of CUPTI that hand over what a card ran and which calls put it there.
//!
//! Input: pieces of work as they are submitted and as they have run. Output: records in the program's buffers, in the layout of
//! CUPTI 13. `PACELINE_EMULATED_CUPTI` names a function that fails, and its status.

use std::collections::HashMap;
use std::ffi::CString;
use std::sync::{LazyLock, Mutex, MutexGuard, PoisonError};
use std::time::{SystemTime, UNIX_EPOCH};

use crate::boundary::{InPtr, OutPtr, Outcome, StaticText, Status, export, stop_panics};
use crate::driver::failing_cupti;

const INVALID_PARAMETER: Status = Status(1);
const INVALID_KIND: Status = Status(21);
const NO_MORE_RECORDS: Status = Status(12);
const UNKNOWN: Status = Status(999);

const COPY: u32 = 1;
const FILL: u32 = 2;
const CALL: u32 = 4;
const KERNEL: u32 = 10;

/// Kinds of memory that a copy touches.
pub(crate) const PAGEABLE: u8 = 1;
pub(crate) const PINNED: u8 = 2;
pub(crate) const CARD: u8 = 3;

/// The functions of the driver that have a record, by their number in `cupti_driver_cbid.h`.
const FUNCTIONS: [(u32, &std::ffi::CStr); 9] = [
    (17, c"cuCtxSynchronize"),
    (121, c"cuEventSynchronize"),
    (126, c"cuStreamSynchronize"),
    (216, c"cuMemsetD8Async"),
    (277, c"cuMemcpyHtoDAsync_v2"),
    (279, c"cuMemcpyDtoHAsync_v2"),
    (281, c"cuMemcpyDtoDAsync_v2"),
    (307, c"cuLaunchKernel"),
    (514, c"cuGraphLaunch"),
];

type RequestBuffer = extern "C" fn(OutPtr<usize>, OutPtr<usize>, OutPtr<usize>);
type TakeBuffer = extern "C" fn(usize, u32, usize, usize, usize);

/// The state of the library.
#[derive(Default)]
struct Activities {
    clock: Option<extern "C" fn() -> u64>,
    callbacks: Option<(RequestBuffer, TakeBuffer)>,
    /// Kinds of records that are wanted, a bit each.
    wanted: u64,
    records: Vec<Vec<u8>>,
    /// The number of the last call.
    calls: u32,
    /// Names of kernels, which stay where they are.
    names: HashMap<String, usize>,
}

/// Work that has run, as its record says.
pub(crate) enum RanWork<'a> {
    /// A kernel: its name, grid and block, and bytes of shared memory.
    Kernel(&'a str, [u32; 3], [u32; 3], usize),
    /// A copy of so many bytes, from one kind of memory to another.
    Copy(usize, [u8; 2]),
    Fill(usize),
}

fn lock() -> MutexGuard<'static, Activities> {
    static ACTIVITIES: LazyLock<Mutex<Activities>> = LazyLock::new(Mutex::default);
    ACTIVITIES.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Activities {
    fn now(&self) -> u64 {
        let day = || SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
        self.clock.map_or_else(|| day().as_nanos() as u64, |clock| clock())
    }

    /// Adds a record with these fields, each by its place, value and bytes, if such records are wanted.
    fn add(&mut self, kind: u32, fields: &[(usize, u64, usize)]) {
        if self.wanted >> kind & 1 == 0 {
            return;
        }
        let mut record = vec![0; len_of(kind)];
        for (at, value, len) in [(0, u64::from(kind), 4)].iter().chain(fields) {
            record[*at..at + len].copy_from_slice(&value.to_le_bytes()[..*len]);
        }
        self.records.push(record);
    }

    fn name(&mut self, name: &str) -> usize {
        *self.names.entry(name.to_owned()).or_insert_with(|| {
            CString::new(name).map_or(0, |text| CString::into_raw(text) as usize)
        })
    }
}

unsafe extern "C" {
    fn gettid() -> i32;
}

/// A call of a function of the driver. Returns what `body` returns, and the number of the call.
pub(crate) fn called<T>(function: u32, body: impl FnOnce() -> T) -> (T, u32) {
    let (start, number) = {
        let mut activities = lock();
        activities.calls += 1;
        (activities.now(), activities.calls)
    };
    let result = body();
    let mut activities = lock();
    let (end, process) = (activities.now(), u64::from(std::process::id()));
    // SAFETY: the call has no condition.
    let thread = unsafe { gettid() as u64 };
    let times = [(8, start, 8), (16, end, 8)];
    let who = [(4, u64::from(function), 4), (24, process, 4), (28, thread, 4)];
    let fields = [&times[..], &who, &[(32, u64::from(number), 4)]].concat();
    activities.add(CALL, &fields);
    (result, number)
}

/// The time on the program's clock.
pub(crate) fn now() -> u64 {
    lock().now()
}

/// A piece of work has run since `start`, which the call of this number had put into a stream.
pub(crate) fn ran((card, stream, call): (usize, usize, u32), start: u64, work: RanWork<'_>) {
    let mut activities = lock();
    let (end, place) = (activities.now(), [card as u64, 1, stream as u64]);
    let times = |at: usize| [(at, start, 8), (at + 8, end, 8)];
    let on = |at: usize| [(at, place[0], 4), (at + 4, place[1], 4), (at + 8, place[2], 4)];
    let call = u64::from(call);
    let mut fields = times(16).to_vec();
    let kind = match work {
        RanWork::Kernel(name, grid, block, shared_bytes) => {
            let name = activities.name(name) as u64;
            fields.extend([
                (6, 32, 2),
                (80, shared_bytes as u64, 4),
                (92, call, 4),
                (104, name, 8),
            ]);
            fields.extend(on(40));
            let sizes = grid.into_iter().chain(block).enumerate();
            fields.extend(sizes.map(|(k, size)| (52 + 4 * k, u64::from(size), 4)));
            KERNEL
        }
        RanWork::Copy(bytes, [from, to]) => {
            fields.extend([(5, u64::from(from), 1), (6, u64::from(to), 1), (8, bytes as u64, 8)]);
            fields.extend(on(32).into_iter().chain([(44, call, 4)]));
            COPY
        }
        RanWork::Fill(bytes) => {
            fields.extend(on(32).into_iter().chain([(8, bytes as u64, 8), (44, call, 4)]));
            FILL
        }
    };
    activities.add(kind, &fields);
}

/// The bytes of a record of this kind.
fn len_of(kind: u32) -> usize {
    match kind {
        COPY => 96,
        FILL => 88,
        CALL => 40,
        _ => 216,
    }
}

/// Hands over all records, in as many buffers as they need.
fn flush() -> Outcome {
    loop {
        let callbacks = lock().callbacks.ok_or(INVALID_PARAMETER)?;
        if lock().records.is_empty() {
            return Ok(());
        }
        let (mut buffer, mut size, mut most) = (0, 0, 0);
        callbacks.0(OutPtr::to(&mut buffer), OutPtr::to(&mut size), OutPtr::to(&mut most));
        let mut records = std::mem::take(&mut lock().records);
        let mut used = 0;
        let mut fits = |of: &Vec<u8>| {
            used += of.len();
            used <= size
        };
        let count = records.iter().take_while(|of| fits(of)).count();
        let later = records.split_off(count);
        lock().records.splice(0..0, later);
        let bytes = records.concat();
        OutPtr::<u8>::at(buffer).set_all(&bytes);
        callbacks.1(0, 0, buffer, size, bytes.len());
        if count == 0 {
            return Err(UNKNOWN);
        }
    }
}

fn guard(body: impl FnOnce() -> Outcome) -> u32 {
    stop_panics(UNKNOWN.0, body)
}

fn refuse(function: &str) -> Outcome {
    match failing_cupti() {
        Some((failing, status)) if failing == function => Err(Status(status)),
        _ => Ok(()),
    }
}

fn switch(kind: u32, on: bool) -> Outcome {
    if ![COPY, FILL, CALL, KERNEL].contains(&kind) {
        return Err(INVALID_KIND);
    }
    let mut activities = lock();
    activities.wanted = activities.wanted & !(1 << kind) | u64::from(on) << kind;
    Ok(())
}

export! { guard;
fn cuptiActivityRegisterTimestampCallback(clock: Option<extern "C" fn() -> u64>) {
    refuse("cuptiActivityRegisterTimestampCallback")?;
    lock().clock = Some(clock.ok_or(INVALID_PARAMETER)?);
    Ok(())
}
fn cuptiActivityRegisterCallbacks(requested: Option<RequestBuffer>, completed: Option<TakeBuffer>) {
    refuse("cuptiActivityRegisterCallbacks")?;
    lock().callbacks = Some(requested.zip(completed).ok_or(INVALID_PARAMETER)?);
    Ok(())
}
fn cuptiActivityEnable(kind: u32) {
    refuse("cuptiActivityEnable")?;
    switch(kind, true)
}
fn cuptiActivityDisable(kind: u32) { switch(kind, false) }
fn cuptiActivityFlushAll(_flag: u32) {
    refuse("cuptiActivityFlushAll")?;
    flush()
}
/// The record after the one that the last argument names; the first one after null.
fn cuptiActivityGetNextRecord(buffer: InPtr<u8>, bytes: usize, record: InPtr<usize>) {
    let last = record.get().ok_or(INVALID_PARAMETER)?;
    let at = match last {
        0 => 0,
        last => {
            let at = last - buffer.address();
            at + len_of(buffer.at(at).ok_or(INVALID_PARAMETER)?.into())
        }
    };
    if at >= bytes {
        return Err(NO_MORE_RECORDS);
    }
    record.out().give(buffer.address() + at, INVALID_PARAMETER)
}
fn cuptiActivityGetNumDroppedRecords(_context: usize, _stream: u32, dropped: OutPtr<usize>) {
    dropped.give(0, INVALID_PARAMETER)
}
fn cuptiGetCallbackName(domain: u32, id: u32, name: OutPtr<StaticText>) {
    let known = FUNCTIONS.iter().find(|(of, _)| domain == 1 && *of == id);
    name.give(StaticText::new(known.ok_or(INVALID_PARAMETER)?.1), INVALID_PARAMETER)
}
fn cuptiGetResultString(status: u32, text: OutPtr<StaticText>) {
    let words = match status {
        0 => c"CUPTI_SUCCESS",
        15 => c"CUPTI_ERROR_NOT_INITIALIZED",
        35 => c"CUPTI_ERROR_INSUFFICIENT_PRIVILEGES",
        39 => c"CUPTI_ERROR_MULTIPLE_SUBSCRIBERS_NOT_SUPPORTED",
        _ => c"CUPTI_ERROR_UNKNOWN",
    };
    text.give(StaticText::new(words), INVALID_PARAMETER)
}
}
