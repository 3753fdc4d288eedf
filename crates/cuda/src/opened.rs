//! Stands in for `libloading` in a program without the feature `libraries`: no library can be opened.

use std::convert::Infallible;
use std::io::{Error, Result};

pub(crate) const RTLD_LAZY: i32 = 0;
pub(crate) const RTLD_LOCAL: i32 = 0;
pub(crate) const RTLD_NOW: i32 = 0;

/// An open library, which cannot exist.
#[derive(Debug)]
pub(crate) struct Library(Infallible);

impl Library {
    /// Errors.
    ///
    /// # Safety
    ///
    /// It has no condition.
    pub(crate) unsafe fn open<P>(_: Option<P>, _: i32) -> Result<Self> {
        Err(Error::other("this program was built without the feature `cuda`"))
    }

    /// Cannot be called.
    ///
    /// # Safety
    ///
    /// It has no condition.
    pub(crate) unsafe fn get<F>(&self, _: &[u8]) -> Result<&F> {
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
