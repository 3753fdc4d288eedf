//! Tests on the emulated card, or on a real one.
//!
//! A test that needs a card asks [`is_ready`] first. It uses the emulated card, whose library lies beside the test's program,
//! and the run-time compiler of the vendor, which is sought as [`paceline_cuda::library`] says. With `PACELINE_CARD=1` it uses
//! the card of this machine, and fails if there is none.

use std::path::{Path, PathBuf};
use std::sync::OnceLock;

/// The names under which the emulated card's library stands for those of the vendor.
const NAMES: [&str; 3] = ["libcuda.so.1", "libcublasLt.so.13", "libnccl.so.2"];

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
            let library = library();
            paceline_cuda::library::prefer(
                folder(&library).expect("a folder for the emulated card's library"),
            );
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
    let folder = folder(&library()).expect("a folder for the emulated card's library");
    Some(format!("{}:{found}", folder.display()))
}

/// The library, which is built with the crate and lies where its users' programs do.
fn library() -> PathBuf {
    let program = std::env::current_exe().expect("the path of this program");
    let beside = program.parent().expect("a folder").join("libpaceline_emulated_card.so");
    assert!(beside.is_file(), "{} is missing: build paceline-emulated-card", beside.display());
    beside
}

/// A folder in which the library has the vendor's names, beside the library, for programs that search it.
pub fn folder(library: &Path) -> std::io::Result<PathBuf> {
    let folder = library.with_file_name("emulated-card");
    std::fs::create_dir_all(&folder)?;
    for name in NAMES {
        // Other tests make the same links at the same time.
        let part = folder.join(format!("{name}.{}", std::process::id()));
        std::os::unix::fs::symlink(library, &part)?;
        std::fs::rename(&part, folder.join(name))?;
    }
    Ok(folder)
}
