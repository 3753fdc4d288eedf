//! Communication between cards by NCCL.
//!
//! Input: addresses on a card, ranks, a stream. Output: work of the stream. All ranks of a communicator call the same
//! functions in the same order; otherwise the behavior is undefined, so callers compare the calls first.
//!
//! No call blocks: the library is queried until it is done, up to a time limit. The caller that gets the error then aborts the
//! communicator, since the library would wait forever for a rank that never comes.

use std::ffi::c_int;
use std::fmt;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use paceline_trace::{lock, thread_builder};

use crate::driver::Handle;
use crate::library::{LibraryNames, functions};
use crate::{Card, CudaError, Result, Stream};

const NAMES: LibraryNames = LibraryNames {
    files: &["libnccl.so.2", "libnccl.so"],
    companion: None,
    hint: "install it with `pip install nvidia-nccl-cu13`, and name its folder in PACELINE_CUDA_LIBRARIES",
};

functions! {
    Functions in NAMES;
    fn ncclGetVersion(version: *mut c_int);
    fn ncclGetUniqueId(id: *mut UniqueId);
    fn ncclCommInitRankConfig(communicator: *mut Handle, ranks: c_int, id: UniqueId, rank: c_int, config: *mut CommunicatorConfig);
    fn ncclCommDestroy(communicator: Handle);
    fn ncclCommAbort(communicator: Handle);
    fn ncclCommGetAsyncError(communicator: Handle, error: *mut u32);
    fn ncclGroupStart();
    fn ncclGroupEnd();
    fn ncclSend(from: u64, count: usize, number: u32, to: c_int, communicator: Handle, stream: Handle);
    fn ncclRecv(to: u64, count: usize, number: u32, from: c_int, communicator: Handle, stream: Handle);
    fn ncclBroadcast(from: u64, to: u64, count: usize, number: u32, root: c_int, communicator: Handle, stream: Handle);
    fn ncclAllGather(from: u64, to: u64, count: usize, number: u32, communicator: Handle, stream: Handle);
    fn ncclAllReduce(from: u64, to: u64, count: usize, number: u32, op: u32, communicator: Handle, stream: Handle);
    fn ncclReduceScatter(from: u64, to: u64, count: usize, number: u32, op: u32, communicator: Handle, stream: Handle);
    fn ncclReduce(from: u64, to: u64, count: usize, number: u32, op: u32, root: c_int, communicator: Handle, stream: Handle);
}

/// The type of bytes, and of u8.
const BYTES: u32 = 1;
/// The library is not done with a call, and nothing has failed.
const IN_PROGRESS: u32 = 7;

/// `ncclConfig_t` as of version 2.14. A later library uses its defaults for later fields.
#[repr(C)]
pub(crate) struct CommunicatorConfig {
    size: usize,
    magic: u32,
    version: u32,
    blocking: c_int,
    /// Padding.
    rest: c_int,
}

/// The time between two queries of the library.
const LOOK_AGAIN: Duration = Duration::from_micros(50);
/// A longer time between two looks was that of a process that was suspended, and counts as this.
const MOST_BETWEEN: Duration = Duration::from_secs(1);

impl Functions {
    fn check(&self, function: &'static str, status: u32) -> Result<()> {
        const NAMES: [&str; 7] = [
            "ncclSuccess",
            "ncclUnhandledCudaError",
            "ncclSystemError",
            "ncclInternalError",
            "ncclInvalidArgument",
            "ncclInvalidUsage",
            "ncclRemoteError",
        ];
        if matches!(status, 0 | IN_PROGRESS) {
            return Ok(());
        }
        // SAFETY: the function is of this kind.
        let text = unsafe { self.library.status_text("ncclGetErrorString", status) }?;
        let name = NAMES.get(status as usize).copied().unwrap_or("unknown").to_owned();
        Err(CudaError::Failed { function, status, name, text })
    }
}

/// The version of the library, such as 22809 for 2.28.9. Errors if there is none.
pub fn version() -> Result<i32> {
    let functions = Functions::get()?;
    let mut version = 0;
    // SAFETY: the address is that of a number.
    functions.check("ncclGetVersion", unsafe { (functions.ncclGetVersion)(&mut version) })?;
    Ok(version)
}

/// The name of a communicator, which one rank makes and all get.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct UniqueId([u8; 128]);

impl UniqueId {
    /// A new name.
    pub fn new() -> Result<Self> {
        let functions = Functions::get()?;
        let mut id = Self([0; 128]);
        // SAFETY: the address is that of an id.
        functions.check("ncclGetUniqueId", unsafe { (functions.ncclGetUniqueId)(&mut id) })?;
        Ok(id)
    }

    /// Its bytes, to be sent.
    pub fn bytes(&self) -> &[u8; 128] {
        &self.0
    }

    /// The name with these bytes.
    pub fn of(bytes: [u8; 128]) -> Self {
        Self(bytes)
    }
}

