//! The emulated card's shared library, opened as a program opens CUDA's.

use std::ffi::{CString, c_char, c_void};
use std::path::PathBuf;
use std::sync::{Mutex, MutexGuard, PoisonError};

use super::library::Library;

/// The card is one for the whole process, so tests take turns.
static TURN: Mutex<()> = Mutex::new(());

/// The shared library's path. Cargo builds it beside the test programs.
pub fn path() -> PathBuf {
    let program = std::env::current_exe().expect("the test's own path");
    program.with_file_name("libpaceline_emulated_card.so")
}

/// The library, and the turn of this test.
pub struct Cuda {
    pub library: Library,
    _turn: MutexGuard<'static, ()>,
}

macro_rules! functions {
    ($($name:ident($($argument:ident: $type:ty),*);)*) => {
        #[allow(non_snake_case, clippy::too_many_arguments)]
        impl Cuda {
            $(pub fn $name(&self, $($argument: $type),*) -> u32 {
                type Function = unsafe extern "C" fn($($type),*) -> u32;
                // SAFETY: the signature is that of the exported function, and the tests pass pointers that are valid
                // for as long as the interface asks.
                unsafe { self.library.function::<Function>(stringify!($name))($($argument),*) }
            })*
        }
    };
}

functions! {
    cuInit(flags: u32);
    cuDriverGetVersion(version: *mut i32);
    cuDeviceGetCount(count: *mut i32);
    cuDeviceGet(device: *mut i32, ordinal: i32);
    cuDeviceGetName(name: *mut u8, len: i32, device: i32);
    cuDeviceGetAttribute(value: *mut i32, attribute: u32, device: i32);
    cuDevicePrimaryCtxRetain(context: *mut usize, device: i32);
    cuDevicePrimaryCtxRelease_v2(device: i32);
    cuCtxSetCurrent(context: usize);
    cuCtxSynchronize();
    cuMemGetInfo_v2(free: *mut usize, total: *mut usize);
    cuGetErrorName(code: u32, name: *mut *const c_char);
    cuMemAlloc_v2(at: *mut u64, bytes: usize);
    cuMemFree_v2(at: u64);
    cuMemHostAlloc(at: *mut usize, bytes: usize, flags: u32);
    cuMemFreeHost(at: usize);
    cuMemHostRegister_v2(at: usize, bytes: usize, flags: u32);
    cuMemHostUnregister(at: usize);
    cuMemcpyHtoDAsync_v2(to: u64, from: *const u8, len: usize, stream: usize);
    cuMemcpyDtoHAsync_v2(to: *mut u8, from: u64, len: usize, stream: usize);
    cuMemcpyDtoDAsync_v2(to: u64, from: u64, len: usize, stream: usize);
    cuMemcpyHtoD_v2(to: u64, from: *const u8, len: usize);
    cuMemcpyDtoH_v2(to: *mut u8, from: u64, len: usize);
    cuMemsetD8Async(at: u64, value: u8, count: usize, stream: usize);
    cuMemsetD32Async(at: u64, value: u32, count: usize, stream: usize);
    cuStreamCreate(stream: *mut usize, flags: u32);
    cuStreamDestroy_v2(stream: usize);
    cuStreamSynchronize(stream: usize);
    cuStreamQuery(stream: usize);
    cuStreamWaitEvent(stream: usize, event: usize, flags: u32);
    cuEventCreate(event: *mut usize, flags: u32);
    cuEventDestroy_v2(event: usize);
    cuEventRecord(event: usize, stream: usize);
    cuEventQuery(event: usize);
    cuEventSynchronize(event: usize);
    cuEventElapsedTime(milliseconds: *mut f32, start: usize, end: usize);
    cuModuleLoadData(module: *mut usize, image: *const c_char);
    cuModuleUnload(module: usize);
    cuModuleGetFunction(function: *mut usize, module: usize, name: *const c_char);
    cuFuncSetAttribute(function: usize, attribute: u32, value: i32);
    cuLaunchKernel(f: usize, gx: u32, gy: u32, gz: u32, bx: u32, by: u32, bz: u32, shared: u32, stream: usize,
        arguments: *const *const u64, extra: usize);
    cuStreamBeginCapture_v2(stream: usize, mode: u32);
    cuStreamEndCapture(stream: usize, graph: *mut usize);
    cuStreamIsCapturing(stream: usize, status: *mut u32);
    cuGraphInstantiateWithFlags(executable: *mut usize, graph: usize, flags: u64);
    cuGraphLaunch(executable: usize, stream: usize);
    cuGraphDestroy(graph: usize);
    cuGraphExecDestroy(executable: usize);
    cublasLtCreate(library: *mut usize);
    cublasLtDestroy(library: usize);
    cublasLtMatmulDescCreate(description: *mut usize, compute: u32, scale: u32);
    cublasLtMatmulDescDestroy(description: usize);
    cublasLtMatmulDescSetAttribute(description: usize, which: u32, value: *const c_void, len: usize);
    cublasLtMatrixLayoutCreate(layout: *mut usize, element: u32, rows: u64, cols: u64, ld: i64);
    cublasLtMatrixLayoutDestroy(layout: usize);
    cublasLtMatrixLayoutSetAttribute(layout: usize, which: u32, value: *const c_void, len: usize);
    cublasLtMatmulPreferenceCreate(preference: *mut usize);
    cublasLtMatmulPreferenceDestroy(preference: usize);
    cublasLtMatmulPreferenceSetAttribute(preference: usize, which: u32, value: *const c_void, len: usize);
    cublasLtMatmulAlgoGetHeuristic(library: usize, description: usize, a: usize, b: usize, c: usize, d: usize,
        preference: usize, requested: i32, results: *mut [u64; 12], found: *mut i32);
    cublasLtMatmul(library: usize, description: usize, alpha: *const f32, a: u64, a_layout: usize, b: u64,
        b_layout: usize, beta: *const f32, c: u64, c_layout: usize, d: u64, d_layout: usize,
        algorithm: *const u64, workspace: u64, workspace_bytes: usize, stream: usize);
    ncclGetVersion(version: *mut i32);
    ncclGetUniqueId(id: *mut UniqueId);
    ncclCommInitRank(communicator: *mut usize, size: i32, id: UniqueId, rank: i32);
    ncclCommDestroy(communicator: usize);
    ncclCommAbort(communicator: usize);
    ncclCommGetAsyncError(communicator: usize, result: *mut u32);
    ncclGroupStart();
    ncclGroupEnd();
    ncclAllReduce(send: u64, receive: u64, count: usize, element: u32, op: u32, communicator: usize, stream: usize);
    ncclAllGather(send: u64, receive: u64, count: usize, element: u32, communicator: usize, stream: usize);
    ncclReduceScatter(send: u64, receive: u64, count: usize, element: u32, op: u32, communicator: usize,
        stream: usize);
    ncclBroadcast(send: u64, receive: u64, count: usize, element: u32, root: i32, communicator: usize, stream: usize);
    ncclReduce(send: u64, receive: u64, count: usize, element: u32, op: u32, root: i32, communicator: usize,
        stream: usize);
    ncclSend(send: u64, count: usize, element: u32, to: i32, communicator: usize, stream: usize);
    ncclRecv(receive: u64, count: usize, element: u32, from: i32, communicator: usize, stream: usize);
    paceline_emulated_fault(text: *mut u8, len: usize);
    paceline_emulated_counts(numbers: *mut u64, len: usize);
    paceline_emulated_forget(at: u64, len: usize);
    paceline_emulated_reset();
}

