//! The tests of schedules, one program: each program is linked once more, with the whole crate.

mod csv;
mod facts;
mod refused;
