//! `RUST_LOG`: the events of the libraries on standard error.
//!
//! Other programs that use the libraries choose a subscriber of their own. Lines go through the stream of the program, so they
//! leave the progress bar whole, and the text of others sends no escape sequences to the terminal.

use std::ffi::OsString;
use std::io::{self, Write};

use paceline_host::streams;
use paceline_host::text::warn;
use paceline_launch::environment;
use tracing_subscriber::filter::Targets;
use tracing_subscriber::prelude::*;

const VARIABLE: &str = "RUST_LOG";

/// Logs from now on as far as the variable asks for it. Without it, no event costs more than a comparison. The words are those of
/// this process: of all processes of a run, the first one says that the variable cannot be read, unless it is to be quiet.
pub fn start(words: &[OsString]) {
    let stated = std::env::var(VARIABLE).unwrap_or_default();
    if stated.is_empty() {
        return;
    }
    match stated.parse::<Targets>() {
        Ok(targets) => {
            let lines = tracing_subscriber::fmt::layer().with_ansi(false).with_writer(|| Lines);
            // A program that has a subscriber of its own keeps it.
            let _ = tracing_subscriber::registry().with(lines.with_filter(targets)).try_init();
        }
        Err(error) => {
            let place = environment::read(|name| std::env::var_os(name)).ok().flatten();
            let is_first = place.is_none_or(|of| of.place.rank == 0 && !of.is_of_paceline());
            let mut own = words.iter().take_while(|word| *word != "--");
            if is_first && !own.any(|word| word == "--quiet" || word == "--quiet=true") {
                warn(&format!(
                    "{VARIABLE}: {error}; nothing is logged; pass a target and a level, such as paceline=debug"
                ));
            }
        }
    }
}

/// Writes each event as a line.
struct Lines;

impl Write for Lines {
    fn write(&mut self, line: &[u8]) -> io::Result<usize> {
        streams::stderr().unbroken(String::from_utf8_lossy(line).trim_end());
        Ok(line.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}
