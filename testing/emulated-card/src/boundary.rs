//! The edge to C: pointers that callers hand over, status codes, and a guard that stops panics.
//!
//! The exported functions are safe Rust: what is unsafe about a caller's pointer is said once, here. A pointer type
//! can only come from a C caller, with the contract of C: null, or valid for the duration of the call.

use std::ffi::{CStr, c_char};
use std::panic::{AssertUnwindSafe, catch_unwind};

/// A status code of one of the libraries. Zero is success, and is never in an `Err`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Status(pub u32);

/// The result of an exported function.
pub type Outcome = Result<(), Status>;

/// A pointer for one result.
#[repr(transparent)]
#[derive(Clone, Copy)]
pub struct OutPtr<T>(*mut T);

impl<T: Copy> OutPtr<T> {
    /// The place of a variable of this library, for a function of the caller's.
    pub fn to(place: &mut T) -> Self {
        Self(place)
    }

    /// The place at an address that the caller has given.
    pub fn at(address: usize) -> Self {
        Self(address as *mut T)
    }

    /// Writes the result. `false` if the pointer is null.
    pub fn set(self, value: T) -> bool {
        if self.0.is_null() {
            return false;
        }
        // SAFETY: the C caller gave memory for a `T` that it does not use during the call. It may be uninitialized,
        // so it is written and never read.
        unsafe { self.0.write_unaligned(value) };
        true
    }

    /// Writes the result, or answers with `if_null`.
    pub fn give(self, value: T, if_null: Status) -> Outcome {
        if self.set(value) { Ok(()) } else { Err(if_null) }
    }

    /// Whether the pointer is null.
    pub fn is_null(self) -> bool {
        self.0.is_null()
    }

    /// Writes several results to an array of at least as many.
    pub fn set_all(self, values: &[T]) {
        if !self.0.is_null() {
            // SAFETY: the C caller gave an array of at least `values.len()` elements, as the interface demands, and
            // does not use it during the call.
            unsafe { std::ptr::copy_nonoverlapping(values.as_ptr(), self.0, values.len()) };
        }
    }
}

/// One value, or an array of them, to be read.
#[repr(transparent)]
#[derive(Clone, Copy)]
pub struct InPtr<T>(*const T);

impl<T: Copy> InPtr<T> {
    /// The value, unless the pointer is null.
    pub fn get(self) -> Option<T> {
        self.at(0)
    }

    /// An element of the array, unless the pointer is null.
    pub fn at(self, index: usize) -> Option<T> {
        if self.0.is_null() {
            return None;
        }
        // SAFETY: the C caller gave an initialized array that is longer than `index`, as the interface demands.
        Some(unsafe { self.0.add(index).read_unaligned() })
    }

    /// The first bytes of what the pointer names.
    pub fn bytes(self, len: usize) -> Option<Vec<u8>> {
        if self.0.is_null() {
            return (len == 0).then(Vec::new);
        }
        // SAFETY: the C caller gave `len` readable bytes, as the interface demands. They are copied at once.
        Some(unsafe { std::slice::from_raw_parts(self.0.cast::<u8>(), len) }.to_vec())
    }

    /// The same place, for a result: an argument that goes in and out.
    pub fn out(self) -> OutPtr<T> {
        OutPtr(self.0.cast_mut())
    }

    /// The address itself.
    pub fn address(self) -> usize {
        self.0 as usize
    }
}

/// A text that ends with a zero byte.
#[repr(transparent)]
#[derive(Clone, Copy)]
pub struct CText(*const c_char);

impl CText {
    /// The text, unless the pointer is null.
    pub fn get(self) -> Option<String> {
        if self.0.is_null() {
            return None;
        }
        // SAFETY: the C caller gave a string that ends with a zero byte, as the interface demands.
        Some(unsafe { CStr::from_ptr(self.0) }.to_string_lossy().into_owned())
    }
}

/// A text that lives as long as the program, for a caller that only reads it.
#[repr(transparent)]
#[derive(Clone, Copy)]
pub struct StaticText(*const c_char);

impl StaticText {
    /// The pointer to a constant.
    pub fn new(text: &'static CStr) -> Self {
        Self(text.as_ptr())
    }

    /// No text.
    pub fn null() -> Self {
        Self(std::ptr::null())
    }
}

/// Writes a text and its zero byte into a buffer, cut to the buffer's length.
pub fn write_text(to: OutPtr<u8>, len: usize, text: &str) {
    if len == 0 {
        return;
    }
    let mut bytes = text.as_bytes()[..text.len().min(len - 1)].to_vec();
    bytes.push(0);
    to.set_all(&bytes);
}

/// Runs the body of an exported function. A panic becomes a status, because it must not reach C.
pub fn stop_panics(on_panic: u32, body: impl FnOnce() -> Outcome) -> u32 {
    match catch_unwind(AssertUnwindSafe(body)) {
        Ok(Ok(())) => 0,
        Ok(Err(status)) => status.0,
        Err(_) => on_panic,
    }
}

/// Exports functions of a C interface that return a status. The first argument guards each body.
macro_rules! export {
    ($guard:path; $(
        $(#[$meta:meta])*
        fn $name:ident($($argument:ident: $type:ty),* $(,)?) $body:block
    )*) => { $(
        $(#[$meta])*
        #[unsafe(no_mangle)]
        #[allow(non_snake_case, clippy::too_many_arguments)]
        pub extern "C" fn $name($($argument: $type),*) -> u32 {
            $guard(move || $body)
        }
    )* };
}
pub(crate) use export;
