//! The surroundings of a program: the disk that it writes to, standard output and standard error, the terminal,
//! progress bars, and the resources of this machine.
//!
//! Nothing here knows of ranks, runs or models, nor how a command fails.
#![forbid(unsafe_code)]
#![cfg_attr(not(test), warn(clippy::print_stdout, clippy::print_stderr))]

pub mod bar;
pub mod disk;
pub mod resources;
mod screen;
pub mod streams;
pub mod text;
