//! The one place where this crate speaks to the user by itself.
//!
//! Errors are returned; what neither fails nor may go unnoticed (a stranger that was turned away, a
//! meeting without a secret) is one line on standard error. The crate has no other output and keeps
//! no log.

/// Writes one line to standard error. A closed standard error is no reason to fail.
pub(crate) fn warn(message: &str) {
    use std::io::Write;
    let _ = writeln!(std::io::stderr(), "paceline-collectives: {message}");
}
