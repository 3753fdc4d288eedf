//! Records of a card's kernels, copies and calls, by CUPTI, the vendor's library for profilers.
//!
//! Input: a card. Output: its [`ActivityRecord`]s from one moment to another, on the clock of [`now_ns`]. The library hands over full
//! buffers by a callback, for all cards of the process at once; a recorder takes out those of its card. Nothing else needs this
//! library, so callers do without records if it is missing.
//!
//! Source: `cupti_activity.h` of CUPTI 12 and 13. Records only ever grow at their end, so their first fields, which are read
//! here, are the same in both.

use std::collections::{HashMap, HashSet};
use std::ffi::{CStr, c_char, c_void};
use std::fmt;
use std::ptr::null_mut;
use std::sync::Mutex;

use paceline_trace::{ActivityKind, ActivityRecord, Place, Span, lock, now_ns};

use crate::driver::Handle;
use crate::library::{LibraryNames, functions};
use crate::{Card, CudaError, Result};

const NAMES: LibraryNames = LibraryNames {
    files: &["libcupti.so.13", "libcupti.so.12", "libcupti.so"],
    companion: None,
    hint: "it comes with CUDA (extras/CUPTI/lib64), or with pip install nvidia-cuda-cupti",
};

functions! {
    Functions in NAMES;
    fn cuptiActivityRegisterTimestampCallback(clock: extern "C" fn() -> u64);
    fn cuptiActivityRegisterCallbacks(requested: RequestBuffer, completed: TakeBuffer);
    fn cuptiActivityEnable(kind: u32);
    fn cuptiActivityDisable(kind: u32);
    fn cuptiActivityFlushAll(flag: u32);
    fn cuptiActivityGetNextRecord(buffer: *mut u8, bytes: usize, record: *mut *mut u32);
    fn cuptiActivityGetNumDroppedRecords(context: Handle, stream: u32, dropped: *mut usize);
    fn cuptiGetCallbackName(domain: u32, id: u32, name: *mut *const c_char);
    fn cuptiGetResultString(status: u32, text: *mut *const c_char);
}

type RequestBuffer = unsafe extern "C" fn(*mut *mut u8, *mut usize, *mut usize);
type TakeBuffer = unsafe extern "C" fn(*mut c_void, u32, *mut u8, usize, usize);

const COPY: u32 = 1;
const FILL: u32 = 2;
const CALL: u32 = 4;
/// Kernels, without making them run one after the other.
const KERNEL: u32 = 10;
const KINDS: [u32; 4] = [COPY, FILL, CALL, KERNEL];
/// The domain of the driver's functions.
const DRIVER: u32 = 1;
/// Flushing hands over buffers that are not full too.
const FORCED: u32 = 1;

/// Words of eight bytes of a buffer: 1 MiB.
const BUFFER_WORDS: usize = 1 << 17;
/// The most records of a process; more are counted as dropped.
const MOST_RECORDS: usize = 1 << 20;

/// The records of all cards of this process that no recorder has taken. A call belongs to no card by itself.
#[derive(Default)]
struct Records {
    of_cards: Vec<(Option<u32>, ActivityRecord)>,
    dropped: u64,
}

static RECORDS: Mutex<Records> = Mutex::new(Records { of_cards: Vec::new(), dropped: 0 });
/// Recorders in use. The library's functions are called while it is locked, and its callbacks leave it alone.
static RECORDERS: Mutex<usize> = Mutex::new(0);

extern "C" fn clock() -> u64 {
    now_ns()
}

unsafe extern "C" fn request(buffer: *mut *mut u8, bytes: *mut usize, most_records: *mut usize) {
    let words = vec![0_u64; BUFFER_WORDS].into_boxed_slice();
    // SAFETY: the library gives the addresses of three variables. It gives the buffer back to `take`.
    unsafe {
        *buffer = Box::into_raw(words).cast();
        *bytes = BUFFER_WORDS * size_of::<u64>();
        *most_records = 0;
    }
}

