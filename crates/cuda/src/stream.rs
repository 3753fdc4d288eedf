//! Queues of work of a card, and events between pieces of work.

use std::ffi::c_void;
use std::fmt;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

use paceline_trace::lock;

use crate::driver::{Driver, Handle, NOT_READY};
use crate::kernel::{ArgumentType, Arguments, CardKernel, Grid};
use crate::matmul::WORKSPACE_BYTES;
use crate::{Card, Matmul, Result};

/// Streams do not wait for the driver's default stream, which nothing uses.
const NON_BLOCKING: u32 = 1;

/// A queue of work of a card. Clones are the same queue. It is given back with the last clone; work that is queued then still
/// runs.
#[derive(Clone)]
pub struct Stream(Arc<StreamHandle>);

struct StreamHandle {
    card: Card,
    handle: Handle,
    /// Memory of the card for products of this stream.
    workspace: Mutex<Option<u64>>,
    is_capturing: AtomicBool,
}

// SAFETY: a stream may be used from any thread that has made its context current.
unsafe impl Send for StreamHandle {}
// SAFETY: as for `Send`.
unsafe impl Sync for StreamHandle {}

impl Stream {
    /// A new stream.
    pub fn new(card: &Card) -> Result<Self> {
        let driver = card.current()?;
        let mut handle = std::ptr::null_mut();
        // SAFETY: the address is that of a handle.
        let status = unsafe { (driver.cuStreamCreate)(&mut handle, NON_BLOCKING) };
        driver.check("cuStreamCreate", status)?;
        let (card, workspace) = (card.clone(), Mutex::default());
        let is_capturing = AtomicBool::new(false);
        Ok(Self(Arc::new(StreamHandle { card, handle, workspace, is_capturing })))
    }

    /// The card.
    pub fn card(&self) -> &Card {
        &self.0.card
    }

    pub(crate) fn handle(&self) -> Handle {
        self.0.handle
    }

    /// Whether work is captured for a graph, and does not run.
    pub(crate) fn is_capturing(&self) -> bool {
        self.0.is_capturing.load(Ordering::Relaxed)
    }

    pub(crate) fn set_capturing(&self, is_capturing: bool) {
        self.0.is_capturing.store(is_capturing, Ordering::Relaxed);
    }

    /// Memory that products of this stream may use while they run, of [`WORKSPACE_BYTES`].
    pub(crate) fn workspace(&self) -> Result<u64> {
        let mut workspace = lock(&self.0.workspace);
        match *workspace {
            Some(address) => Ok(address),
            None => Ok(*workspace.insert(self.0.card.allocate(WORKSPACE_BYTES)?)),
        }
    }

