//! A file to which a line or a record is added while the run goes on, at once for programs that follow the file.
//!
//! If a write fails, the run goes on, the file ends with the last whole line or record, and the report of the rank says so.

use std::io::Write;
use std::path::PathBuf;

use paceline_failure::{Failure, Result};
use paceline_files::Printable;
use paceline_host::disk::{Disk, DiskFile};

use crate::record::rank_report::do_without;

/// The open file.
#[derive(Debug)]
pub(super) struct Appended {
    pub(super) path: PathBuf,
    /// `None` after a write has failed: what comes later would hide that others are missing.
    file: Option<DiskFile>,
    /// The bytes of whole lines or records.
    len_bytes: u64,
    /// Why the file ends early.
    pub(super) missing: Option<String>,
}

impl Appended {
    /// Makes the file, which begins with these bytes. Goes on with one that is there: another rank 0 of the same run has begun it.
    ///
    /// # Errors
    ///
    /// If this fails at the start of the run, when nothing is lost yet.
    pub(super) fn create(disk: &Disk, path: PathBuf, begin: &[u8]) -> Result<Self> {
        let create = || {
            let mut file = disk.open_or_create(&path)?;
            let mut len_bytes = file.go_to_end()?;
            if len_bytes == 0 && !begin.is_empty() {
                file.write_all(begin)?;
                len_bytes = begin.len() as u64;
            }
            std::io::Result::Ok((file, len_bytes))
        };
        let (file, len_bytes) =
            create().map_err(|e| Failure::io(format!("cannot write {}", path.printable()), e))?;
        Ok(Self { path, file: Some(file), len_bytes, missing: None })
    }

    /// Adds a line or a record in one write. If the disk takes only a part of it, that part is removed again. `what` names
    /// all that is missing from here on.
    pub(super) fn add(&mut self, bytes: &[u8], what: &str) {
        let Some(file) = &mut self.file else { return };
        let Err(error) = file.write_all(bytes) else {
            self.len_bytes += bytes.len() as u64;
            return;
        };
        // Making a file shorter takes no room. A disk that refuses even that leaves a part of it.
        let _ = file.cut(self.len_bytes);
        self.missing = Some(do_without(&format!("{what} {}", self.path.printable()), &error));
        self.file = None;
    }
}