unsafe extern "C" fn take(_: *mut c_void, _: u32, buffer: *mut u8, _: usize, bytes: usize) {
    let words = std::ptr::slice_from_raw_parts_mut(buffer.cast::<u64>(), BUFFER_WORDS);
    // SAFETY: the buffer is one that `request` has made, and the library does not use it any longer.
    let words = unsafe { Box::from_raw(words) };
    let Ok(functions) = Functions::get() else { return };
    let mut record: *mut u32 = null_mut();
    let mut records = lock(&RECORDS);
    loop {
        // SAFETY: so many bytes of the buffer hold records, and `record` is null or one of them.
        let status = unsafe { (functions.cuptiActivityGetNextRecord)(buffer, bytes, &mut record) };
        if status != 0 {
            break;
        }
        if records.of_cards.len() == MOST_RECORDS {
            records.dropped += 1;
        // SAFETY: the library has just named this record, which is valid as long as the buffer.
        } else if let Some(read) = unsafe { read(functions, record) } {
            records.of_cards.push(read);
        }
    }
    drop(words);
}

/// A record and its card. `None` for other kinds.
///
/// # Safety
///
/// The address is that of a record of the library.
unsafe fn read(functions: &Functions, record: *const u32) -> Option<(Option<u32>, ActivityRecord)> {
    // SAFETY: every record begins with its kind, which decides where its fields are. Records lie at multiples of eight bytes.
    let word = |at: usize| unsafe { *record.byte_add(at) };
    // SAFETY: as above.
    let long = |at: usize| unsafe { *record.byte_add(at).cast::<u64>() };
    let words = |at: usize| [word(at), word(at + 4), word(at + 8)];
    let span = |at: usize| {
        let start_ns = long(at);
        Span { start_ns, end_ns: long(at + 8).max(start_ns) }
    };
    let (kind, card, span, correlation) = match word(0) {
        // CUpti_ActivityKernel
        KERNEL => {
            let kind = ActivityKind::Kernel {
                // SAFETY: the library's names are constants.
                name: unsafe { text(long(104) as *const c_char) }.to_string_lossy().into_owned(),
                stream: word(48),
                grid: words(52),
                block: words(64),
                registers: (word(4) >> 16) as u16,
                shared_bytes: word(76).saturating_add(word(80)),
            };
            (kind, Some(word(40)), span(16), word(92))
        }
        // CUpti_ActivityMemcpy and CUpti_ActivityMemset
        which @ (COPY | FILL) => {
            let (bytes, stream) = (long(8), word(40));
            let kind = if which == COPY {
                ActivityKind::Copy {
                    stream,
                    bytes,
                    places: (place(word(4) >> 8), place(word(4) >> 16)),
                }
            } else {
                ActivityKind::Fill { stream, bytes }
            };
            (kind, Some(word(32)), span(16), word(44))
        }
        // CUpti_ActivityAPI
        CALL => {
            let name = function_name(functions, word(4))?;
            (ActivityKind::Call { name, thread: word(28) }, None, span(8), word(32))
        }
        _ => return None,
    };
    Some((card, ActivityRecord { kind, span, correlation }))
}

/// # Safety
///
/// The address is null, or that of a text that ends with a zero byte and stays as long as the process.
unsafe fn text(at: *const c_char) -> &'static CStr {
    // SAFETY: the caller's.
    if at.is_null() { c"" } else { unsafe { CStr::from_ptr(at) } }
}

/// The kind of memory in the lowest byte.
fn place(kind: u32) -> Place {
    match kind & 0xff {
        1 => Place::Pageable,
        2 => Place::Pinned,
        _ => Place::Device,
    }
}

/// The name of a function of the driver, without the version behind it.
fn function_name(functions: &Functions, function: u32) -> Option<&'static str> {
    let mut name = std::ptr::null();
    // SAFETY: the address is that of a pointer, and the library's names are constants.
    let name = unsafe {
        let status = (functions.cuptiGetCallbackName)(DRIVER, function, &mut name);
        (status == 0).then(|| text(name))
    };
    let name = name?.to_str().ok()?;
    Some(name.split_once("_v").map_or(name, |(before, _)| before))
}

