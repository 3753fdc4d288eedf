//! From a kernel's source to code for a card, by the vendor's run-time compiler (NVRTC). Compiled code is kept on disk.
//!
//! Input: a kernel and a target. Output: machine code, or text for a card that is emulated, or the resources of the kernel. A
//! file of the cache begins with the digest of the rest and has the digest of source, kernel, target, options and compiler as
//! its name, so neither an older compiler's nor a broken file is used. The folder belongs to the user alone.

use std::ffi::{CStr, CString, c_char, c_int, c_void};
use std::fs::{self, DirBuilder};
use std::io::Write;
use std::os::unix::fs::{DirBuilderExt, MetadataExt, PermissionsExt};
use std::path::{Path, PathBuf};

use sha2::{Digest, Sha256};

use crate::kernel::CardKernel;
use crate::library::{LibraryNames, functions};
use crate::{CudaError, Result};

/// The version that is known to work: newer ones make text that drivers at hand refuse, which does not matter for machine
/// code.
const NAMES: LibraryNames = LibraryNames {
    files: &["libnvrtc.so.13", "libnvrtc.so.12", "libnvrtc.so"],
    companion: Some("libnvrtc-builtins"),
    hint: "install it with `pip install nvidia-cuda-nvrtc==13.0.88`, and name its folder in PACELINE_CUDA_LIBRARIES",
};

functions! {
    Compiler in NAMES;
    fn nvrtcVersion(major: *mut c_int, minor: *mut c_int);
    fn nvrtcCreateProgram(
        program: *mut *mut c_void, text: *const c_char, name: *const c_char,
        num_headers: c_int, headers: *const *const c_char, names: *const *const c_char,
    );
    fn nvrtcDestroyProgram(program: *mut *mut c_void);
    fn nvrtcAddNameExpression(program: *mut c_void, name: *const c_char);
    fn nvrtcGetLoweredName(program: *mut c_void, name: *const c_char, symbol: *mut *const c_char);
    fn nvrtcCompileProgram(program: *mut c_void, num_options: c_int, options: *const *const c_char);
    fn nvrtcGetProgramLogSize(program: *mut c_void, bytes: *mut usize);
    fn nvrtcGetProgramLog(program: *mut c_void, log: *mut c_char);
    fn nvrtcGetPTXSize(program: *mut c_void, bytes: *mut usize);
    fn nvrtcGetPTX(program: *mut c_void, text: *mut c_char);
    fn nvrtcGetCUBINSize(program: *mut c_void, bytes: *mut usize);
    fn nvrtcGetCUBIN(program: *mut c_void, code: *mut c_char);
}

/// The architecture that a source is compiled for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CompileTarget {
    /// Machine code of this architecture, such as 90.
    Code(u32),
    /// Text (PTX) of this virtual architecture.
    Text(u32),
}

impl CompileTarget {
    fn option(self) -> String {
        match self {
            CompileTarget::Code(number) => format!("--gpu-architecture=sm_{number}"),
            CompileTarget::Text(number) => format!("--gpu-architecture=compute_{number}"),
        }
    }
}

/// The version of the compiler. Errors if it is missing, with where it was sought.
pub fn version() -> Result<(i32, i32)> {
    let compiler = Compiler::get()?;
    let (mut major, mut minor) = (0, 0);
    // SAFETY: the addresses are those of numbers.
    let status = unsafe { (compiler.nvrtcVersion)(&mut major, &mut minor) };
    check("nvrtcVersion", status)?;
    Ok((major, minor))
}

/// Compiled code of a kernel.
#[derive(Debug)]
pub(crate) struct Compiled {
    /// The name that the code has for it.
    pub symbol: String,
    /// The code, or the part of the log that was asked for.
    pub made: Vec<u8>,
}

impl Compiled {
    /// A line with the symbol, and then the code.
    fn to_bytes(&self) -> Vec<u8> {
        [self.symbol.as_bytes(), b"\n", &self.made].concat()
    }

    fn from_bytes(bytes: &[u8]) -> Option<Self> {
        let mut parts = bytes.splitn(2, |byte| *byte == b'\n');
        let symbol = String::from_utf8(parts.next()?.to_vec()).ok()?;
        Some(Self { symbol, made: parts.next()?.to_vec() })
    }
}