/// Bytes that a rank sends or receives.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PeerMessage {
    /// These bytes go to a rank.
    Send {
        /// Where they are.
        from: u64,
        /// How many.
        bytes: usize,
        /// The rank.
        to: usize,
    },
    /// Bytes come from a rank.
    Receive {
        /// Where they are put.
        to: u64,
        /// How many.
        bytes: usize,
        /// The rank.
        from: usize,
    },
}

/// A reduction in an order of the library.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ReductionCodes {
    /// The library's number for the type of the elements.
    pub number: u32,
    /// The library's number for the operation.
    pub op: u32,
}

/// A rank's end of a communicator.
pub struct Communicator {
    functions: &'static Functions,
    handle: Handle,
    is_aborted: AtomicBool,
    /// Ends the communicator, if it was aborted.
    ending: Mutex<Option<JoinHandle<()>>>,
    limit: Duration,
}

// SAFETY: a communicator may be used from any thread, one at a time.
unsafe impl Send for Communicator {}
// SAFETY: the functions that are called from several threads at once, those of errors and of ending, may be.
unsafe impl Sync for Communicator {}

impl Communicator {
    /// Joins the ranks with the same name, and waits until all have joined. This and later calls take at most `limit` (see
    /// [`Communicator::set_limit`]).
    /// Errors if one does not come in time, if two of them use one card, or if the library cannot connect them.
    pub fn join(
        card: &Card,
        id: UniqueId,
        (rank, ranks): (usize, usize),
        limit: Duration,
    ) -> Result<Self> {
        let functions = Functions::get()?;
        card.current()?;
        let size = size_of::<CommunicatorConfig>();
        let (magic, version) = (0xcafe_beef, 21_400);
        let mut config = CommunicatorConfig { size, magic, version, blocking: 0, rest: 0 };
        let mut handle = std::ptr::null_mut();
        // SAFETY: the addresses are those of a handle and of a configuration that is read during the call, and the card of
        // this thread is set.
        let status = unsafe {
            let (ranks, rank) = (ranks as c_int, rank as c_int);
            (functions.ncclCommInitRankConfig)(&mut handle, ranks, id, rank, &mut config)
        };
        let began = functions.check("ncclCommInitRankConfig", status);
        let began = match began {
            // Without a communicator nothing is in progress.
            Err(error) if handle.is_null() => return Err(error),
            began => began,
        };
        let (is_aborted, ending) = Default::default();
        let joined = Self { functions, handle, is_aborted, ending, limit };
        match began.and_then(|()| joined.settle("ncclCommInitRankConfig", IN_PROGRESS)) {
            Ok(()) => Ok(joined),
            Err(error) => {
                joined.abort();
                Err(error)
            }
        }
    }

    /// From now on, a call may take this long.
    pub fn set_limit(&mut self, limit: Duration) {
        self.limit = limit;
    }

    /// Waits until the library is done with a call that returned this status.
    fn settle(&self, function: &'static str, status: u32) -> Result<()> {
        let (mut state, mut waited, mut looked) = (status, Duration::ZERO, Instant::now());
        while state == IN_PROGRESS {
            // SAFETY: the address is that of a number.
            let asked = unsafe { (self.functions.ncclCommGetAsyncError)(self.handle, &mut state) };
            self.functions.check("ncclCommGetAsyncError", asked)?;
            if state == IN_PROGRESS {
                if waited > self.limit {
                    return Err(CudaError::Late { function, limit: self.limit });
                }
                std::thread::sleep(LOOK_AGAIN);
                waited += looked.elapsed().min(MOST_BETWEEN);
                looked = Instant::now();
            }
        }
        self.functions.check(function, state)
    }

    /// Calls a function that puts work into a stream.
    fn queue(
        &self,
        stream: &Stream,
        function: &'static str,
        call: impl FnOnce(&Functions, Handle, Handle) -> u32,
    ) -> Result<()> {
        stream.card().current()?;
        self.settle(function, call(self.functions, self.handle, stream.handle()))
    }

    /// Moves messages, all at the same time.
    ///
    /// # Safety
    ///
    /// The ranges are on the stream's card, those that are written overlap no other, and nobody uses them against that
    /// until the work is done. No rank of the communicator does anything else with it.
    pub unsafe fn exchange(&self, stream: &Stream, messages: &[PeerMessage]) -> Result<()> {
        stream.card().current()?;
        let (of, comm, stream) = (self.functions, self.handle, stream.handle());
        // SAFETY: the caller's.
        unsafe {
            of.check("ncclGroupStart", (of.ncclGroupStart)())?;
            // A group that was started must be ended.
            let called = messages.iter().try_for_each(|message| match *message {
                PeerMessage::Send { from, bytes, to } => of.check(
                    "ncclSend",
                    (of.ncclSend)(from, bytes, BYTES, to as c_int, comm, stream),
                ),
                PeerMessage::Receive { to, bytes, from } => of.check(
                    "ncclRecv",
                    (of.ncclRecv)(to, bytes, BYTES, from as c_int, comm, stream),
                ),
            });
            let ended = (of.ncclGroupEnd)();
            called.and_then(|()| self.settle("ncclGroupEnd", ended))
        }
    }

