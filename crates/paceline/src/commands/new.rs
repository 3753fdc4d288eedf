//! `paceline new`: a small project with a model, a data set and a strategy of its own.
//!
//! Input: the name of a folder that does not exist yet. Output: the folder, with the files of a cargo project that depends on
//! `paceline`. The code of the project is the example `template`, so it is built and tested with everything else.

use std::fs;
use std::io::ErrorKind;
use std::path::{Path, PathBuf};

use clap::Args;
use paceline_failure::outputs::write_bytes;
use paceline_failure::{Failure, Result};
use paceline_files::{Printable, printable};
use paceline_host::disk::Disk;
use paceline_host::text::say;

/// The code of the project.
const MAIN: &str = include_str!("../../examples/template/main.rs");

/// How the crates that compute are built.
const PROFILES: &str = "\
# What computes steps is optimized in a debug build too: otherwise steps take up to a hundred times as long. The loops of layers are
# compiled with this project. Without `incremental`, Cargo keeps half as much on the disk.
[profile.dev]
incremental = false
opt-level = 2

[profile.dev.package]
paceline-collectives = { opt-level = 2, debug = false }
paceline-data = { opt-level = 2, debug = false }
paceline-kernels = { opt-level = 2, debug = false }
paceline-memory = { opt-level = 2, debug = false }
paceline-model = { opt-level = 2, debug = false }
paceline-numeric = { opt-level = 2, debug = false }
paceline-strategies = { opt-level = 2, debug = false }
\"*\" = { opt-level = 0, debug = false }
";

/// The commands of the project.
const README: &str = "\
A model, a data set and a strategy of one's own, in `src/main.rs`, with the command line of paceline:

    cargo test                                  # finite differences check the gradients of the layer
    cargo run --release -- train --model scaled_net --data circle --strategy one_reduce --epochs 4 --lr 0.1 --momentum 0.9 --nproc 2 --evaluate
    cargo run --release -- train --help         # lists them

Without text, images, Parquet and downloads it compiles 80 crates less: in `Cargo.toml`, add
`default-features = false, features = [\"cli\", \"cuda\"]` to the dependency.
";

/// The folder of this crate when the program was built.
const BUILT_FROM: &str = env!("CARGO_MANIFEST_DIR");

/// The most bytes of a manifest, which has a few thousand.
const MAX_MANIFEST_BYTES: u64 = 1 << 20;

/// The most letters of a name, as registries of packages have it.
const MAX_NAME: usize = 64;

/// Names that cargo or Rust need for something else, and that of the project's dependency.
const RESERVED: &str = "paceline abstract alloc as async await become box break build const continue core crate deps do dyn \
    else enum examples extern false final fn for gen if impl in incremental let loop macro match mod move mut override priv \
    proc_macro proc-macro pub ref return self static std struct super test trait true try type typeof unsafe unsized use \
    virtual where while yield";

const EXAMPLES: &str = "\
Examples:
  paceline new my-project
  paceline new my-project --path ~/paceline           the sources in this folder
  paceline new my-project --git https://example.com/paceline
";

/// Flags of `paceline new`.
#[derive(Debug, Args)]
#[command(before_help = EXAMPLES)]
pub struct NewArgs {
    /// Folder to make; its name is that of the project
    #[arg(value_name = "FOLDER")]
    pub folder: PathBuf,
    /// Depend on the sources of paceline in this folder [default: those that this program was built from]
    #[arg(long, value_name = "DIR", conflicts_with = "git")]
    pub path: Option<PathBuf>,
    /// Depend on this git repository of paceline
    #[arg(long, value_name = "URL")]
    pub git: Option<String>,
}

/// Runs `paceline new`.
///
/// # Errors
///
/// If the name cannot be that of a package, if something stands at the folder's place, or if there are no sources of
/// paceline.
pub fn new(args: &NewArgs) -> Result<u8> {
    let NewArgs { folder, path, git } = args;
    let name = name(folder)?;
    let dependency = match (path, git) {
        (Some(path), _) => of_path(&crate_in(path)?)?,
        (None, Some(url)) => of_git(url)?,
        (None, None) => built_from(Path::new(BUILT_FROM))?,
    };
    let shown = folder.printable();
    let disk = Disk::default();
    disk.create_new_folder(folder).map_err(|error| {
        Failure::Usage(match error.kind() {
            ErrorKind::AlreadyExists => format!("{shown} is there already; pass another name"),
            ErrorKind::NotFound => format!("{shown}: the folder above it does not exist"),
            _ => format!("{shown}: {error}; pass a folder that you can make"),
        })
    })?;
    write(&disk, folder, name, &dependency).inspect_err(|_| {
        // Half a project is useless, and its name would be taken.
        let _ = fs::remove_dir_all(folder);
    })?;
    say(&format!(
        "{shown}/ has a model, a data set and a strategy of its own, in src/main.rs. Go on with:"
    ));
    say(&format!("  cd {shown}"));
    say("  cargo test      # finite differences check the gradients of the layer");
    say(
        "  cargo run --release -- train --model scaled_net --data circle --strategy one_reduce --epochs 4 --lr 0.1 --momentum 0.9 --nproc 2 --evaluate",
    );
    Ok(0)
}