/// The code of a kernel, from the cache or compiled now.
pub(crate) fn compile(kernel: &CardKernel, target: CompileTarget) -> Result<Compiled> {
    made(kernel, target, &[], |code, _| code)
}

/// The bytes that `wanted` takes from the code and the compiler's log, from the cache or made now.
fn made(
    kernel: &CardKernel,
    target: CompileTarget,
    more_options: &[&str],
    wanted: impl FnOnce(Vec<u8>, String) -> Vec<u8>,
) -> Result<Compiled> {
    let (major, minor) = version()?;
    let text = [kernel.source.preludes.concat().as_str(), kernel.source.text].concat();
    let options = [&OPTIONS, more_options].concat();
    let mut digest = Sha256::new();
    let (architecture, expression) = (target.option(), kernel.expression());
    digest.update(format!("{major}.{minor} {architecture} {options:?} {expression}\n"));
    digest.update(&text);
    let name = hex(&digest.finalize());
    let folder = cache_folder();
    let kept = folder.as_ref().and_then(|folder| kept(&folder.join(&name)));
    if let Some(made) = kept.and_then(|bytes| Compiled::from_bytes(&bytes)) {
        return Ok(made);
    }
    let (Compiled { symbol, made }, log) = compile_now(kernel, &text, target, &options)?;
    let compiled = Compiled { symbol, made: wanted(made, log) };
    if let Some(folder) = folder {
        // Without a cache the next run compiles again, which takes a moment and is no error.
        let _ = keep(&folder, &name, &compiled.to_bytes());
    }
    Ok(compiled)
}

/// No contraction of a product and a sum into one rounding, unless the source says so: kernels have the processor's bits.
const OPTIONS: [&str; 5] =
    ["--fmad=false", "--std=c++17", "--prec-div=true", "--prec-sqrt=true", "--ftz=false"];

/// The resources of a multiprocessor that a kernel takes.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Resources {
    /// Registers of a thread.
    pub registers: u32,
    /// Bytes of a thread that did not fit into registers, written and read.
    pub spilled_bytes: u32,
    /// Shared memory of a block, without the bytes that a launch adds.
    pub shared_bytes: u32,
}

/// The resources of a kernel as machine code of an architecture, such as 90. This needs no card.
pub fn resources(kernel: &CardKernel, architecture: u32) -> Result<Resources> {
    let target = CompileTarget::Code(architecture);
    let compiled = made(kernel, target, &["--ptxas-options=-v"], |_, log| log.into_bytes())?;
    let log = String::from_utf8_lossy(&compiled.made);
    // Functions of the source that are no templates are compiled too.
    let begin = format!("Compiling entry function '{}'", compiled.symbol);
    let part = log.split_once(&begin).map_or("", |of| of.1);
    let part = part.split("Compiling entry function").next().unwrap_or_default();
    // The sum of the numbers before a word.
    let before = |word: &str| {
        let numbers = part.lines().filter_map(|line| {
            line.split_once(word)?.0.split_whitespace().last()?.parse::<u32>().ok()
        });
        numbers.sum::<u32>()
    };
    Ok(Resources {
        registers: before(" registers"),
        spilled_bytes: before(" bytes spill stores") + before(" bytes spill loads"),
        shared_bytes: before(" bytes smem"),
    })
}

