//! A communicator, and the transfers in flight on it: transfers that have begun and are not known to be
//! finished.
//!
//! Input: regions of memory and peers. Output: finished transfers, or an error that names the missing
//! ranks. This module does not know which collective operations exist.

use std::ffi::{c_int, c_void};
use std::time::Duration;

use mpi_sys as ffi;
use paceline_memory::DType;
use paceline_trace::now_ns;

use super::runtime::{Runtime, datatype};
use crate::call::Region;
use crate::context::{OpContext, Waited};
use crate::{CollectiveError, Result};

/// The most elements of one transfer, since counts and displacements are C's `int`. In builds with
/// assertions the limit is small, so that tests reach it.
pub(super) const MOST: usize = if cfg!(debug_assertions) { 1 << 15 } else { i32::MAX as usize };

/// The MPI tag, which distinguishes the transfers between two ranks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Tag {
    Header = 1,
    Data = 2,
}

#[derive(Debug)]
pub(super) struct Comm {
    pub(super) handle: ffi::MPI_Comm,
    pub(super) runtime: Runtime,
    /// Whether a transfer was left in flight for good.
    is_abandoned: bool,
}

// SAFETY: handles belong to the process, not to a thread, and calls are made one at a time wherever
// the library needs that.
unsafe impl Send for Comm {}

/// Transfers that have begun and are not known to be finished.
pub(super) struct Transfers {
    /// Each with the peer to name if the wait times out.
    requests: Vec<(Option<usize>, ffi::MPI_Request)>,
}

impl Comm {
    /// A duplicate of the communicator of all ranks, so that messages of other code cannot mix with ours.
    pub(super) fn world(runtime: Runtime) -> Result<Self, String> {
        // SAFETY: this is a constant of the library.
        let world = unsafe { ffi::RSMPI_COMM_WORLD };
        let mut handle = world;
        // SAFETY: the library runs; all ranks make this call before any other.
        runtime.call(|| unsafe { ffi::MPI_Comm_dup(world, &mut handle) })?;
        Self::own(handle, runtime)
    }

    fn own(handle: ffi::MPI_Comm, runtime: Runtime) -> Result<Self, String> {
        // Errors come back as codes. By default the library would end the process.
        // SAFETY: the communicator is new, and only this crate uses it.
        let quiet = || unsafe { ffi::MPI_Comm_set_errhandler(handle, ffi::RSMPI_ERRORS_RETURN) };
        runtime.call(quiet)?;
        Ok(Self { handle, runtime, is_abandoned: false })
    }

    /// This rank and the number of ranks.
    pub(super) fn place(&self) -> Result<(usize, usize), String> {
        let (mut rank, mut world) = (0, 0);
        // SAFETY: the communicator is valid.
        self.runtime.call(|| unsafe { ffi::MPI_Comm_rank(self.handle, &mut rank) })?;
        // SAFETY: as above.
        self.runtime.call(|| unsafe { ffi::MPI_Comm_size(self.handle, &mut world) })?;
        Ok((rank as usize, world as usize))
    }

    /// The communicator of the ranks that pass the same color, in their order. All ranks call this.
    pub(super) fn split(&self, color: Option<usize>, rank: usize) -> Result<Option<Self>, String> {
        // SAFETY: these are constants of the library.
        let (undefined, null) = unsafe { (ffi::RSMPI_UNDEFINED, ffi::RSMPI_COMM_NULL) };
        let number = color.map_or(undefined, |color| color as c_int);
        let mut handle = null;
        // SAFETY: the communicator is valid, and the answer outlives the call.
        self.runtime.call(|| unsafe {
            ffi::MPI_Comm_split(self.handle, number, rank as c_int, &mut handle)
        })?;
        match color {
            Some(_) => Self::own(handle, self.runtime.share()).map(Some),
            None => Ok(None),
        }
    }

    /// Begins a transfer by `start`.
    ///
    /// # Safety
    ///
    /// The memory that the transfer uses stays valid until the flight has landed, or for good if it fails.
    unsafe fn begin(
        &self,
        context: &OpContext,
        flight: &mut Transfers,
        peer: Option<usize>,
        start: impl FnOnce(*mut ffi::MPI_Request) -> c_int,
    ) -> Result<()> {
        // SAFETY: this is a constant of the library.
        let mut request = unsafe { ffi::RSMPI_REQUEST_NULL };
        let begun = self.runtime.call(|| start(&mut request));
        begun.map_err(|reason| failed(context, reason))?;
        flight.requests.push((peer, request));
        Ok(())
    }

    /// # Safety
    ///
    /// As for [`Comm::begin`].
    pub(super) unsafe fn send(
        &self,
        context: &OpContext,
        flight: &mut Transfers,
        (peer, tag): (usize, Tag),
        (region, dtype): (Region, DType),
    ) -> Result<()> {
        for part in parts(region, dtype) {
            let (base, elems) = (address(part), (part.len_bytes / dtype.size_bytes()) as c_int);
            // A time-out names the ranks whose headers have not come, so a send has no peer to name.
            // SAFETY: as required of the caller; the part lies within the region.
            unsafe {
                self.begin(context, flight, None, |request| {
                    let (to, tag) = (peer as c_int, tag as c_int);
                    ffi::MPI_Isend(base, elems, datatype(dtype), to, tag, self.handle, request)
                })?;
            }
        }
        Ok(())
    }

