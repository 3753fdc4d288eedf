//! How busy a card is and how much of its memory is used, by NVML, the driver's library for monitoring.
//!
//! Input: a card. Output: the driver's figures for it, all processes together. Nothing else needs this library, so callers do
//! without an answer if it is missing.

use std::ffi::{CString, c_char, c_uint};
use std::fmt;

use crate::driver::Handle;
use crate::library::{LibraryNames, functions};
use crate::{Card, CudaError, Result};

const NAMES: LibraryNames = LibraryNames {
    files: &["libnvidia-ml.so.1", "libnvidia-ml.so"],
    companion: None,
    hint: "it comes with the NVIDIA driver",
};

functions! {
    Functions in NAMES;
    fn nvmlInit_v2();
    fn nvmlShutdown();
    fn nvmlDeviceGetHandleByPciBusId_v2(place: *const c_char, device: *mut Handle);
    fn nvmlDeviceGetUtilizationRates(device: Handle, utilization: *mut Utilization);
    fn nvmlDeviceGetMemoryInfo(device: Handle, memory: *mut MemoryInfo);
}

/// `nvmlUtilization_t`: percent of the library's last period, which is between a sixth of a second and a second.
#[repr(C)]
#[derive(Default)]
pub(crate) struct Utilization {
    /// For how much of it a kernel ran.
    card: c_uint,
    /// For how much of it memory was read or written.
    memory: c_uint,
}

/// `nvmlMemory_t`, in bytes.
#[repr(C)]
#[derive(Default)]
pub(crate) struct MemoryInfo {
    total: u64,
    free: u64,
    used: u64,
}

impl Functions {
    fn check(&self, function: &'static str, status: u32) -> Result<()> {
        if status == 0 {
            return Ok(());
        }
        // SAFETY: the function is of this kind.
        let text = unsafe { self.library.status_text("nvmlErrorString", status) }?;
        Err(CudaError::Failed { function, status, name: "NVML".to_owned(), text })
    }
}

/// A card as the library sees it.
pub struct CardMonitor {
    functions: &'static Functions,
    device: Handle,
}

// SAFETY: the library's functions may be called from any thread, and the handle is a number for it.
unsafe impl Send for CardMonitor {}

impl CardMonitor {
    /// The library's view of a card. Errors if the library is missing, does not start or does not know the card.
    pub fn open(card: &Card) -> Result<Self> {
        let place = CString::new(card.place()?).unwrap_or_default();
        let functions = Functions::get()?;
        // SAFETY: starting has no condition. The library counts how often it was started.
        functions.check("nvmlInit", unsafe { (functions.nvmlInit_v2)() })?;
        // From here on it is shut down again by `drop`.
        let mut monitor = Self { functions, device: std::ptr::null_mut() };
        // SAFETY: the place ends with a zero byte, and the address is that of a handle.
        let status = unsafe {
            (functions.nvmlDeviceGetHandleByPciBusId_v2)(place.as_ptr(), &mut monitor.device)
        };
        functions.check("nvmlDeviceGetHandleByPciBusId", status)?;
        Ok(monitor)
    }

    /// For how much of the last period, in percent, the card has run a kernel of any process. Errors if the card does not count
    /// it, as a part of a divided card.
    pub fn busy_pct(&self) -> Result<u32> {
        let mut utilization = Utilization::default();
        // SAFETY: the handle is the library's, and the address is that of a variable of the right type.
        let status = unsafe {
            (self.functions.nvmlDeviceGetUtilizationRates)(self.device, &mut utilization)
        };
        self.functions.check("nvmlDeviceGetUtilizationRates", status)?;
        Ok(utilization.card)
    }

    /// Bytes of the card's memory that all processes and the driver use.
    pub fn used_bytes(&self) -> Result<u64> {
        let mut memory = MemoryInfo::default();
        // SAFETY: as for the utilization.
        let status = unsafe { (self.functions.nvmlDeviceGetMemoryInfo)(self.device, &mut memory) };
        self.functions.check("nvmlDeviceGetMemoryInfo", status)?;
        Ok(memory.used)
    }
}

impl Drop for CardMonitor {
    fn drop(&mut self) {
        // SAFETY: it was started once for this monitor, which nobody has any longer.
        let _ = unsafe { (self.functions.nvmlShutdown)() };
    }
}

impl fmt::Debug for CardMonitor {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("CardMonitor")
    }
}