    fn driver(&self) -> Result<&'static Driver> {
        self.0.card.current()
    }

    /// Lets all later work wait for an event.
    pub fn wait(&self, event: &Event) -> Result<()> {
        let driver = self.driver()?;
        // SAFETY: both handles are alive.
        let status = unsafe { (driver.cuStreamWaitEvent)(self.0.handle, event.0.handle, 0) };
        driver.check("cuStreamWaitEvent", status)
    }

    /// Puts an event after all work so far.
    pub fn record(&self, event: &Event) -> Result<()> {
        let driver = self.driver()?;
        // SAFETY: both handles are alive.
        driver.check("cuEventRecord", unsafe {
            (driver.cuEventRecord)(event.0.handle, self.0.handle)
        })
    }

    /// Blocks until all work is done.
    pub fn synchronize(&self) -> Result<()> {
        let driver = self.driver()?;
        // SAFETY: the handle is alive.
        driver.check("cuStreamSynchronize", unsafe { (driver.cuStreamSynchronize)(self.0.handle) })
    }

    /// Copies bytes from the host to the card.
    ///
    /// # Safety
    ///
    /// Both ranges have this length. Until the work is done they stay in place, and nobody writes to the first or uses the
    /// second.
    pub unsafe fn copy_to_card(&self, from: *const u8, to: u64, bytes: usize) -> Result<()> {
        let driver = self.driver()?;
        // SAFETY: the caller's.
        let status =
            unsafe { (driver.cuMemcpyHtoDAsync_v2)(to, from.cast(), bytes, self.0.handle) };
        driver.check("cuMemcpyHtoDAsync", status)
    }

    /// Copies bytes from the card to the host.
    ///
    /// # Safety
    ///
    /// As for [`Stream::copy_to_card`].
    pub unsafe fn copy_to_host(&self, from: u64, to: *mut u8, bytes: usize) -> Result<()> {
        let driver = self.driver()?;
        // SAFETY: the caller's.
        let status =
            unsafe { (driver.cuMemcpyDtoHAsync_v2)(to.cast(), from, bytes, self.0.handle) };
        driver.check("cuMemcpyDtoHAsync", status)
    }

    /// Copies bytes on the card.
    ///
    /// # Safety
    ///
    /// As for [`Stream::copy_to_card`].
    pub unsafe fn copy_on_card(&self, from: u64, to: u64, bytes: usize) -> Result<()> {
        let driver = self.driver()?;
        // SAFETY: the caller's.
        let status = unsafe { (driver.cuMemcpyDtoDAsync_v2)(to, from, bytes, self.0.handle) };
        driver.check("cuMemcpyDtoDAsync", status)
    }

    /// Sets bytes of the card.
    ///
    /// # Safety
    ///
    /// The range has this length, stays in place until the work is done, and nobody else uses it until then.
    pub unsafe fn fill(&self, at: u64, value: u8, bytes: usize) -> Result<()> {
        let driver = self.driver()?;
        // SAFETY: the caller's.
        let status = unsafe { (driver.cuMemsetD8Async)(at, value, bytes, self.0.handle) };
        driver.check("cuMemsetD8Async", status)
    }

    /// Launches a kernel. Errors if it has other parameters than these.
    ///
    /// # Safety
    ///
    /// The kernel touches only memory that its arguments name; that memory stays in place until the work is done, and
    /// nobody else uses it against the kernel's access until then.
    pub unsafe fn launch<A: Arguments>(
        &self,
        kernel: CardKernel,
        arguments: A,
        grid: Grid,
    ) -> Result<()> {
        // SAFETY: the caller's, and the words are those of the types.
        unsafe { self.launch_words(kernel, A::TYPES, arguments.words(), grid) }
    }

    /// # Safety
    ///
    /// As for [`Stream::launch`]; the words are those of arguments of these types.
    unsafe fn launch_words(
        &self,
        kernel: CardKernel,
        types: &[ArgumentType],
        mut words: Vec<u64>,
        grid: Grid,
    ) -> Result<()> {
        if grid.blocks.contains(&0) {
            return Ok(());
        }
        let function = self.0.card.function(&kernel, types)?;
        let driver = self.driver()?;
        let ([grid_x, grid_y, grid_z], [block_x, block_y, block_z]) = (grid.blocks, grid.threads);
        let mut rest = words.as_mut_slice();
        let address_of = |of: &ArgumentType| {
            let (argument, after) = std::mem::take(&mut rest).split_at_mut(of.num_words());
            rest = after;
            argument.as_mut_ptr().cast()
        };
        let mut addresses: Vec<*mut c_void> = types.iter().map(address_of).collect();
        if grid.shared_bytes > DEFAULT_SHARED_BYTES {
            // SAFETY: the function is loaded.
            let status = unsafe {
                (driver.cuFuncSetAttribute)(function.0, MAX_SHARED_BYTES, grid.shared_bytes as i32)
            };
            driver.check("cuFuncSetAttribute", status)?;
        }
        // SAFETY: the arguments have the types of the kernel's parameters; the caller's for the memory.
        let status = unsafe {
            (driver.cuLaunchKernel)(
                function.0,
                grid_x,
                grid_y,
                grid_z,
                block_x,
                block_y,
                block_z,
                grid.shared_bytes,
                self.0.handle,
                addresses.as_mut_ptr(),
                std::ptr::null_mut(),
            )
        };
        driver.check("cuLaunchKernel", status)
    }

    /// Launches a matrix product.
    ///
    /// # Safety
    ///
    /// As for [`Stream::launch`].
    pub unsafe fn multiply(&self, matmul: &Matmul) -> Result<()> {
        let matmuls = self.0.card.matmuls()?;
        // SAFETY: the caller's.
        unsafe { matmuls.launch(matmul, self) }
    }
}

