//! Shared libraries, opened while the test runs.

use std::ffi::{CStr, CString, c_char, c_int, c_void};
use std::path::Path;

unsafe extern "C" {
    fn dlopen(file: *const c_char, mode: c_int) -> *mut c_void;
    fn dlsym(library: *mut c_void, name: *const c_char) -> *mut c_void;
    fn dlerror() -> *const c_char;
}

/// A library that stays open until the process ends.
pub struct Library(usize);

impl Library {
    /// Opens a file.
    pub fn open(path: &Path) -> Result<Self, String> {
        let name = CString::new(path.to_str().expect("a path in UTF-8")).expect("a path");
        // SAFETY: the name ends with a zero byte. The libraries that tests open run nothing harmful when they are
        // loaded. `dlerror` returns a string that lives until the next call on this thread.
        unsafe {
            match dlopen(name.as_ptr(), 2) {
                library if library.is_null() => {
                    Err(CStr::from_ptr(dlerror()).to_string_lossy().into_owned())
                }
                library => Ok(Self(library as usize)),
            }
        }
    }

    /// The address of a symbol.
    pub fn symbol(&self, name: &str) -> Option<*mut c_void> {
        let name = CString::new(name).expect("a name");
        // SAFETY: the library is open and the name ends with a zero byte.
        let symbol = unsafe { dlsym(self.0 as *mut c_void, name.as_ptr()) };
        (!symbol.is_null()).then_some(symbol)
    }

    /// A function.
    ///
    /// # Safety
    /// `F` is a function pointer type with the symbol's real signature.
    pub unsafe fn function<F: Copy>(&self, name: &str) -> F {
        let symbol = self.symbol(name).unwrap_or_else(|| panic!("no symbol {name}"));
        assert_eq!(size_of::<F>(), size_of::<*mut c_void>());
        // SAFETY: both are pointers of the same size; the caller vouches for the signature.
        unsafe { std::mem::transmute_copy(&symbol) }
    }
}
