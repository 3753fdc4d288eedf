//! The MPI library of this process: who starts it, from which threads it may be called, and who ends it.
//!
//! MPI can be started once in the life of a process. The first group starts it, and dropping the last group
//! ends it; after that, asking for another group is an error. A program that has started MPI itself also
//! ends it itself.
//!
//! Ending MPI waits for all ranks. So this module does not end MPI after a failure that left a
//! transfer in flight, nor while the thread panics. `mpirun` treats a process that exits without ending MPI
//! as a failure and ends the other ranks.

use std::ffi::{c_char, c_int, c_void};
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, Ordering};

use mpi_sys as ffi;
use paceline_memory::DType;
use paceline_trace::lock;

use crate::ReduceOp;
use crate::reduce::Reduction;

/// Whether MPI has not been started, runs, or has ended in this process.
#[derive(Debug)]
enum Stage {
    Before,
    Running { users: usize, started_by_us: bool, facts: LibraryFeatures },
    After,
}

static STAGE: Mutex<Stage> = Mutex::new(Stage::Before);

/// Whether a transfer was left in flight for good.
static IS_ABANDONED: AtomicBool = AtomicBool::new(false);

/// Locked for each call if the library does not allow two threads at a time. No call under this lock waits
/// for other ranks, except those that form and divide groups.
static TURN: Mutex<()> = Mutex::new(());

#[derive(Clone, Copy, Debug)]
struct LibraryFeatures {
    /// Whether several threads may call the library at the same time.
    is_concurrent: bool,
    /// The value of `MPI_IN_PLACE`, if it is known for this library.
    in_place: Option<usize>,
    /// Our own operations: minimum and maximum of f32, then of f64.
    extremes: [ffi::MPI_Op; 4],
}

// SAFETY: handles of operations belong to the process, not to a thread.
unsafe impl Send for LibraryFeatures {}
// SAFETY: as for `Send`.
unsafe impl Sync for LibraryFeatures {}

/// A right to use the library. The library runs as long as one of these exists.
#[derive(Debug)]
pub(super) struct Runtime {
    facts: LibraryFeatures,
}

impl Runtime {
    pub(super) fn open() -> Result<Self, String> {
        let mut stage = lock(&STAGE);
        match &mut *stage {
            Stage::Running { users, facts, .. } => {
                *users += 1;
                return Ok(Self { facts: *facts });
            }
            Stage::After => return Err("MPI has ended, and cannot be started twice".into()),
            Stage::Before => {}
        }
        let (mut was_started, mut level) = (0, 0);
        // SAFETY: `MPI_Initialized` may be called at any time; the results outlive the calls. Other code
        // could start MPI meanwhile only by a mistake of the program, which the library reports.
        unsafe {
            check(ffi::MPI_Initialized(&mut was_started))?;
            if was_started == 0 {
                let wanted = ffi::RSMPI_THREAD_MULTIPLE;
                let (argc, argv) = (std::ptr::null_mut(), std::ptr::null_mut());
                check(ffi::MPI_Init_thread(argc, argv, wanted, &mut level))?;
            } else {
                check(ffi::MPI_Query_thread(&mut level))?;
            }
        }
        // SAFETY: these are constants of the library.
        let (serialized, multiple) =
            unsafe { (ffi::RSMPI_THREAD_SERIALIZED, ffi::RSMPI_THREAD_MULTIPLE) };
        if level < serialized {
            return Err(
                "this MPI library cannot be called from more than one thread, which needs \
                 MPI_THREAD_SERIALIZED"
                    .into(),
            );
        }
        let extremes = [
            user_operation(combine::<false, false>)?,
            user_operation(combine::<false, true>)?,
            user_operation(combine::<true, false>)?,
            user_operation(combine::<true, true>)?,
        ];
        let facts =
            LibraryFeatures { is_concurrent: level >= multiple, in_place: in_place()?, extremes };
        *stage = Stage::Running { users: 1, started_by_us: was_started == 0, facts };
        Ok(Self { facts })
    }

    /// One more right to use the library.
    pub(super) fn share(&self) -> Self {
        if let Stage::Running { users, .. } = &mut *lock(&STAGE) {
            *users += 1;
        }
        Self { facts: self.facts }
    }

    pub(super) fn is_concurrent(&self) -> bool {
        self.facts.is_concurrent
    }

    /// Makes one call, with the library's own message as its error.
    pub(super) fn call(&self, function: impl FnOnce() -> c_int) -> Result<(), String> {
        let _turn = (!self.facts.is_concurrent).then(|| lock(&TURN));
        check(function())
    }

    /// `MPI_IN_PLACE`, which replaces the send buffer for operations in place. It is a macro with a cast, so
    /// the bindings do not have it. Its value is chosen by the name of the library; `None` if unknown.
    pub(super) fn in_place(&self) -> Option<*const c_void> {
        self.facts.in_place.map(std::ptr::without_provenance)
    }

