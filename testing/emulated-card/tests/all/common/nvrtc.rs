//! NVRTC, NVIDIA's compiler as a library: `PACELINE_NVRTC` is the path of `libnvrtc.so.13`.

use std::ffi::{CString, c_char, c_int, c_void};
use std::path::Path;
use std::ptr::{null, null_mut};

use super::library::Library;

type Program = *mut c_void;
type Create = unsafe extern "C" fn(
    *mut Program,
    *const c_char,
    *const c_char,
    c_int,
    *const *const c_char,
    *const *const c_char,
) -> u32;
type Compile = unsafe extern "C" fn(Program, c_int, *const *const c_char) -> u32;
type Size = unsafe extern "C" fn(Program, *mut usize) -> u32;
type Text = unsafe extern "C" fn(Program, *mut c_char) -> u32;

/// The compiler, or `None` and a line that says so.
pub fn open() -> Option<Library> {
    let path = std::env::var_os("PACELINE_NVRTC").unwrap_or_default();
    match Library::open(Path::new(&path)) {
        Ok(library) if !path.is_empty() => Some(library),
        _ => {
            println!("skipped: PACELINE_NVRTC does not name libnvrtc.so.13");
            None
        }
    }
}

/// Compiles a source to PTX for sm_80.
pub fn compile(library: &Library, source: &str, options: &[&str]) -> Result<String, String> {
    let source = CString::new(source).expect("a source without zero bytes");
    let mut all = vec!["--gpu-architecture=compute_80", "--fmad=false"];
    all.extend(options);
    let options: Vec<CString> = all.iter().map(|o| CString::new(*o).expect("option")).collect();
    let pointers: Vec<*const c_char> = options.iter().map(|o| o.as_ptr()).collect();
    // SAFETY: the signatures are those of nvrtc.h 13.0. Every pointer is valid during its call, and the buffers have
    // the sizes that NVRTC asked for.
    unsafe {
        let create: Create = library.function("nvrtcCreateProgram");
        let compile: Compile = library.function("nvrtcCompileProgram");
        let read = |size: &str, text: &str, program| {
            let (size, text): (Size, Text) = (library.function(size), library.function(text));
            let mut len = 0;
            assert_eq!(size(program, &mut len), 0);
            let mut bytes = vec![0u8; len];
            assert_eq!(text(program, bytes.as_mut_ptr().cast()), 0);
            String::from_utf8_lossy(&bytes).trim_end_matches('\0').to_owned()
        };
        let mut program = null_mut();
        let name = c"kernels.cu".as_ptr();
        assert_eq!(create(&mut program, source.as_ptr(), name, 0, null(), null()), 0);
        match compile(program, pointers.len() as c_int, pointers.as_ptr()) {
            0 => Ok(read("nvrtcGetPTXSize", "nvrtcGetPTX", program)),
            _ => Err(read("nvrtcGetProgramLogSize", "nvrtcGetProgramLog", program)),
        }
    }
}