fn write(disk: &Disk, folder: &Path, name: &str, dependency: &str) -> Result<()> {
    let manifest = format!(
        "[package]\nname = \"{name}\"\nversion = \"0.1.0\"\nedition = \"2024\"\n\n[dependencies]\n{dependency}\n\n\
         # So that this project belongs to no workspace above its folder.\n[workspace]\n\n{PROFILES}"
    );
    let source = folder.join("src");
    disk.create_new_folder(&source).map_err(|error| Failure::io(source.printable(), error))?;
    write_bytes(disk, &folder.join("Cargo.toml"), manifest.as_bytes())?;
    write_bytes(disk, &folder.join(".gitignore"), b"/target\n/runs\n")?;
    write_bytes(disk, &folder.join("README.md"), format!("# {name}\n\n{README}").as_bytes())?;
    write_bytes(disk, &source.join("main.rs"), MAIN.as_bytes())
}

/// The name of the project: the last part of its folder.
fn name(folder: &Path) -> Result<&str> {
    let name = folder.file_name().and_then(|name| name.to_str()).unwrap_or_default();
    let is_word = |c: char| c.is_ascii_alphanumeric() || "_-".contains(c);
    let is_name = name.starts_with(|c: char| c.is_ascii_alphabetic()) && name.chars().all(is_word);
    let shown = folder.printable();
    let problem = if !is_name || name.len() > MAX_NAME {
        format!(
            "{shown}: a project's name has up to {MAX_NAME} letters, digits, _ and -, and begins with a letter"
        )
    } else if RESERVED.split_whitespace().any(|word| word == name) {
        format!("{shown}: {name} is a name that Rust, cargo or the project's dependency has")
    } else {
        return Ok(name);
    };
    Err(Failure::Usage(format!("{problem}; pass another name")))
}

/// The folder of the crate `paceline` in a folder: the folder itself, or the crate in the repository.
fn crate_in(folder: &Path) -> Result<PathBuf> {
    let shown = folder.printable();
    let found =
        [folder.to_owned(), folder.join("crates/paceline")].into_iter().find(|of| is_crate(of));
    let found = found.and_then(|of| of.canonicalize().ok());
    found.ok_or_else(|| {
        Failure::Usage(format!(
            "--path {shown}: the sources of paceline are not there; pass a folder that has crates/paceline/Cargo.toml"
        ))
    })
}

/// Whether a folder has the manifest of the crate `paceline`.
fn is_crate(folder: &Path) -> bool {
    let text = paceline_files::read_text(&folder.join("Cargo.toml"), MAX_MANIFEST_BYTES);
    let manifest = text.ok().and_then(|text| text.parse::<toml::Table>().ok());
    manifest.is_some_and(|manifest| {
        let name = manifest.get("package").and_then(|package| package.get("name"));
        name.and_then(toml::Value::as_str) == Some(env!("CARGO_PKG_NAME"))
    })
}

/// The sources that this program was built from, if they are still there and stay.
fn built_from(folder: &Path) -> Result<String> {
    let shown = folder.printable();
    let fix =
        "pass --git URL, the repository of paceline, or --path DIR, a folder with its sources";
    // Cargo may at any time remove files that it fetched.
    if folder.to_str().is_some_and(|path| path.contains("/git/checkouts/")) {
        return Err(Failure::Usage(format!(
            "cargo built this program from a repository that it fetched into {shown}, which may go; {fix}"
        )));
    }
    if !is_crate(folder) {
        return Err(Failure::Usage(format!(
            "the sources that this program was built from are no longer in {shown}; {fix}"
        )));
    }
    of_path(folder)
}

fn of_path(folder: &Path) -> Result<String> {
    let path = folder.to_str().ok_or_else(|| {
        let shown = folder.printable();
        Failure::Usage(format!("{shown}: this is not valid UTF-8, so Cargo.toml could not hold it"))
    })?;
    let path = toml::Value::from(path);
    Ok(format!(
        "# The sources of paceline on this machine. For other machines write: paceline = {{ git = \"its repository\" }}\n\
         paceline = {{ path = {path} }}"
    ))
}

fn of_git(url: &str) -> Result<String> {
    let is_url =
        ["https://", "http://", "ssh://", "git://", "file://"].iter().any(|of| url.starts_with(of));
    if !is_url || url.chars().any(|c| c.is_control() || c.is_whitespace()) {
        let shown = printable(url);
        return Err(Failure::Usage(format!(
            "--git {shown}: pass the address of a repository, such as https://example.com/paceline"
        )));
    }
    let url = toml::Value::from(url);
    Ok(format!(
        "# Cargo.lock keeps the revision; `cargo update -p paceline` takes the newest one.\n\
         paceline = {{ git = {url} }}"
    ))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sources_that_may_go_are_no_default() {
        let said = |path: &str| built_from(Path::new(path)).unwrap_err().to_string();
        let fetched = said("/home/user/.cargo/git/checkouts/paceline-1a2b/3c4d/crates/paceline");
        assert!(fetched.contains("may go") && fetched.contains("--git URL"), "{fetched}");
        let gone = said("/there/is/no/such/folder");
        assert!(gone.contains("no longer in /there/is/no/such/folder"), "{gone}");
        assert!(built_from(Path::new(BUILT_FROM)).unwrap().contains(BUILT_FROM));
    }

    #[test]
    fn any_path_can_stand_in_a_manifest() {
        for path in ["/a b/\"c\"/d", "/a\\b", "/a\n[workspace]\nb", "/it's"] {
            let table: toml::Table = of_path(Path::new(path)).unwrap().parse().unwrap();
            assert_eq!(table["paceline"]["path"].as_str(), Some(path));
        }
    }

    #[test]
    fn the_project_is_short() {
        let is_code = |line: &&str| !line.trim().is_empty() && !line.trim().starts_with("//");
        let lines = MAIN.lines().filter(is_code).count();
        assert!(lines < 120, "{lines} lines of code");
    }
}
