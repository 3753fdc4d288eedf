//! Graphs: the work of a stream, captured once and replayed many times.
//!
//! While a stream is captured, its work does not run: the driver keeps it with its arguments in a graph, whose launch is one
//! piece of work. The driver refuses requests for memory, waits of the host, and events from outside. Addresses are kept as they
//! are, so the caller that launches a graph guarantees that its memory is still there.

use std::fmt;

use crate::driver::Handle;
use crate::{Card, Result, Stream};

/// Other threads may ask the driver for memory and events while this one captures.
const THREAD_LOCAL: u32 = 1;

/// Captured work that can be launched.
pub struct Graph {
    card: Card,
    executable: Handle,
}

// SAFETY: a graph may be used from any thread that has made its context current.
unsafe impl Send for Graph {}
// SAFETY: as for `Send`. The driver wants calls with one graph to come one after the other, which `Stream::replay` demands.
unsafe impl Sync for Graph {}

impl Stream {
    /// Begins a capture: from now on, the work of this stream is kept and does not run. The same thread ends the capture.
    pub fn begin_capture(&self) -> Result<()> {
        let driver = self.card().current()?;
        // SAFETY: the handle is alive.
        let status = unsafe { (driver.cuStreamBeginCapture_v2)(self.handle(), THREAD_LOCAL) };
        driver.check("cuStreamBeginCapture", status)?;
        self.set_capturing(true);
        Ok(())
    }

    /// Ends the capture. Errors if the driver refused something meanwhile; then the captured work is dropped.
    pub fn end_capture(&self) -> Result<Graph> {
        self.set_capturing(false);
        let driver = self.card().current()?;
        let (mut graph, mut executable) = (std::ptr::null_mut(), std::ptr::null_mut());
        // SAFETY: the handle is alive, and the address is that of a handle.
        let status = unsafe { (driver.cuStreamEndCapture)(self.handle(), &mut graph) };
        driver.check("cuStreamEndCapture", status)?;
        // SAFETY: the graph has just been made, and only its executable form is used afterwards.
        let status = unsafe {
            let status = (driver.cuGraphInstantiateWithFlags)(&mut executable, graph, 0);
            let _ = (driver.cuGraphDestroy)(graph);
            status
        };
        driver.check("cuGraphInstantiate", status)?;
        Ok(Graph { card: self.card().clone(), executable })
    }

    /// Launches all work of a graph.
    ///
    /// # Safety
    ///
    /// As for [`Stream::launch`], for each kernel, product, copy and fill that was captured. No other thread uses the graph meanwhile.
    pub unsafe fn replay(&self, graph: &Graph) -> Result<()> {
        let driver = self.card().current()?;
        // SAFETY: both handles are alive; the caller's for the memory.
        let status = unsafe { (driver.cuGraphLaunch)(graph.executable, self.handle()) };
        driver.check("cuGraphLaunch", status)
    }
}

impl Drop for Graph {
    fn drop(&mut self) {
        if let Ok(driver) = self.card.current() {
            // SAFETY: this was the last handle. The driver keeps a graph until its launches are done.
            let _ = unsafe { (driver.cuGraphExecDestroy)(self.executable) };
        }
    }
}

impl fmt::Debug for Graph {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Graph({:?})", self.card)
    }
}
