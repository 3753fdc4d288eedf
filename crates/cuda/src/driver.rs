//! The driver: its functions, and whether it is there.
//!
//! All handles are opaque addresses. A status is a plain number, because a newer driver may return one that no list has.

use std::ffi::{CStr, c_char, c_int, c_uint, c_void};

use crate::library::{LibraryNames, functions};
use crate::{CudaError, Result};

/// An opaque handle of the driver.
pub(crate) type Handle = *mut c_void;

const NAMES: LibraryNames = LibraryNames {
    files: &["libcuda.so.1", "libcuda.so"],
    companion: None,
    hint: "install the NVIDIA driver, or pass --device cpu",
};

/// The least version of CUDA that a driver has to support.
const LEAST_VERSION: c_int = 12_000;

pub(crate) const OUT_OF_MEMORY: u32 = 2;
const NO_CARD: u32 = 100;
pub(crate) const NOT_READY: u32 = 600;

functions! {
    Driver in NAMES;
    fn cuInit(flags: c_uint);
    fn cuDriverGetVersion(version: *mut c_int);
    fn cuDeviceGetCount(count: *mut c_int);
    fn cuDeviceGet(device: *mut c_int, ordinal: c_int);
    fn cuDeviceGetName(name: *mut c_char, len: c_int, device: c_int);
    fn cuDeviceGetPCIBusId(place: *mut c_char, len: c_int, device: c_int);
    fn cuDeviceGetAttribute(value: *mut c_int, attribute: c_uint, device: c_int);
    fn cuDevicePrimaryCtxRetain(context: *mut Handle, device: c_int);
    fn cuCtxSetCurrent(context: Handle);
    fn cuCtxSynchronize();
    fn cuMemGetInfo_v2(free: *mut usize, total: *mut usize);
    fn cuGetErrorName(status: u32, name: *mut *const c_char);
    fn cuGetErrorString(status: u32, text: *mut *const c_char);
    fn cuMemAlloc_v2(address: *mut u64, bytes: usize);
    fn cuMemFree_v2(address: u64);
    fn cuMemHostAlloc(address: *mut Handle, bytes: usize, flags: c_uint);
    fn cuMemFreeHost(address: Handle);
    fn cuMemcpyHtoDAsync_v2(to: u64, from: *const c_void, bytes: usize, stream: Handle);
    fn cuMemcpyDtoHAsync_v2(to: *mut c_void, from: u64, bytes: usize, stream: Handle);
    fn cuMemcpyDtoDAsync_v2(to: u64, from: u64, bytes: usize, stream: Handle);
    fn cuMemsetD8Async(at: u64, value: u8, bytes: usize, stream: Handle);
    fn cuStreamCreate(stream: *mut Handle, flags: c_uint);
    fn cuStreamDestroy_v2(stream: Handle);
    fn cuStreamSynchronize(stream: Handle);
    fn cuStreamWaitEvent(stream: Handle, event: Handle, flags: c_uint);
    fn cuEventCreate(event: *mut Handle, flags: c_uint);
    fn cuEventDestroy_v2(event: Handle);
    fn cuEventRecord(event: Handle, stream: Handle);
    fn cuEventQuery(event: Handle);
    fn cuEventSynchronize(event: Handle);
    fn cuEventElapsedTime(ms: *mut f32, from: Handle, to: Handle);
    fn cuStreamBeginCapture_v2(stream: Handle, mode: c_uint);
    fn cuStreamEndCapture(stream: Handle, graph: *mut Handle);
    fn cuGraphInstantiateWithFlags(executable: *mut Handle, graph: Handle, flags: u64);
    fn cuGraphLaunch(executable: Handle, stream: Handle);
    fn cuGraphDestroy(graph: Handle);
    fn cuGraphExecDestroy(executable: Handle);
    fn cuModuleLoadData(module: *mut Handle, image: *const c_void);
    fn cuModuleGetFunction(function: *mut Handle, module: Handle, name: *const c_char);
    fn cuFuncSetAttribute(function: Handle, attribute: c_int, value: c_int);
    fn cuLaunchKernel(
        function: Handle,
        grid_x: c_uint, grid_y: c_uint, grid_z: c_uint,
        block_x: c_uint, block_y: c_uint, block_z: c_uint,
        shared_bytes: c_uint, stream: Handle, arguments: *mut *mut c_void, extra: *mut *mut c_void,
    );
}

impl Driver {
    /// The driver, ready for use. Errors if it is missing, too old or refuses to start.
    pub(crate) fn ready() -> Result<&'static Self> {
        static STARTED: std::sync::OnceLock<Result<()>> = std::sync::OnceLock::new();
        let driver = Self::get()?;
        STARTED.get_or_init(|| driver.start()).clone()?;
        Ok(driver)
    }

    fn start(&self) -> Result<()> {
        // SAFETY: starting the driver has no condition.
        match unsafe { (self.cuInit)(0) } {
            NO_CARD => return Err(CudaError::NoCard { index: 0, count: 0 }),
            status => self.check("cuInit", status)?,
        }
        let mut version = 0;
        // SAFETY: the address is that of a number.
        self.check("cuDriverGetVersion", unsafe { (self.cuDriverGetVersion)(&mut version) })?;
        if version < LEAST_VERSION {
            let (major, minor) = (version / 1000, version % 1000 / 10);
            return Err(CudaError::OldDriver { major, minor });
        }
        Ok(())
    }

    /// An error unless the status is success.
    pub(crate) fn check(&self, function: &'static str, status: u32) -> Result<()> {
        if status == 0 {
            return Ok(());
        }
        let words = |of: unsafe extern "C" fn(u32, *mut *const c_char) -> u32| {
            let mut text = std::ptr::null();
            // SAFETY: the function writes the address of a constant text, or null for a status that it does not know.
            unsafe {
                let found = of(status, &mut text) == 0 && !text.is_null();
                found.then(|| CStr::from_ptr(text).to_string_lossy().into_owned())
            }
        };
        let name = words(self.cuGetErrorName).unwrap_or_else(|| "unknown".to_owned());
        let text = words(self.cuGetErrorString).unwrap_or_else(|| "unknown".to_owned());
        Err(CudaError::Failed { function, status, name, text })
    }
}

/// The number of cards. Errors if there is no driver, with where it was sought.
pub fn count() -> Result<usize> {
    let driver = Driver::ready()?;
    let mut count = 0;
    // SAFETY: the address is that of a number.
    driver.check("cuDeviceGetCount", unsafe { (driver.cuDeviceGetCount)(&mut count) })?;
    Ok(count.max(0) as usize)
}
