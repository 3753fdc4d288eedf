//! The tests of groups of ranks, one program: each program is linked once more, with the whole crate.

#[path = "../children/mod.rs"]
mod children;
#[path = "../common/mod.rs"]
mod common;
mod corpus;
mod device;
mod failures;
mod limit;
mod mesh;
mod network;
mod processes;
#[path = "../ranks/mod.rs"]
mod ranks;
mod relay;
mod threads;
mod tree;
