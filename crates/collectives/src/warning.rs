//! Warnings: the only output that this crate writes by itself, except the log of operations.
//!
//! Errors are returned. An event that is not an error but must not go unnoticed is written as one line to
//! standard error: for example a variable with an invalid value.

/// Writes one line to standard error. A closed standard error is not treated as a failure.
pub(crate) fn warn(message: &str) {
    use std::io::Write;
    let message = paceline_files::printable_lines(message);
    let _ = writeln!(std::io::stderr(), "paceline-collectives: {message}");
}
