//! Stands in for `libloading` in a program without the feature `libraries`: no library can be opened.

use std::convert::Infallible;
use std::ffi::c_int;

use thiserror::Error;

pub(crate) const RTLD_LAZY: c_int = 0;
pub(crate) const RTLD_LOCAL: c_int = 0;
pub(crate) const RTLD_NOW: c_int = 0;

/// Why no library can be opened.
#[derive(Debug, Error)]
#[error("this program was built without the feature `cuda`")]
pub(crate) struct NotBuiltIn;

/// An open library, which cannot exist.
#[derive(Debug)]
pub(crate) struct Library(Infallible);

impl Library {
    /// Errors.
    ///
    /// # Safety
    ///
    /// It has no condition.
    pub(crate) unsafe fn open<P>(_: Option<P>, _: c_int) -> Result<Self, NotBuiltIn> {
        Err(NotBuiltIn)
    }

    /// Cannot be called.
    ///
    /// # Safety
    ///
    /// It has no condition.
    pub(crate) unsafe fn get<F>(&self, _: &[u8]) -> Result<&F, NotBuiltIn> {
        match self.0 {}
    }
}

#[cfg(test)]
mod tests {
    #[test]
    fn a_program_without_libraries_says_so() {
        let said = crate::driver::count().unwrap_err().to_string();
        let why = "libcuda.so.1 was not found; sought: libcuda.so.1 (this program was built without the feature `cuda`)";
        assert!(said.starts_with(why), "{said}");
    }
}