/// `ncclUniqueId`
#[repr(C)]
#[derive(Clone, Copy)]
pub struct UniqueId(pub [u8; 128]);

/// Stream flag: not ordered with stream 0.
pub const NON_BLOCKING: u32 = 1;

impl Cuda {
    /// A fresh card with this seed, as if the process had just begun, and its context.
    pub fn start(seed: u64) -> Self {
        Self::start_with(&[("PACELINE_EMULATED_SEED", &seed.to_string())])
    }

    /// As [`start`](Self::start), with other variables of the environment.
    pub fn start_with(environment: &[(&str, &str)]) -> Self {
        let turn = TURN.lock().unwrap_or_else(PoisonError::into_inner);
        let library = Library::open(&path()).expect("the emulated card's shared library");
        let cuda = Self { library, _turn: turn };
        for (name, value) in environment {
            // SAFETY: tests of this program take turns, and only the emulated card reads the environment.
            unsafe { std::env::set_var(name, value) };
        }
        assert_eq!(cuda.paceline_emulated_reset(), 0);
        for (name, _) in environment {
            // SAFETY: as above.
            unsafe { std::env::remove_var(name) };
        }
        assert_eq!(cuda.cuInit(0), 0);
        let mut context = 0;
        assert_eq!(cuda.cuDevicePrimaryCtxRetain(&mut context, 0), 0);
        assert_eq!(cuda.cuCtxSetCurrent(context), 0);
        cuda
    }

