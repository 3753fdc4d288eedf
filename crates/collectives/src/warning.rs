//! The only place where this crate writes to the user by itself, besides the log of operations.
//!
//! Errors are returned. An event that is no error but must not go unnoticed (a variable that makes no
//! sense, an emulated link that the transport cannot keep up with) is one line on standard error.

/// Writes one line to standard error. A closed standard error is not treated as a failure.
pub(crate) fn warn(message: &str) {
    use std::io::Write;
    let _ = writeln!(std::io::stderr(), "paceline-collectives: {message}");
}
