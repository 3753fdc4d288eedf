//! The tests of schedules, one program: each program is linked once more, with the whole crate.

mod facts;
mod refused;
