//! The commands that need no run of their own, one folder each: the flags, and the work that they ask for. The others are in
//! the crates below: runs, studies, checkpoints, measurements of operations, and the launcher.

pub mod analyze;
pub mod bench;
pub mod check;
pub mod classify;
pub mod compare;
pub mod completions;
pub mod fetch;
mod folder;
pub mod generate;
pub mod hang;
pub mod new;
pub mod record;
pub mod schedule;
pub mod show;
pub mod tokenizer;
pub mod trace;
pub mod train;