/// The shared memory that every kernel may have.
const DEFAULT_SHARED_BYTES: u32 = 48 << 10;
/// The attribute of a function that allows more.
const MAX_SHARED_BYTES: i32 = 8;

impl Drop for StreamHandle {
    fn drop(&mut self) {
        let Ok(driver) = self.card.current() else { return };
        let workspace = self.workspace.get_mut().unwrap_or_else(PoisonError::into_inner).take();
        // SAFETY: this was the last handle. The work that uses the workspace is done before it is given back.
        unsafe {
            if let Some(workspace) = workspace {
                let _ = (driver.cuStreamSynchronize)(self.handle);
                self.card.free(workspace);
            }
            let _ = (driver.cuStreamDestroy_v2)(self.handle);
        }
    }
}

impl fmt::Debug for Stream {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Stream({:?})", self.0.card)
    }
}

/// A point in the work of a stream. Clones are the same point.
#[derive(Clone)]
pub struct Event(Arc<EventHandle>);

struct EventHandle {
    card: Card,
    handle: Handle,
}

// SAFETY: an event may be used from any thread that has made its context current.
unsafe impl Send for EventHandle {}
// SAFETY: as for `Send`.
unsafe impl Sync for EventHandle {}

impl Event {
    /// An event with a time, in no stream yet.
    pub fn new(card: &Card) -> Result<Self> {
        let driver = card.current()?;
        let mut handle = std::ptr::null_mut();
        // SAFETY: the address is that of a handle.
        driver.check("cuEventCreate", unsafe { (driver.cuEventCreate)(&mut handle, 0) })?;
        Ok(Self(Arc::new(EventHandle { card: card.clone(), handle })))
    }

    /// Whether all work before it is done.
    pub fn is_done(&self) -> Result<bool> {
        let driver = self.0.card.current()?;
        // SAFETY: the handle is alive.
        match unsafe { (driver.cuEventQuery)(self.0.handle) } {
            NOT_READY => Ok(false),
            status => driver.check("cuEventQuery", status).map(|()| true),
        }
    }

    /// Blocks until all work before it is done.
    pub fn synchronize(&self) -> Result<()> {
        let driver = self.0.card.current()?;
        // SAFETY: the handle is alive.
        driver.check("cuEventSynchronize", unsafe { (driver.cuEventSynchronize)(self.0.handle) })
    }

    /// The time from an earlier event to this one, in nanoseconds, with a resolution of about half a microsecond. Both are
    /// done.
    pub fn ns_since(&self, earlier: &Self) -> Result<u64> {
        let driver = self.0.card.current()?;
        let mut ms = 0.0;
        // SAFETY: both handles are alive, and the address is that of a number.
        let status =
            unsafe { (driver.cuEventElapsedTime)(&mut ms, earlier.0.handle, self.0.handle) };
        driver.check("cuEventElapsedTime", status)?;
        Ok((f64::from(ms) * 1e6).max(0.0) as u64)
    }
}

impl Drop for EventHandle {
    fn drop(&mut self) {
        if let Ok(driver) = self.card.current() {
            // SAFETY: this was the last handle. The driver keeps an event that a stream still needs.
            let _ = unsafe { (driver.cuEventDestroy_v2)(self.handle) };
        }
    }
}

impl fmt::Debug for Event {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Event({:?})", self.0.card)
    }
}
