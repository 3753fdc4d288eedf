//! Tests on the emulated card, or on a real one.
//!
//! A test that needs a card asks [`is_ready`] first. It uses the emulated card, whose library lies beside the test's program,
//! and the run-time compiler of the vendor, which is sought as [`paceline_cuda::library`] says. With `PACELINE_CARD=1` it uses
//! the card of this machine, and fails if the machine has no card.

use std::path::{Path, PathBuf};
use std::sync::OnceLock;

use paceline_cuda::library::{Library, LibraryNames};

/// The names under which the emulated card's library stands for those of the vendor.
const NAMES: [&str; 5] =
    ["libcuda.so.1", "libcublasLt.so.13", "libnccl.so.2", "libnvidia-ml.so.1", "libcupti.so.13"];

/// Whether this process has a card with all that it needs. Otherwise says what is missing.
///
/// # Panics
///
/// If `PACELINE_CARD=1` and something is missing, or if the folder of the library cannot be made.
#[allow(clippy::print_stdout, reason = "a test that is skipped says so")]
pub fn is_ready() -> bool {
    static READY: OnceLock<bool> = OnceLock::new();
    *READY.get_or_init(|| {
        let is_real = std::env::var_os("PACELINE_CARD").is_some_and(|value| value == "1");
        if !is_real {
            paceline_cuda::library::prefer(folder().to_owned());
        }
        match paceline_cuda::probe(None) {
            Ok(()) => true,
            Err(error) if is_real => panic!("PACELINE_CARD=1, but {error}"),
            Err(error) => {
                println!("skipped: {error}");
                false
            }
        }
    })
}

/// The value of `PACELINE_CUDA_LIBRARIES` with which a program of its own finds the same card; `None` if something is missing.
pub fn variable() -> Option<String> {
    let found = std::env::var(paceline_cuda::library::FOLDERS).unwrap_or_default();
    if !is_ready() || std::env::var_os("PACELINE_CARD").is_some_and(|value| value == "1") {
        return is_ready().then_some(found);
    }
    Some(format!("{}:{found}", folder().display()))
}

/// The instructions that all threads of kernels have run in this process; `None` on a real card.
pub fn instructions() -> Option<u64> {
    counts().map(|counts| counts[0])
}

/// How often this process has put a kernel, a product or a graph into a stream; `None` on a real card.
pub fn launches() -> Option<u64> {
    counts().map(|counts| counts[12])
}

/// The numbers of `paceline_emulated_counts`.
fn counts() -> Option<[u64; 13]> {
    let names = LibraryNames { files: &["libcuda.so.1"], companion: None, hint: "" };
    let library = Library::open(names).ok()?;
    // SAFETY: this is the function's type; a real driver has no function of this name.
    let counts = unsafe {
        library.function::<unsafe extern "C" fn(*mut u64, usize) -> u32>("paceline_emulated_counts")
    };
    let mut numbers = [0; 13];
    // SAFETY: there is room for as many numbers.
    let status = unsafe { counts.ok()?(numbers.as_mut_ptr(), numbers.len()) };
    (status == 0).then_some(numbers)
}

/// The library, which is built with the crate and lies where its users' programs do.
pub fn library() -> PathBuf {
    let program = std::env::current_exe().expect("the path of this program");
    let beside = program.parent().expect("a folder").join("libpaceline_emulated_card.so");
    assert!(beside.is_file(), "{} is missing: build paceline-emulated-card", beside.display());
    beside
}

/// A folder in which the library has the vendor's names, beside the library. Programs that are started search it.
fn folder() -> &'static Path {
    static FOLDER: OnceLock<PathBuf> = OnceLock::new();
    FOLDER.get_or_init(|| linked(&library()).expect("a folder for the emulated card's library"))
}

fn linked(library: &Path) -> std::io::Result<PathBuf> {
    let folder = library.with_file_name("emulated-card");
    std::fs::create_dir_all(&folder)?;
    for name in NAMES {
        // Other tests make the same links at the same time, and one that was killed left a part of its own behind.
        let part = folder.join(format!("{name}.{}", std::process::id()));
        match std::fs::remove_file(&part) {
            Err(error) if error.kind() != std::io::ErrorKind::NotFound => return Err(error),
            _ => std::os::unix::fs::symlink(library, &part)?,
        }
        std::fs::rename(&part, folder.join(name))?;
    }
    Ok(folder)
}
