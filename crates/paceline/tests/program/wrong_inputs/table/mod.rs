//! The command lines that are wrong. `\xff` is a byte, and single quotes hold a word together.

mod commands;
mod train;
mod words;

/// A title, the command, and what follows it.
pub type Table = (&'static str, &'static str, &'static [&'static str]);

/// All of them.
pub fn tables() -> impl Iterator<Item = &'static Table> {
    [words::TABLES, train::TABLES, commands::TABLES].into_iter().flatten()
}
