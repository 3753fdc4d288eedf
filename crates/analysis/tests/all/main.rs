//! The tests of the analysis, one program: each program is linked once more, with the whole crate.

mod across;
mod advice;
mod analysis_chance;
mod analysis_device;
mod analysis_host;
mod analysis_hta;
mod common;
mod corpus;
mod critical_path;
mod doctor;
mod drawn_steps;
mod find;
mod generated;
mod hang;
mod hostile;
mod hta;
mod json;
mod json_windows;
mod merge;
mod own;
mod perfetto;
mod pipeline;
mod read;
mod report;
mod snapshot;
mod steps;
