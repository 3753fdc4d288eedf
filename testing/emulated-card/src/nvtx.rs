//! A profiler that writes the ranges of NVTX to a file: who begins and ends what, a line each.
//!
//! Like every such library it asks the program for a table of addresses and puts its own functions there. Input: the calls.
//! Output: the file that `PACELINE_EMULATED_NVTX` names; without one, the library does not start.

use std::fs::File;
use std::io::Write;
use std::sync::OnceLock;

use crate::boundary::{CText, InPtr};

static FILE: OnceLock<File> = OnceLock::new();

/// `NvtxCallbackModule`
const CORE: u32 = 1;
/// `NvtxCallbackIdCore`
const PUSH: usize = 9;
const POP: usize = 11;
/// `NvtxExportTableID`
const CALLBACKS: u32 = 1;

/// The addresses of a module's function pointers, by number.
type Table = *const *mut usize;

/// `NvtxExportTableCallbacks`
#[repr(C)]
#[derive(Clone, Copy)]
pub struct NvtxCallbacks {
    size: usize,
    functions: unsafe extern "C" fn(u32, *mut Table, *mut u32) -> i32,
}

/// Writes a line at once, since threads and processes share the file.
fn write(line: &str) {
    if let Some(mut file) = FILE.get() {
        // A test that reads the file finds out.
        let _ = file.write_all(line.as_bytes());
    }
}

/// The process and the thread that call, as one word.
fn caller() -> String {
    format!("{}-{:?}", std::process::id(), std::thread::current().id())
}

extern "C" fn push(name: CText) -> i32 {
    write(&format!("{} begin {}\n", caller(), name.get().unwrap_or_default()));
    0
}

extern "C" fn pop() -> i32 {
    write(&format!("{} end\n", caller()));
    0
}

/// Attaches to a program.
#[unsafe(no_mangle)]
#[allow(non_snake_case)]
pub extern "C" fn InitializeInjectionNvtx2(
    export_table: extern "C" fn(u32) -> InPtr<NvtxCallbacks>,
) -> i32 {
    i32::from(attach(export_table).is_some())
}

fn attach(export_table: extern "C" fn(u32) -> InPtr<NvtxCallbacks>) -> Option<()> {
    let path = std::env::var_os("PACELINE_EMULATED_NVTX")?;
    let callbacks = export_table(CALLBACKS).get()?;
    let (mut table, mut size) = (std::ptr::null(), 0);
    // SAFETY: this is the function's type, and the addresses are those of variables of the right types.
    let found = unsafe { (callbacks.functions)(CORE, &mut table, &mut size) };
    if found != 1 || size as usize <= POP {
        return None;
    }
    FILE.set(File::options().append(true).create(true).open(path).ok()?).ok()?;
    // SAFETY: the table has `size` addresses of pointers to functions of these types, and nobody calls them yet.
    unsafe {
        **table.add(PUSH) = push as *const () as usize;
        **table.add(POP) = pop as *const () as usize;
    }
    Some(())
}
