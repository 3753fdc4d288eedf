//! The files that commands write. Commands check before any work starts that their files can be written.
//! The charts and JSON files of all commands are written here.

use std::path::{Path, PathBuf};

use paceline_analysis::plot::{LineChart, PlotError};
use serde::Serialize;

use crate::{Failure, Result};

/// Checks that the file that `flag` names can be created. Leaves nothing behind.
pub fn check_file(flag: &str, file: &Path) -> Result<()> {
    let usage = |problem: &str| Err(Failure::Usage(format!("{flag} {}{problem}", file.display())));
    if file.is_dir() {
        return usage(" is a folder; pass a file");
    }
    let folder = match file.parent() {
        Some(parent) if parent != Path::new("") => parent,
        _ => Path::new("."),
    };
    if !folder.is_dir() {
        return usage(": its folder does not exist");
    }
    check_folder(flag, folder, "pass a file that you can write to")
}

/// Checks that the files that flags name, and a folder for charts, can be created.
pub fn check_outputs(files: &[(&str, &Option<PathBuf>)], charts: Option<&Path>) -> Result<()> {
    for (flag, file) in files {
        file.as_deref().map_or(Ok(()), |file| check_file(flag, file))?;
    }
    charts.map_or(Ok(()), |folder| {
        check_folder("--charts", folder, "pass a folder that you can write to")
    })
}

/// Writes each chart as `name.png` and `name.svg` into `folder`, which is created if it does not exist.
/// Returns the paths.
pub fn write_charts(folder: &Path, charts: &[(String, LineChart)]) -> Result<Vec<PathBuf>> {
    std::fs::create_dir_all(folder)
        .map_err(|error| Failure::io(format!("cannot make {}", folder.display()), error))?;
    let mut written = Vec::new();
    for (name, chart) in charts {
        let failed = |error: PlotError| Failure::Run(error.to_string());
        let (png, svg) = (folder.join(format!("{name}.png")), folder.join(format!("{name}.svg")));
        chart.write_png(&png).map_err(failed)?;
        chart.write_svg(&svg).map_err(failed)?;
        written.extend([png, svg]);
    }
    Ok(written)
}

/// Checks that files can be created in `folder`, or in its nearest ancestor that exists. `fix` is the
/// advice in the error message. Leaves nothing behind.
pub fn check_folder(what: &str, folder: &Path, fix: &str) -> Result<()> {
    let absolute = std::path::absolute(folder)
        .map_err(|e| Failure::Usage(format!("{what} {}: {e}", folder.display())))?;
    let existing = absolute.ancestors().find(|path| path.exists()).unwrap_or(Path::new("/"));
    let probe = existing.join(format!(".paceline-probe-{}", std::process::id()));
    let written = if existing.is_dir() {
        std::fs::write(&probe, b"").and_then(|()| std::fs::remove_file(&probe))
    } else {
        Err(std::io::ErrorKind::NotADirectory.into())
    };
    written.map_err(|e| {
        let (folder, existing) = (folder.display(), existing.display());
        Failure::Usage(format!("{what} {folder}: cannot write to {existing} ({e}); {fix}"))
    })
}

/// Writes `value` as indented JSON.
pub fn write_json(path: &Path, value: &impl Serialize) -> Result<()> {
    let fail =
        |e: &dyn std::fmt::Display| Failure::io(format!("cannot write {}", path.display()), e);
    let mut text = serde_json::to_string_pretty(value).map_err(|e| fail(&e))?;
    text.push('\n');
    std::fs::write(path, text).map_err(|e| fail(&e))
}
