//! The tests of the emulated card, one program: each program is linked once more, with the whole crate.

mod capture;
mod common;
mod driver;
mod fixtures;
mod halves;
mod interpreter;
mod kernel_faults;
mod matmul;
mod nccl;
