//! A card: its properties, its memory, and the kernels that it has loaded.

use std::collections::HashMap;
use std::ffi::{CStr, CString, c_char, c_int};
use std::fmt;
use std::sync::{Arc, Mutex};

use paceline_trace::lock;

use crate::compiler::{self, Compiled};
use crate::driver::{Driver, Handle, OUT_OF_MEMORY, count};
use crate::kernel::{ArgumentType, CardKernel, KernelId};
use crate::matmul::Matmuls;
use crate::{CudaError, Result};

const SHARED_BYTES: u32 = 97;
const CAPABILITY_MAJOR: u32 = 75;
const CAPABILITY_MINOR: u32 = 76;

/// A card with its context. Clones are the same card.
#[derive(Clone)]
pub struct Card(Arc<CardContext>);

struct CardContext {
    driver: &'static Driver,
    index: usize,
    name: String,
    capability: (u32, u32),
    shared_bytes: u32,
    context: Handle,
    functions: Mutex<HashMap<KernelId, KernelHandle>>,
    matmuls: Mutex<Option<Arc<Matmuls>>>,
}

// SAFETY: a context, and the functions loaded into it, may be used from any thread that has made the context current.
unsafe impl Send for CardContext {}
// SAFETY: as for `Send`; changes are protected by mutexes.
unsafe impl Sync for CardContext {}

/// A kernel that is loaded. It stays loaded as long as the process runs.
#[derive(Clone, Copy)]
pub(crate) struct KernelHandle(pub(crate) Handle);

// SAFETY: the handle is a number for the driver.
unsafe impl Send for KernelHandle {}

impl Card {
    /// The card of this number. Errors without such a card or without a driver.
    pub fn open(index: usize) -> Result<Self> {
        let driver = Driver::ready()?;
        let count = count()?;
        if index >= count {
            return Err(CudaError::NoCard { index, count });
        }
        let (mut device, mut context) = (0, std::ptr::null_mut());
        let mut name = [0; 256];
        // SAFETY: the addresses are those of variables of the right types, and the name has room for 256 bytes.
        unsafe {
            driver.check("cuDeviceGet", (driver.cuDeviceGet)(&mut device, index as c_int))?;
            let status = (driver.cuDeviceGetName)(name.as_mut_ptr(), 256, device);
            driver.check("cuDeviceGetName", status)?;
            let status = (driver.cuDevicePrimaryCtxRetain)(&mut context, device);
            driver.check("cuDevicePrimaryCtxRetain", status)?;
        }
        let attribute = |which| {
            let mut value = 0;
            // SAFETY: the address is that of a number.
            let status = unsafe { (driver.cuDeviceGetAttribute)(&mut value, which, device) };
            driver.check("cuDeviceGetAttribute", status).map(|()| value.max(0) as u32)
        };
        let inner = CardContext {
            driver,
            index,
            name: text_of(&mut name),
            capability: (attribute(CAPABILITY_MAJOR)?, attribute(CAPABILITY_MINOR)?),
            shared_bytes: attribute(SHARED_BYTES)?,
            context,
            functions: Mutex::default(),
            matmuls: Mutex::default(),
        };
        Ok(Self(Arc::new(inner)))
    }

    /// Its number, as the driver counts.
    pub fn index(&self) -> usize {
        self.0.index
    }

    /// Its name, from the driver.
    pub fn name(&self) -> &str {
        &self.0.name
    }

    /// Its compute capability, such as (9, 0).
    pub fn capability(&self) -> (u32, u32) {
        self.0.capability
    }

    /// The most shared memory of a block, in bytes.
    pub fn shared_bytes(&self) -> u32 {
        self.0.shared_bytes
    }

    /// Where it is on the bus of its host, such as `0000:17:00.0`. With the host it names the card in all processes.
    pub fn place(&self) -> Result<String> {
        let driver = self.current()?;
        let (mut device, mut place) = (0, [0; 32]);
        // SAFETY: the address is that of a number.
        let status = unsafe { (driver.cuDeviceGet)(&mut device, self.0.index as c_int) };
        driver.check("cuDeviceGet", status)?;
        // SAFETY: there is room for 32 bytes.
        let status = unsafe { (driver.cuDeviceGetPCIBusId)(place.as_mut_ptr(), 32, device) };
        driver.check("cuDeviceGetPCIBusId", status)?;
        Ok(text_of(&mut place))
    }

    /// Whether both are the same card.
    pub fn is_same(&self, other: &Self) -> bool {
        Arc::ptr_eq(&self.0, &other.0)
    }

    /// Blocks until all work is done.
    pub fn synchronize(&self) -> Result<()> {
        let driver = self.current()?;
        // SAFETY: the context is current.
        driver.check("cuCtxSynchronize", unsafe { (driver.cuCtxSynchronize)() })
    }

    /// Free and total memory in bytes.
    pub fn memory(&self) -> Result<(usize, usize)> {
        let driver = self.current()?;
        let (mut free, mut total) = (0, 0);
        // SAFETY: the addresses are those of numbers.
        driver.check("cuMemGetInfo", unsafe { (driver.cuMemGetInfo_v2)(&mut free, &mut total) })?;
        Ok((free, total))
    }

