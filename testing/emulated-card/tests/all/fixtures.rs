//! NVRTC compiles the sources to PTX that the interpreter understands. `PACELINE_WRITE_PTX=1` stores it.

use crate::common::{nvrtc, path, source};
use paceline_emulated_card::ptx;

#[test]
fn stored_ptx_is_current_and_understood() {
    for name in ["ordinary", "faults", "halves"] {
        let file = path("ptx").join(format!("{name}.ptx"));
        if let Some(library) = nvrtc::open() {
            let made = nvrtc::compile(&library, &source(&format!("{name}.cu")), &[]).unwrap();
            if std::env::var_os("PACELINE_WRITE_PTX").is_some() {
                std::fs::write(&file, &made).unwrap();
            }
            ptx::parse(&made).unwrap();
        }
        let stored = std::fs::read_to_string(&file).unwrap();
        assert!(!ptx::parse(&stored).unwrap().kernels.is_empty());
    }
}
