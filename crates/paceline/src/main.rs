//! The command line of paceline, with the choices that paceline comes with.
//!
//! [`Program`] reads as the whole program: parse, resolve, run, exit. A program of your own adds a model, a data set or a
//! strategy to it (`examples`, and the first part of `docs/extending.md`).
#![forbid(unsafe_code)]

use std::process::ExitCode;

use paceline::Program;

fn main() -> ExitCode {
    Program::new().main()
}
