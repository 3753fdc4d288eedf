//! The only place where this crate writes to the user by itself.
//!
//! Errors are returned. An event that is not an error but must not go unnoticed (a refused connection, a
//! rendezvous without a secret) is written as one line to standard error. The crate has no other output and
//! keeps no log.

/// Writes one line to standard error. A closed standard error is not treated as a failure.
pub(crate) fn warn(message: &str) {
    use std::io::Write;
    let message = paceline_files::printable_lines(message);
    let _ = writeln!(std::io::stderr(), "paceline-rendezvous: {message}");
}
