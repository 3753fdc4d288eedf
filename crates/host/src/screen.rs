//! The terminal of a stream: how wide it is, and whether a line can be drawn over.
//!
//! Everything that is printed for people follows one rule:
//!
//! - A table fits COLUMNS, or else the terminal, or else [`UNKNOWN_WIDTH`].
//! - A sentence fits COLUMNS or the terminal as well. In a pipe or a file it stays one line, for programs such as `grep`.
//! - A line is drawn again only on a terminal that somebody looks at: ranks of `mpirun` print plain lines, because their
//!   standard output is a terminal even if that of `mpirun` is a file.

use std::env;
use std::ffi::OsString;
use std::os::fd::BorrowedFd;

use rustix::termios::{isatty, tcgetwinsize};

/// The width of tables if no terminal states its own.
const UNKNOWN_WIDTH: usize = 80;

/// Moves the cursor to the start of its line, and erases from there to the end of the screen, also what a narrower terminal
/// has broken off.
pub const ERASE: &str = "\r\x1b[J";

/// The variables that Open MPI and PRRTE, MPICH and others set for each of their ranks.
const OF_MPI: [&str; 3] = ["OMPI_COMM_WORLD_RANK", "PMIX_RANK", "PMI_RANK"];

/// How many characters a line of a table may have.
pub fn width_of_table(fd: BorrowedFd<'_>) -> usize {
    width_of_text(fd).unwrap_or(UNKNOWN_WIDTH)
}

/// How many characters a line of a sentence may have, if there is a limit.
pub fn width_of_text(fd: BorrowedFd<'_>) -> Option<usize> {
    width(fd, env::var_os("COLUMNS"))
}

/// The width of the terminal, if a line can be drawn again.
pub fn width_of_bar(fd: BorrowedFd<'_>) -> Option<usize> {
    let can_redraw = env::var_os("TERM").is_none_or(|term| term != "dumb");
    (can_redraw && is_watched(fd)).then(|| width_of_terminal(fd))
}

fn width(fd: BorrowedFd<'_>, columns: Option<OsString>) -> Option<usize> {
    // COLUMNS, if it is a width.
    let stated = columns.and_then(|columns| columns.to_str()?.parse().ok());
    let stated = stated.filter(|width| *width > 0);
    stated.or_else(|| is_watched(fd).then(|| width_of_terminal(fd)))
}

/// Whether somebody looks at a terminal there.
fn is_watched(fd: BorrowedFd<'_>) -> bool {
    isatty(fd) && OF_MPI.iter().all(|name| env::var_os(name).is_none())
}

fn width_of_terminal(fd: BorrowedFd<'_>) -> usize {
    let columns = tcgetwinsize(fd).map_or(0, |size| usize::from(size.ws_col));
    if columns > 0 { columns } else { UNKNOWN_WIDTH }
}

#[cfg(test)]
mod tests {
    use std::fs::File;
    use std::os::fd::AsFd;

    use super::*;

    #[test]
    fn only_columns_limit_the_sentences_of_a_file() {
        let file = File::open("/dev/null").unwrap();
        let with = |columns: &str| width(file.as_fd(), Some(columns.into()));
        assert_eq!(with("100"), Some(100));
        assert_eq!([with(""), with("0"), with("wide"), with("-1")], [None; 4]);
        assert_eq!(width(file.as_fd(), None), None);
        assert_eq!(width_of_bar(file.as_fd()), None);
    }
}