    /// The fault.
    pub fn fault(&self) -> String {
        let mut text = [0u8; 600];
        self.paceline_emulated_fault(text.as_mut_ptr(), text.len());
        let len = text.iter().position(|b| *b == 0).expect("an end");
        String::from_utf8_lossy(&text[..len]).into_owned()
    }

    pub fn counts(&self) -> [u64; 12] {
        let mut numbers = [0; 12];
        self.paceline_emulated_counts(numbers.as_mut_ptr(), 12);
        numbers
    }

    /// A new stream that is not ordered with stream 0.
    pub fn stream(&self) -> usize {
        let mut stream = 0;
        assert_eq!(self.cuStreamCreate(&mut stream, NON_BLOCKING), 0);
        stream
    }

    pub fn event(&self) -> usize {
        let mut event = 0;
        assert_eq!(self.cuEventCreate(&mut event, 0), 0);
        event
    }

    pub fn allocate(&self, bytes: usize) -> u64 {
        let mut at = 0;
        assert_eq!(self.cuMemAlloc_v2(&mut at, bytes), 0, "{}", self.fault());
        at
    }

    /// Pinned memory with these values. It lives until it is freed or the process ends.
    pub fn pinned(&self, values: &[f32]) -> &'static mut [f32] {
        let mut at = 0;
        assert_eq!(self.cuMemHostAlloc(&mut at, size_of_val(values), 0), 0);
        // SAFETY: the card gave this much memory, which starts at a page and is zero.
        let memory = unsafe { std::slice::from_raw_parts_mut(at as *mut f32, values.len()) };
        memory.copy_from_slice(values);
        memory
    }

    pub fn module(&self, ptx: &str) -> usize {
        let (mut module, text) = (0, CString::new(ptx).expect("PTX"));
        assert_eq!(self.cuModuleLoadData(&mut module, text.as_ptr()), 0, "{}", self.fault());
        module
    }

    pub fn function(&self, module: usize, name: &str) -> usize {
        let (mut function, name) = (0, CString::new(name).expect("a name"));
        assert_eq!(self.cuModuleGetFunction(&mut function, module, name.as_ptr()), 0);
        function
    }

    /// Launches blocks of threads with arguments of up to 8 bytes.
    pub fn launch(
        &self,
        f: usize,
        blocks: u32,
        threads: u32,
        stream: usize,
        arguments: &[u64],
    ) -> u32 {
        let pointers: Vec<*const u64> = arguments.iter().map(|a| &raw const *a).collect();
        self.cuLaunchKernel(f, blocks, 1, 1, threads, 1, 1, 0, stream, pointers.as_ptr(), 0)
    }

    /// New memory with these values, on a stream that is waited for.
    pub fn upload(&self, values: &[f32]) -> u64 {
        let at = self.allocate(size_of_val(values));
        assert_eq!(self.cuMemcpyHtoD_v2(at, values.as_ptr().cast(), size_of_val(values)), 0);
        at
    }

    /// Copies to the host after everything in a stream.
    pub fn download(&self, at: u64, count: usize, stream: usize) -> Vec<f32> {
        let mut values = vec![0f32; count];
        let status = self.cuMemcpyDtoHAsync_v2(values.as_mut_ptr().cast(), at, 4 * count, stream);
        assert_eq!(status, 0, "{}", self.fault());
        values
    }
}
