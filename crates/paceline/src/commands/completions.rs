//! `paceline completions`: the script with which a shell completes commands, flags and the names of values.

use clap::{Args, Command, CommandFactory};
use clap_complete::Shell;
use paceline_failure::Result;
use paceline_host::text::say_unbroken;

use crate::cli::Cli;

const EXAMPLES: &str = "\
Examples:
  paceline completions bash > ~/.local/share/bash-completion/completions/paceline
  paceline completions zsh > ~/.zfunc/_paceline       with ~/.zfunc in fpath
  paceline completions fish > ~/.config/fish/completions/paceline.fish
";

/// Flags of `paceline completions`.
#[derive(Debug, Args)]
#[command(before_help = EXAMPLES)]
pub struct CompletionsArgs {
    /// The shell
    #[arg(value_enum)]
    pub shell: Shell,
}

/// Runs `paceline completions`. A program with another name gets a script for that name.
pub fn completions(args: &CompletionsArgs) -> Result<u8> {
    // Commands that only the launcher calls are left out.
    let program = Cli::command();
    let offered = program.get_subcommands().filter(|part| !part.is_hide_set());
    let mut command = Command::new("paceline").subcommands(offered.cloned());
    let own = std::env::current_exe().ok();
    let own = own.as_deref().and_then(|path| path.file_name()?.to_str());
    let is_word = |c: char| c.is_ascii_alphanumeric() || "_-".contains(c);
    let name =
        own.filter(|name| name.chars().all(is_word)).unwrap_or(command.get_name()).to_owned();
    let mut script = Vec::new();
    clap_complete::generate(args.shell, &mut command, name, &mut script);
    String::from_utf8_lossy(&script).lines().for_each(say_unbroken);
    Ok(0)
}