impl Functions {
    fn check(&self, function: &'static str, status: u32) -> Result<()> {
        if status == 0 {
            return Ok(());
        }
        let mut words = std::ptr::null();
        // SAFETY: the address is that of a pointer, and the library's texts are constants.
        let words = unsafe {
            (self.cuptiGetResultString)(status, &mut words);
            text(words)
        };
        let text = words.to_string_lossy().into_owned();
        Err(CudaError::Failed { function, status, name: "CUPTI".to_owned(), text })
    }

    /// Lets the library hand over all records of work that is done.
    fn flush(&self) -> Result<()> {
        // SAFETY: flushing has no condition; the callbacks are ours.
        self.check("cuptiActivityFlushAll", unsafe { (self.cuptiActivityFlushAll)(FORCED) })
    }

    fn enable(&self) -> Result<()> {
        // SAFETY: the functions have the types that the library states, and live as long as the process.
        unsafe {
            let status = (self.cuptiActivityRegisterTimestampCallback)(clock);
            self.check("cuptiActivityRegisterTimestampCallback", status)?;
            let status = (self.cuptiActivityRegisterCallbacks)(request, take);
            self.check("cuptiActivityRegisterCallbacks", status)?;
        }
        for kind in KINDS {
            // SAFETY: the number is one of the library's.
            let status = unsafe { (self.cuptiActivityEnable)(kind) };
            self.check("cuptiActivityEnable", status)?;
        }
        Ok(())
    }

    fn disable(&self) {
        for kind in KINDS {
            // SAFETY: the number is one of the library's. Nobody could mend an error here.
            let _ = unsafe { (self.cuptiActivityDisable)(kind) };
        }
    }
}

/// Records the activities of a card as long as it exists.
pub struct ActivityRecorder {
    functions: &'static Functions,
    card: Card,
}

impl ActivityRecorder {
    /// Begins to record. Errors if the library is missing or refuses: another profiler may use it, or the driver may keep it for
    /// administrators.
    pub fn start(card: &Card) -> Result<Self> {
        let functions = Functions::get()?;
        let mut recorders = lock(&RECORDERS);
        if *recorders == 0 {
            functions.enable().inspect_err(|_| functions.disable())?;
        }
        *recorders += 1;
        Ok(Self { functions, card: card.clone() })
    }

    /// The activities of the card so far, by time, and how many were lost. Waits until the card is idle. A call belongs to the
    /// card if its thread has put work there.
    pub fn finish(self) -> Result<(Vec<ActivityRecord>, u64)> {
        self.card.synchronize()?;
        self.functions.flush()?;
        let mut lost = 0;
        // SAFETY: the address is that of a number; no context stands for all.
        unsafe { (self.functions.cuptiActivityGetNumDroppedRecords)(null_mut(), 0, &mut lost) };
        let mut records = lock(&RECORDS);
        let of_card = Some(self.card.index() as u32);
        let numbers: HashSet<u32> = (records.of_cards.iter())
            .filter(|(card, _)| *card == of_card)
            .map(|(_, of)| of.correlation)
            .collect();
        let threads: HashMap<u32, u32> = (records.of_cards.iter())
            .filter_map(|(_, of)| match of.kind {
                ActivityKind::Call { thread, .. } => Some((of.correlation, thread)),
                _ => None,
            })
            .collect();
        let threads: HashSet<&u32> = numbers.iter().filter_map(|of| threads.get(of)).collect();
        let is_mine = |(card, of): &mut (Option<u32>, ActivityRecord)| match of.kind {
            ActivityKind::Call { thread, .. } => threads.contains(&thread),
            _ => *card == of_card,
        };
        let mut mine: Vec<ActivityRecord> =
            records.of_cards.extract_if(.., is_mine).map(|(_, of)| of).collect();
        mine.sort_by_key(|of| of.span.start_ns);
        Ok((mine, records.dropped + lost as u64))
    }
}

impl Drop for ActivityRecorder {
    fn drop(&mut self) {
        let mut recorders = lock(&RECORDERS);
        *recorders -= 1;
        if *recorders == 0 {
            self.functions.disable();
            let _ = self.functions.flush();
            *lock(&RECORDS) = Records::default();
        }
    }
}

impl fmt::Debug for ActivityRecorder {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("ActivityRecorder")
    }
}