    /// # Safety
    ///
    /// As for [`Comm::begin`].
    pub(super) unsafe fn recv(
        &self,
        context: &OpContext,
        flight: &mut Transfers,
        (peer, tag): (usize, Tag),
        (region, dtype): (Region, DType),
    ) -> Result<()> {
        let awaited = (tag == Tag::Header).then_some(peer);
        for part in parts(region, dtype) {
            let (base, elems) = (address(part), (part.len_bytes / dtype.size_bytes()) as c_int);
            // SAFETY: as required of the caller; the part lies within the region.
            unsafe {
                self.begin(context, flight, awaited, |request| {
                    let (from, tag) = (peer as c_int, tag as c_int);
                    ffi::MPI_Irecv(base, elems, datatype(dtype), from, tag, self.handle, request)
                })?;
            }
        }
        Ok(())
    }

    /// Carries out one collective transfer, which `start` begins.
    ///
    /// # Safety
    ///
    /// The memory that the transfer uses stays valid until this returns, or for good if this fails.
    pub(super) unsafe fn carry_out(
        &self,
        context: &OpContext,
        start: impl FnOnce(ffi::MPI_Comm, *mut ffi::MPI_Request) -> c_int,
    ) -> Result<()> {
        let mut flight = Transfers::new();
        // SAFETY: as required of the caller.
        unsafe { self.begin(context, &mut flight, None, |request| start(self.handle, request))? };
        self.land(context, &mut flight)
    }

    /// Like [`Comm::carry_out`], by a blocking call, without a time limit.
    ///
    /// # Safety
    ///
    /// As for [`Comm::carry_out`].
    pub(super) unsafe fn carry_out_blocking(
        &self,
        context: &OpContext,
        transfer: impl FnOnce(ffi::MPI_Comm) -> c_int,
    ) -> Result<()> {
        let carried = self.runtime.call(|| transfer(self.handle));
        carried.map_err(|reason| failed(context, reason))
    }

    /// Waits until all transfers of the flight are finished, at most for the time limit.
    ///
    /// The library moves data only while it is called. Between the calls this yields
    /// the core, and sleeps when the wait gets long.
    pub(super) fn land(&self, context: &OpContext, flight: &mut Transfers) -> Result<()> {
        let mut wait = Waited::begin(now_ns());
        let mut nap = Duration::from_micros(20);
        loop {
            let mut at = 0;
            while let Some((_, request)) = flight.requests.get_mut(at) {
                let mut is_done = 0;
                // SAFETY: the request is one that was begun and is not finished.
                let tested = self.runtime.call(|| unsafe {
                    ffi::MPI_Test(request, &mut is_done, ffi::RSMPI_STATUS_IGNORE)
                });
                tested.map_err(|reason| failed(context, reason))?;
                match is_done {
                    0 => at += 1,
                    _ => drop(flight.requests.swap_remove(at)),
                }
            }
            if flight.requests.is_empty() {
                return Ok(());
            }
            let waited = wait.until(now_ns());
            if waited > context.policy.limit {
                let mut missing: Vec<usize> =
                    flight.requests.iter().filter_map(|(peer, _)| *peer).collect();
                missing.sort_unstable();
                missing.dedup();
                return Err(context.timed_out(missing));
            }
            if waited < context.policy.spin {
                std::hint::spin_loop();
            } else if waited < YIELDING {
                std::thread::yield_now();
            } else {
                std::thread::sleep(nap);
                nap = (2 * nap).min(LONGEST_NAP);
            }
        }
    }

    /// Remembers that a transfer may stay in flight for good.
    pub(super) fn abandon(&mut self) {
        self.is_abandoned = true;
        Runtime::abandon();
    }
}

/// How long a wait only yields the core before it begins to sleep.
const YIELDING: Duration = Duration::from_millis(2);

const LONGEST_NAP: Duration = Duration::from_micros(500);

impl Drop for Comm {
    fn drop(&mut self) {
        if !self.is_abandoned && !std::thread::panicking() {
            // If the call fails, the communicator stays until the process ends.
            // SAFETY: nothing is in flight, and nobody uses the communicator after this.
            let _ = self.runtime.call(|| unsafe { ffi::MPI_Comm_free(&mut self.handle) });
        }
    }
}

impl Transfers {
    pub(super) fn new() -> Self {
        Self { requests: Vec::new() }
    }
}

/// The library's error as an error of the operation.
pub(super) fn failed(context: &OpContext, reason: String) -> CollectiveError {
    let (rank, op, seq) = (context.first + context.rank, context.call.kind.name(), context.seq);
    CollectiveError::Mpi { rank, op, seq, reason }
}

/// The address of an empty region. The address of an empty slice could be one that has a
/// special meaning in MPI.
static NOTHING: u64 = 0;

pub(super) fn address(region: Region) -> *mut c_void {
    match region.len_bytes {
        0 => (&raw const NOTHING).cast_mut().cast(),
        _ => region.base.cast(),
    }
}

/// The region in parts that one transfer can carry.
fn parts(region: Region, dtype: DType) -> impl Iterator<Item = Region> {
    let most_bytes = MOST * dtype.size_bytes();
    let starts = (0..region.len_bytes).step_by(most_bytes);
    starts.map(move |start| region.part(start..(start + most_bytes).min(region.len_bytes)))
}