/// The code, and the compiler's log.
fn compile_now(
    kernel: &CardKernel,
    text: &str,
    target: CompileTarget,
    options: &[&str],
) -> Result<(Compiled, String)> {
    let compiler = Compiler::get()?;
    let file = kernel.source.file;
    let broken = |log: &str| CudaError::Compile { file, log: log.to_owned() };
    let text = CString::new(text).map_err(|_| broken("it holds a zero byte"))?;
    let name = CString::new(file).unwrap_or_default();
    let expression = CString::new(kernel.expression()).unwrap_or_default();
    let target_option = target.option();
    let options = options.iter().copied().chain([target_option.as_str()]);
    let options: Vec<CString> = options.filter_map(|option| CString::new(option).ok()).collect();
    let options: Vec<*const c_char> = options.iter().map(|option| option.as_ptr()).collect();
    let mut program = std::ptr::null_mut();
    // SAFETY: texts end with a zero byte and outlive the calls, lists have the stated lengths, and buffers the sizes that the
    // compiler has named. A symbol is copied before its program is destroyed.
    unsafe {
        let no_texts = std::ptr::null();
        let (text, name) = (text.as_ptr(), name.as_ptr());
        let create = compiler.nvrtcCreateProgram;
        check("nvrtcCreateProgram", create(&mut program, text, name, 0, no_texts, no_texts))?;
        let status = (compiler.nvrtcAddNameExpression)(program, expression.as_ptr());
        check("nvrtcAddNameExpression", status)?;
        let count = options.len() as c_int;
        let status = (compiler.nvrtcCompileProgram)(program, count, options.as_ptr());
        let log = bytes(program, compiler.nvrtcGetProgramLogSize, compiler.nvrtcGetProgramLog);
        let log = log.unwrap_or_default();
        let log = CStr::from_bytes_until_nul(&log).unwrap_or_default().to_string_lossy();
        let outcome = if status == 0 {
            match target {
                CompileTarget::Code(_) => {
                    bytes(program, compiler.nvrtcGetCUBINSize, compiler.nvrtcGetCUBIN)
                }
                CompileTarget::Text(_) => {
                    bytes(program, compiler.nvrtcGetPTXSize, compiler.nvrtcGetPTX)
                }
            }
        } else {
            Err(broken(&log))
        };
        let outcome = outcome.and_then(|made| {
            let mut symbol = std::ptr::null();
            let status = (compiler.nvrtcGetLoweredName)(program, expression.as_ptr(), &mut symbol);
            check("nvrtcGetLoweredName", status)?;
            Ok(Compiled { symbol: CStr::from_ptr(symbol).to_string_lossy().into_owned(), made })
        });
        (compiler.nvrtcDestroyProgram)(&mut program);
        Ok((outcome?, log.into_owned()))
    }
}

/// # Safety
///
/// The program is one of the compiler, and the functions are its: one for a size, one that fills so many bytes.
unsafe fn bytes(
    program: *mut c_void,
    size: unsafe extern "C" fn(*mut c_void, *mut usize) -> u32,
    fill: unsafe extern "C" fn(*mut c_void, *mut c_char) -> u32,
) -> Result<Vec<u8>> {
    let mut len = 0;
    // SAFETY: the caller's.
    check("the size of compiled code", unsafe { size(program, &mut len) })?;
    let mut bytes = vec![0u8; len];
    // SAFETY: the caller's, and the buffer has this size.
    check("compiled code", unsafe { fill(program, bytes.as_mut_ptr().cast()) })?;
    Ok(bytes)
}

fn check(function: &'static str, status: u32) -> Result<()> {
    match status {
        0 => Ok(()),
        _ => Err(CudaError::Failed {
            function,
            status,
            name: "NVRTC".to_owned(),
            text: "the run-time compiler refuses".to_owned(),
        }),
    }
}

/// Where compiled code is kept; `None` if the user has no such place, or others can write there.
fn cache_folder() -> Option<PathBuf> {
    let base =
        std::env::var_os("XDG_CACHE_HOME").map(PathBuf::from).filter(|path| path.is_absolute());
    let base = base.or_else(|| Some(PathBuf::from(std::env::var_os("HOME")?).join(".cache")))?;
    let folder = base.join("paceline").join("kernels");
    DirBuilder::new().recursive(true).mode(0o700).create(&folder).ok()?;
    let found = fs::symlink_metadata(&folder).ok()?;
    // A user who can write there can choose the code that runs.
    let own = found.is_dir() && found.permissions().mode() & 0o022 == 0;
    let is_mine = fs::metadata("/proc/self").ok()?.uid() == found.uid();
    (own && is_mine).then_some(folder)
}

/// The most that a file of the cache may have.
const MOST_BYTES: u64 = 64 << 20;

/// The bytes that a file keeps, if it is complete.
fn kept(path: &Path) -> Option<Vec<u8>> {
    let bytes = paceline_files::read(path, MOST_BYTES).ok()?;
    let (digest, made) = bytes.split_at_checked(32)?;
    (Sha256::digest(made).as_slice() == digest).then(|| made.to_vec())
}

fn keep(folder: &Path, name: &str, made: &[u8]) -> std::io::Result<()> {
    let part = folder.join(format!("{name}.{}", std::process::id()));
    let mut file = paceline_files::create(&part)?;
    let written = file.write_all(&Sha256::digest(made)).and_then(|()| file.write_all(made));
    written.and_then(|()| fs::rename(&part, folder.join(name))).inspect_err(|_| {
        let _ = fs::remove_file(&part);
    })
}

fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}
