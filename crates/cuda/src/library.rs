//! Libraries of the vendor: where they are, and the functions in them.
//!
//! Input: names of files and functions. Output: addresses of functions. This module does not know their purpose.

use std::ffi::{CStr, OsString, c_char};
use std::path::{Path, PathBuf};
use std::sync::OnceLock;

use crate::opened::{Library as Opened, RTLD_LOCAL, RTLD_NOW};

use crate::{CudaError, Result};

/// Folders that are searched before those of the system, separated by colons.
pub const FOLDERS: &str = "PACELINE_CUDA_LIBRARIES";

static PREFERRED: OnceLock<PathBuf> = OnceLock::new();

/// Searches `folder` before all others: for tests, whose card is emulated. Only the first call counts, and only for
/// libraries that are opened later.
pub fn prefer(folder: PathBuf) {
    PREFERRED.get_or_init(|| folder);
}

/// A library, by the names of its file.
#[derive(Clone, Copy, Debug)]
pub struct LibraryNames {
    /// The file, newest version first.
    pub files: &'static [&'static str],
    /// The beginning of the names of files that the library opens itself, which it finds only once they are open.
    pub companion: Option<&'static str>,
    /// The fix if it is missing or too old.
    pub hint: &'static str,
}

/// A library that stays open.
#[derive(Debug)]
pub struct Library {
    opened: Opened,
    /// They are never closed, as the library.
    _companions: Vec<Opened>,
    path: String,
    hint: &'static str,
}

impl Library {
    /// Opens the first file that is there, in the folders of [`FOLDERS`] and then where the system looks. Errors with all
    /// places where it was sought.
    pub fn open(names: LibraryNames) -> Result<Self> {
        let mut sought = Vec::new();
        for candidate in candidates(names.files) {
            let begin = names.companion;
            let companions = begin.map(|begin| companions(&candidate, begin)).unwrap_or_default();
            // SAFETY: opening the vendor's libraries runs their initializers, as intended. The owner of the system, or of the
            // variable, chooses the files at these paths.
            match unsafe { Opened::open(Some(&candidate), RTLD_NOW | RTLD_LOCAL) } {
                Ok(opened) => {
                    let path = candidate.to_string_lossy().into_owned();
                    return Ok(Self { opened, _companions: companions, path, hint: names.hint });
                }
                Err(error) => sought.push(reason(&candidate, &error.to_string())),
            }
        }
        let (library, sought) = (names.files[0], sought.join(", "));
        Err(CudaError::Missing { library, sought, hint: names.hint })
    }

    /// The address of a function.
    ///
    /// # Safety
    ///
    /// `F` is the type of the function of this name.
    pub unsafe fn function<F: Copy>(&self, function: &'static str) -> Result<F> {
        // SAFETY: the caller's. The library is never closed.
        match unsafe { self.opened.get::<F>(function.as_bytes()) } {
            Ok(symbol) => Ok(*symbol),
            Err(_) => Err(CudaError::TooOld { path: self.path.clone(), function, hint: self.hint }),
        }
    }

    /// The library's text for a status.
    ///
    /// # Safety
    ///
    /// The function of this name takes a status and returns a constant text.
    pub(crate) unsafe fn status_text(&self, function: &'static str, status: u32) -> Result<String> {
        // SAFETY: the caller's.
        let text = unsafe {
            CStr::from_ptr(self.function::<unsafe extern "C" fn(u32) -> *const c_char>(function)?(
                status,
            ))
        };
        Ok(text.to_string_lossy().into_owned())
    }
}

fn candidates(files: &[&str]) -> Vec<OsString> {
    let folders = std::env::var_os(FOLDERS).unwrap_or_default();
    let folders = PREFERRED.get().cloned().into_iter().chain(std::env::split_paths(&folders));
    let folders: Vec<PathBuf> = folders.filter(|path| path.is_absolute()).collect();
    let in_folders =
        folders.iter().flat_map(|folder| files.iter().map(|file| folder.join(file).into()));
    in_folders.chain(files.iter().map(OsString::from)).collect()
}

/// Opens the files in the folder of a library whose names begin like this.
fn companions(library: &OsString, begin: &str) -> Vec<Opened> {
    let folder = Path::new(library).parent().filter(|folder| folder.is_absolute());
    let entries = folder.and_then(|folder| std::fs::read_dir(folder).ok());
    let files = entries.into_iter().flatten().flatten().map(|entry| entry.path());
    let named = files.filter(|path| {
        path.file_name().is_some_and(|name| name.to_string_lossy().starts_with(begin))
    });
    // SAFETY: as for the library beside which they lie.
    named
        .filter_map(|path| unsafe { Opened::open(Some(path), RTLD_NOW | RTLD_LOCAL) }.ok())
        .collect()
}

/// A place and, if something is there, why it cannot be used.
fn reason(candidate: &OsString, error: &str) -> String {
    let name = candidate.to_string_lossy();
    if error.contains("No such file") { name.into_owned() } else { format!("{name} ({error})") }
}

/// A table of a library's functions, which is filled when it is first asked for.
macro_rules! functions {
    ($(#[$about:meta])* $table:ident in $names:expr; $(fn $name:ident($($arg:ident: $ty:ty),* $(,)?);)*) => {
        $(#[$about])*
        #[allow(non_snake_case)]
        pub(crate) struct $table {
            $(pub(crate) $name: unsafe extern "C" fn($($ty),*) -> u32,)*
            #[allow(dead_code)]
            pub(crate) library: $crate::library::Library,
        }

        impl $table {
            /// The table of this process. The library is opened once; that it is missing is remembered too.
            pub(crate) fn get() -> $crate::Result<&'static Self> {
                static TABLE: std::sync::OnceLock<$crate::Result<$table>> = std::sync::OnceLock::new();
                TABLE.get_or_init(Self::load).as_ref().map_err(Clone::clone)
            }

            fn load() -> $crate::Result<Self> {
                let library = $crate::library::Library::open($names)?;
                // SAFETY: the types are those of the vendor's headers, with the status as a number.
                unsafe {
                    Ok(Self {
                        $($name: library.function(stringify!($name))?,)*
                        library,
                    })
                }
            }
        }
    };
}
pub(crate) use functions;
