//! Ranges that profilers such as Nsight Systems show, by the protocol of NVTX 3.
//!
//! Nothing of the vendor is linked. A profiler names its library in a variable; that library is opened, asks for tables of
//! functions, and puts its own ones there. Without the variable there is nothing to call.
//!
//! Input: names of ranges as they begin. Output: calls of the profiler. This module does not know the subject of a range.
//! Source: `nvtxDetail/nvtxTypes.h` and `nvtxInit.h` of NVTX 3.

use std::ffi::{c_char, c_int, c_uint, c_void};
use std::fmt::{self, Write};
use std::path::Path;
use std::ptr::null_mut;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicPtr, Ordering};

use paceline_trace::Markers;

use crate::opened::{Library, RTLD_LAZY, RTLD_LOCAL};

/// The variable in which a profiler names its library.
pub const INJECTION: &str = "NVTX_INJECTION64_PATH";

/// The most bytes of a name. A longer one is cut.
const MOST_BYTES: usize = 128;

/// How many functions each module has, and a first place without one. Module 0 does not exist.
const FUNCTIONS: [usize; 7] = [0, 16, 9, 15, 7, 16, 7];
const MOST_FUNCTIONS: usize = 16;
/// The module of ranges, and the places of their functions.
const CORE: usize = 1;
const PUSH: usize = 9;
const POP: usize = 11;

/// Where a profiler puts its functions.
static PLACES: [[AtomicPtr<c_void>; MOST_FUNCTIONS]; FUNCTIONS.len()] =
    [const { [const { AtomicPtr::new(null_mut()) }; MOST_FUNCTIONS] }; FUNCTIONS.len()];

/// The addresses of the places of a module, as the profiler gets them; one more, without an address, ends them.
#[repr(transparent)]
struct FunctionTable([*mut *mut c_void; MOST_FUNCTIONS + 1]);

// SAFETY: the addresses are those of statics, which are atomics and live as long as the process.
unsafe impl Send for FunctionTable {}
// SAFETY: as for `Send`; the tables themselves do not change.
unsafe impl Sync for FunctionTable {}

fn tables() -> &'static [FunctionTable; FUNCTIONS.len()] {
    static TABLES: OnceLock<[FunctionTable; FUNCTIONS.len()]> = OnceLock::new();
    TABLES.get_or_init(|| {
        std::array::from_fn(|module| {
            let is_there = |at: usize| at > 0 && at < FUNCTIONS[module];
            FunctionTable(std::array::from_fn(|at| {
                if is_there(at) { PLACES[module][at].as_ptr() } else { null_mut() }
            }))
        })
    })
}

/// `NvtxExportTableCallbacks`
#[repr(C)]
struct ExportCallbacks {
    size: usize,
    functions: unsafe extern "C" fn(c_int, *mut *const FunctionTable, *mut c_uint) -> c_int,
}

/// `NvtxExportTableVersionInfo`
#[repr(C)]
struct Version {
    size: usize,
    version: u32,
    reserved: u32,
    set: extern "C" fn(u32),
}

/// `GetModuleFunctionTable`: 1 if there is such a module.
unsafe extern "C" fn functions_of(
    module: c_int,
    table: *mut *const FunctionTable,
    size: *mut c_uint,
) -> c_int {
    let module = usize::try_from(module).unwrap_or_default();
    let Some(count) = FUNCTIONS.get(module).copied().filter(|count| *count > 0) else { return 0 };
    // SAFETY: the profiler gives each address, or null.
    unsafe {
        if !table.is_null() {
            *table = &tables()[module];
        }
        if !size.is_null() {
            *size = count as c_uint;
        }
    }
    1
}

/// Gets the profiler's version, which changes nothing.
extern "C" fn set_version(_: u32) {}

/// The tables of functions that a profiler may ask for, by number.
extern "C" fn export_table(id: u32) -> *const c_void {
    static CALLBACKS: ExportCallbacks =
        ExportCallbacks { size: size_of::<ExportCallbacks>(), functions: functions_of };
    static VERSION: Version =
        Version { size: size_of::<Version>(), version: 3, reserved: 0, set: set_version };
    match id {
        1 => (&raw const CALLBACKS).cast(),
        3 => (&raw const VERSION).cast(),
        _ => std::ptr::null(),
    }
}

