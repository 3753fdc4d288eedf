//! Communication between cards by NCCL.
//!
//! Input: addresses on a card, ranks, a stream. Output: work of the stream. All ranks of a communicator call the same
//! functions in the same order; what happens if they do not is not defined, so whoever calls compares the calls first.

use std::ffi::{CStr, c_char, c_int};
use std::fmt;
use std::sync::atomic::{AtomicBool, Ordering};

use crate::driver::Handle;
use crate::library::{Names, functions};
use crate::{Card, CudaError, Result, Stream};

const NAMES: Names = Names {
    files: &["libnccl.so.2", "libnccl.so"],
    companion: None,
    hint: "install it with `pip install nvidia-nccl-cu13`, and name its folder in PACELINE_CUDA_LIBRARIES",
};

functions! {
    /// The functions of the library.
    Functions in NAMES;
    fn ncclGetVersion(version: *mut c_int);
    fn ncclGetUniqueId(id: *mut UniqueId);
    fn ncclCommInitRank(communicator: *mut Handle, ranks: c_int, id: UniqueId, rank: c_int);
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
/// More work is queued, and nothing has failed.
const IN_PROGRESS: u32 = 7;

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
        // SAFETY: this is the function's type. It returns a constant text.
        let text = unsafe {
            let words = self
                .library
                .function::<unsafe extern "C" fn(u32) -> *const c_char>("ncclGetErrorString")?;
            CStr::from_ptr(words(status)).to_string_lossy().into_owned()
        };
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

/// What one rank moves to or from another one, or itself.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Message {
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

/// How NCCL itself reduces: in an order of its own.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Reduction {
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
}

// SAFETY: a communicator may be used from any thread, one at a time.
unsafe impl Send for Communicator {}
// SAFETY: the functions that are called from several threads at once, those of errors and of ending, may be.
unsafe impl Sync for Communicator {}

impl Communicator {
    /// Joins the ranks with the same name, and blocks until all have joined. Errors if two of them use one card, or if the
    /// library cannot connect them.
    pub fn join(card: &Card, id: UniqueId, rank: usize, ranks: usize) -> Result<Self> {
        let functions = Functions::get()?;
        card.current()?;
        let mut handle = std::ptr::null_mut();
        // SAFETY: the address is that of a handle, and the card of this thread is set.
        let status =
            unsafe { (functions.ncclCommInitRank)(&mut handle, ranks as c_int, id, rank as c_int) };
        functions.check("ncclCommInitRank", status)?;
        Ok(Self { functions, handle, is_aborted: AtomicBool::new(false) })
    }

    /// Calls a function that puts work into a stream.
    fn queue(
        &self,
        stream: &Stream,
        function: &'static str,
        call: impl FnOnce(&Functions, Handle, Handle) -> u32,
    ) -> Result<()> {
        stream.card().current()?;
        self.functions.check(function, call(self.functions, self.handle, stream.handle()))
    }

    /// Moves messages, all at the same time.
    ///
    /// # Safety
    ///
    /// The ranges are on the stream's card, those that are written overlap no other, and nobody uses them against that
    /// until the work is done. No rank of the communicator does anything else with it.
    pub unsafe fn exchange(&self, stream: &Stream, messages: &[Message]) -> Result<()> {
        stream.card().current()?;
        let (of, comm, stream) = (self.functions, self.handle, stream.handle());
        // SAFETY: the caller's.
        unsafe {
            of.check("ncclGroupStart", (of.ncclGroupStart)())?;
            // A group that was started is ended, whatever happens.
            let called = messages.iter().try_for_each(|message| match *message {
                Message::Send { from, bytes, to } => of.check(
                    "ncclSend",
                    (of.ncclSend)(from, bytes, BYTES, to as c_int, comm, stream),
                ),
                Message::Receive { to, bytes, from } => of.check(
                    "ncclRecv",
                    (of.ncclRecv)(to, bytes, BYTES, from as c_int, comm, stream),
                ),
            });
            let ended = of.check("ncclGroupEnd", (of.ncclGroupEnd)());
            called.and(ended)
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
        by: Reduction,
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
        by: Reduction,
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
        by: Reduction,
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
    pub fn abort(&self) {
        if !self.is_aborted.swap(true, Ordering::SeqCst) {
            // SAFETY: this is done once, and instead of ending it in order.
            let _ = unsafe { (self.functions.ncclCommAbort)(self.handle) };
        }
    }
}

impl Drop for Communicator {
    fn drop(&mut self) {
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