    /// The library's operation on values of [`Reduction::running_dtype`]. A mean is a sum here.
    ///
    /// The MPI standard does not define the minimum or maximum of a number and NaN, so floats use our own
    /// operations.
    pub(super) fn operation(&self, dtype: DType, op: ReduceOp) -> ffi::MPI_Op {
        let [f32_min, f32_max, f64_min, f64_max] = self.facts.extremes;
        // SAFETY: these are constants of the library.
        unsafe {
            match (op, dtype) {
                (ReduceOp::Sum | ReduceOp::Mean, _) => ffi::RSMPI_SUM,
                (ReduceOp::Product, _) => ffi::RSMPI_PROD,
                (ReduceOp::Min, DType::F32) => f32_min,
                (ReduceOp::Max, DType::F32) => f32_max,
                (ReduceOp::Min, DType::F64) => f64_min,
                (ReduceOp::Max, DType::F64) => f64_max,
                (ReduceOp::Min, _) => ffi::RSMPI_MIN,
                (ReduceOp::Max, _) => ffi::RSMPI_MAX,
            }
        }
    }

    /// Remembers that a transfer was left in flight for good.
    pub(super) fn abandon() {
        IS_ABANDONED.store(true, Ordering::Relaxed);
    }
}

impl Drop for Runtime {
    fn drop(&mut self) {
        let mut stage = lock(&STAGE);
        let Stage::Running { users, started_by_us, .. } = &mut *stage else { return };
        *users -= 1;
        if *users > 0 || !*started_by_us {
            return;
        }
        *stage = Stage::After;
        if !IS_ABANDONED.load(Ordering::Relaxed) && !std::thread::panicking() {
            // An error is ignored: the process ends anyway.
            // SAFETY: this was the last user, and this module started the library.
            unsafe { ffi::MPI_Finalize() };
        }
    }
}

/// The library's element type. The library only moves 16-bit floats, so they travel as 16-bit integers.
pub(super) fn datatype(dtype: DType) -> ffi::MPI_Datatype {
    // SAFETY: these are constants of the library.
    unsafe {
        match dtype {
            DType::F32 => ffi::RSMPI_FLOAT,
            DType::F64 => ffi::RSMPI_DOUBLE,
            DType::F16 | DType::BF16 => ffi::RSMPI_UINT16_T,
            DType::I32 => ffi::RSMPI_INT32_T,
            DType::I64 => ffi::RSMPI_INT64_T,
            DType::U8 => ffi::RSMPI_UINT8_T,
        }
    }
}

fn check(code: c_int) -> Result<(), String> {
    if code == ffi::MPI_SUCCESS as c_int {
        return Ok(());
    }
    let mut text = [0u8; ffi::MPI_MAX_ERROR_STRING as usize];
    let mut len = 0;
    // SAFETY: the text is as long as the longest that the library may write.
    let returned =
        unsafe { ffi::MPI_Error_string(code, text.as_mut_ptr().cast::<c_char>(), &mut len) };
    let is_known = returned == ffi::MPI_SUCCESS as c_int && len > 0;
    let text = String::from_utf8_lossy(&text[..len.max(0) as usize]).into_owned();
    Err(if is_known { text } else { format!("error {code}") })
}

fn in_place() -> Result<Option<usize>, String> {
    let mut text = vec![0u8; ffi::MPI_MAX_LIBRARY_VERSION_STRING as usize];
    let mut len = 0;
    // SAFETY: the text is as long as the longest that the library may write.
    check(unsafe { ffi::MPI_Get_library_version(text.as_mut_ptr().cast::<c_char>(), &mut len) })?;
    let name = String::from_utf8_lossy(&text[..len.max(0) as usize]).to_uppercase();
    if name.contains("OPEN MPI") {
        return Ok(Some(1));
    }
    let is_mpich = ["MPICH", "INTEL", "MVAPICH"].iter().any(|family| name.contains(family));
    Ok(is_mpich.then_some(usize::MAX))
}

type Combine = unsafe extern "C" fn(*mut c_void, *mut c_void, *mut c_int, *mut ffi::MPI_Datatype);

fn user_operation(function: Combine) -> Result<ffi::MPI_Op, String> {
    let mut operation = std::mem::MaybeUninit::uninit();
    // SAFETY: the function keeps the library's rules, and the handle is initialized if the call succeeds.
    unsafe {
        check(ffi::MPI_Op_create(Some(function), 1, operation.as_mut_ptr()))?;
        Ok(operation.assume_init())
    }
}

/// Combines `inout` with `input`, element by element: the maximum (or minimum) of f32 (or f64).
///
/// # Safety
///
/// Only the library calls this, with `len` elements of the type on each side.
unsafe extern "C" fn combine<const IS_F64: bool, const IS_MAX: bool>(
    input: *mut c_void,
    inout: *mut c_void,
    len: *mut c_int,
    _datatype: *mut ffi::MPI_Datatype,
) {
    let dtype = if IS_F64 { DType::F64 } else { DType::F32 };
    let op = if IS_MAX { ReduceOp::Max } else { ReduceOp::Min };
    let reduction = Reduction { dtype, op, ranks: 1 };
    // SAFETY: as required of the caller; the two sides lie apart, as the MPI standard promises.
    unsafe {
        let sides = [inout.cast_const().cast(), input.cast_const().cast()];
        reduction.run(&sides, &[inout.cast()], *len as usize);
    }
}
