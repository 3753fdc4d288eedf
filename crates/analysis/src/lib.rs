//! What trace files say: they are written and read, analysed rank by rank and across ranks, merged, and shown
//! as reports, tables and charts.
//!
//! The tracks of a recorder, trace files and named series of numbers go in. Figures, one file of all ranks,
//! HTML, CSV, JSON, PNG and SVG files come out. Ranks and devices are what a trace file says of them: this
//! crate knows nothing of training, models or layers.
#![forbid(unsafe_code)]

pub mod hta;
pub mod json;
pub mod kineto;
pub mod plot;
pub mod ranks;
pub mod read;
pub mod report;
pub mod stats;
pub mod table;
pub mod timeline;

mod steps;