/// Marks ranges for the profiler of this process.
#[derive(Clone, Copy, Debug)]
pub struct Nvtx(());

impl Nvtx {
    /// The profiler, which is asked once in a process; `None` if there is none. Errors if the library that the variable names
    /// cannot be opened or does not start.
    pub fn injected() -> Result<Option<Self>, String> {
        static ASKED: OnceLock<Result<Option<Nvtx>, String>> = OnceLock::new();
        ASKED.get_or_init(Self::start).clone()
    }

    fn start() -> Result<Option<Self>, String> {
        let Some(path) = std::env::var_os(INJECTION).filter(|path| !path.is_empty()) else {
            return Ok(None);
        };
        let refused = |why: &str| format!("{INJECTION}={}: {why}", path.to_string_lossy());
        if is_special(Path::new(&path)) {
            return Err(refused("it is no regular file"));
        }
        // SAFETY: opening the profiler's library runs its initializers, as the user of the variable intends.
        let library = unsafe { Library::open(Some(&path), RTLD_LAZY | RTLD_LOCAL) }
            .map_err(|error| refused(&error.to_string()))?;
        // Its functions are called until the process ends.
        let library = Box::leak(Box::new(library));
        type GetTable = extern "C" fn(u32) -> *const c_void;
        type Start = unsafe extern "C" fn(GetTable) -> c_int;
        // SAFETY: this is the type of the function of this name.
        let start = unsafe { library.get::<Start>(b"InitializeInjectionNvtx2\0") }
            .map_err(|error| refused(&error.to_string()))?;
        // SAFETY: the tables have the form that the protocol states, and live as long as the process.
        if unsafe { start(export_table) } == 0 {
            return Err(refused("the library did not start"));
        }
        Ok(Some(Self(())))
    }
}

/// Whether this is a pipe, a device or a folder: opening a pipe would wait for a writer. A name without a folder is sought
/// elsewhere.
fn is_special(path: &Path) -> bool {
    path.components().count() > 1 && path.metadata().is_ok_and(|found| !found.is_file())
}

impl Markers for Nvtx {
    fn begin(&self, name: fmt::Arguments) {
        let push = PLACES[CORE][PUSH].load(Ordering::Acquire);
        if push.is_null() {
            return;
        }
        let mut text = CutName { bytes: [0; MOST_BYTES], len: 0 };
        // It cannot fail.
        let _ = text.write_fmt(name);
        // SAFETY: the profiler has put a function of this type there, `nvtxRangePushA`.
        let push: unsafe extern "C" fn(*const c_char) -> c_int =
            unsafe { std::mem::transmute(push) };
        // SAFETY: the text ends with a zero byte.
        unsafe { push(text.bytes.as_ptr().cast()) };
    }

    fn end(&self) {
        let pop = PLACES[CORE][POP].load(Ordering::Acquire);
        if !pop.is_null() {
            // SAFETY: the profiler has put a function of this type there, `nvtxRangePop`.
            let pop: unsafe extern "C" fn() -> c_int = unsafe { std::mem::transmute(pop) };
            // SAFETY: it has no condition.
            unsafe { pop() };
        }
    }
}

/// A name that ends with a zero byte.
struct CutName {
    bytes: [u8; MOST_BYTES],
    len: usize,
}

impl Write for CutName {
    fn write_str(&mut self, text: &str) -> fmt::Result {
        let end = (self.len + text.len()).min(MOST_BYTES - 1);
        self.bytes[self.len..end].copy_from_slice(&text.as_bytes()[..end - self.len]);
        self.len = end;
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_files_are_opened_as_libraries() {
        for special in ["/dev/zero", "/tmp", "./src"] {
            assert!(is_special(Path::new(special)), "{special}");
        }
        for other in ["Cargo.toml", "./Cargo.toml", "src", "/no/such.so", "libm.so.6"] {
            assert!(!is_special(Path::new(other)), "{other}");
        }
    }
}