    /// The address of new memory of the card, with unspecified contents, until [`Card::free`].
    pub fn allocate(&self, bytes: usize) -> Result<u64> {
        let driver = self.current()?;
        let mut address = 0;
        // SAFETY: the address is that of a number.
        let status = unsafe { (driver.cuMemAlloc_v2)(&mut address, bytes) };
        self.check_memory("cuMemAlloc", status, bytes)?;
        Ok(address)
    }

    /// Gives memory of [`Card::allocate`] back.
    ///
    /// # Safety
    ///
    /// No work uses the memory any longer.
    pub unsafe fn free(&self, address: u64) {
        if let Ok(driver) = self.current() {
            // SAFETY: the caller's. After a fault of the card nothing can be given back, and nothing has to be.
            let _ = unsafe { (driver.cuMemFree_v2)(address) };
        }
    }

    /// The address of new memory of the host that the card can copy by itself, until [`Card::free_pinned`].
    pub fn allocate_pinned(&self, bytes: usize) -> Result<*mut u8> {
        let driver = self.current()?;
        let mut address = std::ptr::null_mut();
        // Not write-combined: the host reads this memory too.
        // SAFETY: the address is that of an address.
        let status = unsafe { (driver.cuMemHostAlloc)(&mut address, bytes, 0) };
        self.check_memory("cuMemHostAlloc", status, bytes)?;
        Ok(address.cast())
    }

    /// Gives memory of [`Card::allocate_pinned`] back.
    ///
    /// # Safety
    ///
    /// Nothing uses the memory any longer.
    pub unsafe fn free_pinned(&self, address: *mut u8) {
        if let Ok(driver) = self.current() {
            // SAFETY: the caller's.
            let _ = unsafe { (driver.cuMemFreeHost)(address.cast()) };
        }
    }

    fn check_memory(&self, function: &'static str, status: u32, bytes: usize) -> Result<()> {
        if status != OUT_OF_MEMORY {
            return self.0.driver.check(function, status);
        }
        let (free, total) = self.memory()?;
        let on = match function {
            "cuMemAlloc" => format!("card {} ({})", self.0.index, self.0.name),
            _ => "the host's pinned memory".to_owned(),
        };
        Err(CudaError::OutOfMemory { on, bytes, free, total })
    }

    /// The driver, with the context of this card current in this thread.
    pub(crate) fn current(&self) -> Result<&'static Driver> {
        let driver = self.0.driver;
        // SAFETY: the context is retained as long as the process runs.
        driver.check("cuCtxSetCurrent", unsafe { (driver.cuCtxSetCurrent)(self.0.context) })?;
        Ok(driver)
    }

    /// A kernel, compiled for this card when it is first asked for. Errors if its source states other arguments.
    pub(crate) fn function(
        &self,
        kernel: &CardKernel,
        arguments: &[ArgumentType],
    ) -> Result<KernelHandle> {
        let mut functions = lock(&self.0.functions);
        let known = functions.get(&kernel.id()).copied();
        // Each place that launches a kernel has the same arguments, which tests make sure of.
        if known.is_none() || cfg!(debug_assertions) {
            kernel.check_arguments(arguments)?;
        }
        if let Some(function) = known {
            return Ok(function);
        }
        let driver = self.current()?;
        let Compiled { symbol, made } = compiler::compile(kernel, self.target())?;
        let symbol = CString::new(symbol).unwrap_or_default();
        let (mut module, mut function) = (std::ptr::null_mut(), std::ptr::null_mut());
        // SAFETY: the image ends with a zero byte, if it is text, and is read during the call only; so does the name.
        unsafe {
            let status = (driver.cuModuleLoadData)(&mut module, made.as_ptr().cast());
            driver.check("cuModuleLoadData", status)?;
            let status = (driver.cuModuleGetFunction)(&mut function, module, symbol.as_ptr());
            driver.check("cuModuleGetFunction", status)?;
        }
        functions.insert(kernel.id(), KernelHandle(function));
        Ok(KernelHandle(function))
    }

    /// The target of its kernels: machine code, or text for an emulated card.
    pub(crate) fn target(&self) -> compiler::CompileTarget {
        let architecture = self.0.capability.0 * 10 + self.0.capability.1;
        if self.0.name == EMULATED {
            compiler::CompileTarget::Text(architecture.min(80))
        } else {
            compiler::CompileTarget::Code(architecture)
        }
    }

    pub(crate) fn matmuls(&self) -> Result<Arc<Matmuls>> {
        let mut matmuls = lock(&self.0.matmuls);
        if let Some(matmuls) = &*matmuls {
            return Ok(matmuls.clone());
        }
        let opened = Arc::new(Matmuls::open(self)?);
        *matmuls = Some(opened.clone());
        Ok(opened)
    }
}

fn text_of<const LEN: usize>(text: &mut [c_char; LEN]) -> String {
    text[LEN - 1] = 0;
    // SAFETY: the last byte is zero.
    unsafe { CStr::from_ptr(text.as_ptr()) }.to_string_lossy().into_owned()
}

/// The name of a card that is emulated for tests.
pub const EMULATED: &str = "emulated card";

impl fmt::Debug for Card {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Card({}, {})", self.0.index, self.0.name)
    }
}