    /// Gives every rank the root's bytes. Only the root's `from` counts.
    ///
    /// # Safety
    ///
    /// As for [`Communicator::exchange`]; `from` may be `to`.
    pub unsafe fn broadcast(
        &self,
        stream: &Stream,
        (from, to, bytes): (u64, u64, usize),
        root: usize,
    ) -> Result<()> {
        // SAFETY: the caller's.
        self.queue(stream, "ncclBroadcast", |of, comm, stream| unsafe {
            (of.ncclBroadcast)(from, to, bytes, BYTES, root as c_int, comm, stream)
        })
    }

    /// Gives every rank the bytes of all, as many of each.
    ///
    /// # Safety
    ///
    /// As for [`Communicator::exchange`]; `from` may be the rank's place in `to`.
    pub unsafe fn all_gather(
        &self,
        stream: &Stream,
        from: u64,
        to: u64,
        bytes: usize,
    ) -> Result<()> {
        // SAFETY: the caller's.
        self.queue(stream, "ncclAllGather", |of, comm, stream| unsafe {
            (of.ncclAllGather)(from, to, bytes, BYTES, comm, stream)
        })
    }

    /// Gives every rank the reduction of all, in the library's order.
    ///
    /// # Safety
    ///
    /// As for [`Communicator::exchange`]; `from` may be `to`. There are `count` elements of the reduction's type.
    pub unsafe fn all_reduce(
        &self,
        stream: &Stream,
        (from, to, count): (u64, u64, usize),
        by: ReductionCodes,
    ) -> Result<()> {
        // SAFETY: the caller's.
        self.queue(stream, "ncclAllReduce", |of, comm, stream| unsafe {
            (of.ncclAllReduce)(from, to, count, by.number, by.op, comm, stream)
        })
    }

    /// Gives every rank its share of the reduction, as many elements each, in the library's order.
    ///
    /// # Safety
    ///
    /// As for [`Communicator::all_reduce`]; `to` may be the rank's place in `from`, and `count` is that of a share.
    pub unsafe fn reduce_scatter(
        &self,
        stream: &Stream,
        (from, to, count): (u64, u64, usize),
        by: ReductionCodes,
    ) -> Result<()> {
        // SAFETY: the caller's.
        self.queue(stream, "ncclReduceScatter", |of, comm, stream| unsafe {
            (of.ncclReduceScatter)(from, to, count, by.number, by.op, comm, stream)
        })
    }

    /// Gives the root the reduction of all, in the library's order.
    ///
    /// # Safety
    ///
    /// As for [`Communicator::all_reduce`]; only the root's `to` counts.
    pub unsafe fn reduce(
        &self,
        stream: &Stream,
        (from, to, count): (u64, u64, usize),
        by: ReductionCodes,
        root: usize,
    ) -> Result<()> {
        // SAFETY: the caller's.
        self.queue(stream, "ncclReduce", |of, comm, stream| unsafe {
            (of.ncclReduce)(from, to, count, by.number, by.op, root as c_int, comm, stream)
        })
    }

    /// Errors if work that was queued has failed since, for example because a rank has died.
    pub fn check(&self) -> Result<()> {
        let mut error = 0;
        // SAFETY: the address is that of a number.
        let status = unsafe { (self.functions.ncclCommGetAsyncError)(self.handle, &mut error) };
        self.functions.check("ncclCommGetAsyncError", status)?;
        self.functions.check("the communication between cards", error)
    }

    /// Ends the work that waits for other ranks. Nothing can be done with the communicator afterwards.
    ///
    /// The library also waits until the graphs with work of the communicator are gone. The caller may have them, so it does not wait for
    /// the library; the end of this value does.
    pub fn abort(&self) {
        if self.is_aborted.swap(true, Ordering::SeqCst) {
            return;
        }
        let (functions, handle) = (self.functions, self.handle as usize);
        let abort = move || {
            // SAFETY: this is done once, and instead of ending it in order.
            let _ = unsafe { (functions.ncclCommAbort)(handle as Handle) };
        };
        // Without a thread the work stays, as that of a process that is killed.
        *lock(&self.ending) = thread_builder("nccl-abort").spawn(abort).ok();
    }
}

/// The graphs with work of the communicator must be gone by then, since the library waits for their end.
impl Drop for Communicator {
    fn drop(&mut self) {
        if let Some(ending) = self.ending.get_mut().unwrap_or_else(PoisonError::into_inner).take() {
            let _ = ending.join();
        }
        if !self.is_aborted.load(Ordering::SeqCst) {
            // SAFETY: nobody has it any longer, and it was not aborted.
            let _ = unsafe { (self.functions.ncclCommDestroy)(self.handle) };
        }
    }
}

impl fmt::Debug for Communicator {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Communicator")
    }
}
