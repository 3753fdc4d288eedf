//! The only place where this crate writes to the user by itself.
//!
//! Errors are returned. An event that is not an error but must not go unnoticed (a refused connection, a
//! rendezvous without a secret) is written as one line to standard error. The crate has no other output and
//! keeps no log.

use std::sync::atomic::{AtomicUsize, Ordering};

/// How many refused connections a listener reports. Further refusals are only counted.
const MAX_WARNINGS: usize = 16;

/// The warnings of a listener about connections that it refuses. Anybody can connect, so their number is limited.
#[derive(Debug, Default)]
pub(crate) struct Warnings(AtomicUsize);

impl Warnings {
    /// Warns of a refused connection, unless there were many before.
    pub(crate) fn warn(&self, message: &str) {
        self.lines(message).iter().for_each(|line| warn(line));
    }

    /// Reports no refused connections from now on.
    #[cfg(any(test, feature = "fuzzing"))]
    pub(crate) fn be_silent(&self) {
        self.0.store(MAX_WARNINGS, Ordering::Relaxed);
    }

    fn lines<'a>(&self, message: &'a str) -> Vec<&'a str> {
        match self.0.fetch_add(1, Ordering::Relaxed) + 1 {
            number if number < MAX_WARNINGS => vec![message],
            MAX_WARNINGS => vec![message, "further refused connections are not reported"],
            _ => Vec::new(),
        }
    }
}

/// Writes one line to standard error. A closed standard error is not treated as a failure.
pub(crate) fn warn(message: &str) {
    use std::io::Write;
    let message = paceline_files::printable_lines(message);
    let _ = writeln!(std::io::stderr(), "paceline-rendezvous: {message}");
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_listener_warns_of_so_many_connections_and_says_when_it_stops() {
        let warnings = Warnings::default();
        let lines: Vec<_> = (0..100).flat_map(|_| warnings.lines("refused")).collect();
        assert_eq!(lines.len(), MAX_WARNINGS + 1);
        assert_eq!(lines.last(), Some(&"further refused connections are not reported"));
        let silent = Warnings::default();
        silent.be_silent();
        assert!(silent.lines("refused").is_empty());
    }
}
