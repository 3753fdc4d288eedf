//! The cache of `huggingface_hub`, which `transformers` and `datasets` read too. This module uses no network.
//!
//! ```text
//! ROOT/models--OWNER--NAME/refs/main                    the commit that main was when it was fetched
//!                          snapshots/COMMIT/config.json -> ../../blobs/DIGEST
//!                          blobs/DIGEST                 a file, by its SHA-256 or by git's SHA-1
//!                          blobs/DIGEST.incomplete      a part of it
//!                          trees/COMMIT.json            all files of a commit; huggingface_hub writes it
//! ROOT/.locks/models--OWNER--NAME/DIGEST.lock           held by the process that fetches it
//! ```

use std::fs;
#[cfg(feature = "network")]
use std::fs::File;
use std::io::{self, Write};
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};

use paceline_host::disk::Disk;
use serde_json::Value;

use super::name::{Name, is_commit};
#[cfg(feature = "network")]
use crate::download::http;

/// The most bytes of a commit in a file: 40 digits, with room for spaces.
const MAX_REFERENCE_BYTES: u64 = 256;
/// The most bytes of the list of a revision's files, as from the Hub itself.
const MAX_LISTING_BYTES: u64 = 64 << 20;
/// The mark of folders that need no backup (https://bford.info/cachedir/).
const CACHE_TAG: &str = "Signature: 8a477f597d28d172789f06886806bc55\n\
    # This file is a cache directory tag created by paceline.\n";

#[derive(Clone, Debug)]
pub(super) struct Cache {
    root: PathBuf,
    disk: Disk,
}

#[derive(Clone, Debug)]
pub(super) struct Snapshot {
    pub folder: PathBuf,
    pub commit: String,
}

impl Cache {
    /// The cache of `huggingface_hub`'s variables.
    pub fn from_vars(var: impl Fn(&str) -> Option<String>) -> Result<Self, String> {
        let stated = ["HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE"].into_iter().find_map(&var);
        let root = match stated {
            Some(root) => Some(in_home(&root, &var)),
            None => home(&var).map(|home| home.join("hub")),
        };
        root.map(|root| Self { root, disk: Disk::default() }).ok_or_else(|| {
            "there is no cache of Hugging Face, because neither HOME nor HF_HOME is set; set HF_HOME to a folder"
                .into()
        })
    }

    /// The folder of a model or a data set.
    pub fn folder(&self, name: &Name) -> PathBuf {
        self.root.join(folder_name(name))
    }

    /// The snapshot of a name at its revision, if it is there.
    pub fn snapshot(&self, name: &Name) -> Option<Snapshot> {
        let commit = if is_commit(&name.revision) {
            name.revision.clone()
        } else {
            let text = paceline_files::read_text(&self.reference(name), MAX_REFERENCE_BYTES);
            text.ok()?.trim().to_owned()
        };
        let folder = self.snapshot_folder(name, &commit);
        (is_commit(&commit) && folder.is_dir()).then_some(Snapshot { folder, commit })
    }

    /// The files of a commit on the Hub, if `huggingface_hub` has noted them.
    pub fn listed(&self, name: &Name, commit: &str) -> Option<Vec<String>> {
        let path = self.folder(name).join("trees").join(format!("{commit}.json"));
        let json: Value =
            serde_json::from_slice(&paceline_files::read(&path, MAX_LISTING_BYTES).ok()?).ok()?;
        Some(json["files"].as_object()?.keys().cloned().collect())
    }

    /// The file that has the commit of a name's revision.
    pub fn reference(&self, name: &Name) -> PathBuf {
        self.folder(name).join("refs").join(&name.revision)
    }

    /// The folder that shows the files of a commit under their names.
    pub fn snapshot_folder(&self, name: &Name, commit: &str) -> PathBuf {
        self.folder(name).join("snapshots").join(commit)
    }

    /// A file by its digest.
    pub fn blob(&self, name: &Name, digest: &str) -> PathBuf {
        self.folder(name).join("blobs").join(digest)
    }

    /// A file by its digest, until it is complete.
    pub fn incomplete(&self, name: &Name, digest: &str) -> PathBuf {
        self.folder(name).join("blobs").join(format!("{digest}.incomplete"))
    }

    /// Makes the folders that blobs and locks need.
    pub fn prepare(&self, name: &Name) -> io::Result<()> {
        fs::create_dir_all(self.folder(name).join("blobs"))?;
        fs::create_dir_all(self.locks(name))?;
        let tag = self.root.join("CACHEDIR.TAG");
        if tag.exists() {
            Ok(())
        } else {
            paceline_files::create(&tag)?.write_all(CACHE_TAG.as_ref())
        }
    }

    #[cfg(feature = "network")]
    /// Locks a file, also against `huggingface_hub`. Calls `waits` before it waits for another process.
    pub fn lock(&self, name: &Name, digest: &str, waits: impl Fn()) -> io::Result<File> {
        http::locked(&self.locks(name).join(format!("{digest}.lock")), waits)
    }

    /// Links a file into the snapshot of a commit. [`is_inner_path`] has checked `path`.
    pub fn link(&self, name: &Name, commit: &str, path: &str, digest: &str) -> io::Result<()> {
        let link = self.snapshot_folder(name, commit).join(path);
        // Out of the snapshot's folders, COMMIT and snapshots.
        let up = "../".repeat(path.split('/').count() + 1);
        let target = PathBuf::from(format!("{up}blobs/{digest}"));
        if fs::read_link(&link).is_ok_and(|there| there == target) {
            return Ok(());
        }
        self.replace(&link, |new| symlink(&target, new))
    }

    /// Notes which commit a revision is, from when on the name is found, even after a power cut.
    pub fn write_reference(&self, name: &Name, commit: &str) -> io::Result<()> {
        let path = self.reference(name);
        let is_noted = || {
            let noted = paceline_files::read_text(&path, MAX_REFERENCE_BYTES);
            noted.is_ok_and(|there| there == commit)
        };
        if name.revision == commit || is_noted() {
            return Ok(());
        }
        self.replace(&path, |new| {
            let mut file = self.disk.create(new)?;
            file.write_all(commit.as_bytes())?;
            file.sync()
        })
    }

    /// Makes a file under a name of this process, since several may fetch the same model, then renames it, so that
    /// nobody sees a part of it.
    fn replace(&self, path: &Path, make: impl FnOnce(&Path) -> io::Result<()>) -> io::Result<()> {
        let folder = path.parent().unwrap_or(Path::new("/"));
        self.disk.create_folder_safely(folder)?;
        let mut new = path.as_os_str().to_owned();
        new.push(format!(".{}.tmp", std::process::id()));
        let new = PathBuf::from(new);
        // A killed process with the same number may have left it.
        let _ = fs::remove_file(&new);
        let made = make(&new).and_then(|()| self.disk.rename(&new, path));
        if made.is_err() {
            let _ = fs::remove_file(&new);
        }
        made.and_then(|()| self.disk.sync_folder(folder))
    }

    fn locks(&self, name: &Name) -> PathBuf {
        self.root.join(".locks").join(folder_name(name))
    }
}

/// Hugging Face's folder, with the default cache and the user's token.
pub(super) fn home(var: &impl Fn(&str) -> Option<String>) -> Option<PathBuf> {
    match var("HF_HOME") {
        Some(home) => Some(in_home(&home, var)),
        None => user_cache(var).map(|cache| cache.join("huggingface")),
    }
}

/// The folder of the caches of this user.
pub(super) fn user_cache(var: &impl Fn(&str) -> Option<String>) -> Option<PathBuf> {
    match var("XDG_CACHE_HOME") {
        Some(cache) => Some(in_home(&cache, var)),
        None => var("HOME").map(|home| Path::new(&home).join(".cache")),
    }
}

/// A variable that is not empty.
pub(super) fn variable(name: &str) -> Option<String> {
    std::env::var(name).ok().filter(|value| !value.is_empty())
}

/// Whether a variable means yes to `huggingface_hub`.
pub(super) fn is_yes(value: Option<String>) -> bool {
    value.is_some_and(|value| ["1", "ON", "YES", "TRUE"].contains(&&*value.to_ascii_uppercase()))
}

/// Whether an untrusted path stays within the folder that it is joined to.
pub(super) fn is_inner_path(path: &str) -> bool {
    !path.contains('\0') && path.split('/').all(|part| !["", ".", ".."].contains(&part))
}

/// A path with `~` resolved.
fn in_home(path: &str, var: &impl Fn(&str) -> Option<String>) -> PathBuf {
    match (path.strip_prefix('~'), var("HOME")) {
        (Some(rest), Some(home)) if rest.is_empty() || rest.starts_with('/') => {
            (home + rest).into()
        }
        _ => path.into(),
    }
}

fn folder_name(name: &Name) -> String {
    format!("{}--{}", name.kind.plural(), name.path.replace('/', "--"))
}

#[cfg(test)]
mod tests {
    use super::super::name::Kind;
    use super::*;
    use paceline_host::disk::power_cut::{LastingNames, ModelDisk, Unsynced};

    fn root(vars: &[(&str, &str)]) -> Option<String> {
        let var = |name: &str| {
            vars.iter().find(|(known, _)| *known == name).map(|(_, value)| (*value).to_owned())
        };
        Cache::from_vars(var).ok().map(|cache| cache.root.display().to_string())
    }

    #[test]
    fn the_variables_have_the_order_of_huggingface_hub() {
        let mut vars = vec![
            ("HF_HUB_CACHE", "/a"),
            ("HUGGINGFACE_HUB_CACHE", "/b"),
            ("HF_HOME", "/c"),
            ("XDG_CACHE_HOME", "/d"),
            ("HOME", "/e"),
        ];
        for expected in ["/a", "/b", "/c/hub", "/d/huggingface/hub", "/e/.cache/huggingface/hub"] {
            assert_eq!(root(&vars).as_deref(), Some(expected));
            vars.remove(0);
        }
        assert_eq!(root(&vars), None);
        assert_eq!(root(&[("HF_HUB_CACHE", "~/x"), ("HOME", "/e")]).unwrap(), "/e/x");
        assert_eq!(root(&[("HF_HOME", "~other"), ("HOME", "/e")]).unwrap(), "~other/hub");
    }

    #[test]
    fn snapshots_are_found_by_branch_and_by_commit() {
        let folder = tempfile::TempDir::new().unwrap();
        let cache = Cache { root: folder.path().to_owned(), disk: Disk::default() };
        let name = Name::parse(Kind::Data, "a/b").unwrap();
        let commit = "0123456789abcdef0123456789abcdef01234567";
        assert!(cache.snapshot(&name).is_none());
        cache.link(&name, commit, "sub/train.csv", "d1").unwrap();
        let link = folder.path().join(format!("datasets--a--b/snapshots/{commit}/sub/train.csv"));
        assert_eq!(fs::read_link(link).unwrap(), Path::new("../../../blobs/d1"));
        assert!(cache.snapshot(&name).is_none(), "no revision is known yet");
        cache.write_reference(&name, commit).unwrap();
        assert_eq!(cache.snapshot(&name).unwrap().commit, commit);
        // As an editor may leave it.
        fs::write(cache.reference(&name), format!("{commit}\n")).unwrap();
        assert_eq!(cache.snapshot(&name).unwrap().commit, commit);
        assert!(cache.snapshot(&name.clone().at(commit).unwrap()).is_some());
        fs::write(cache.reference(&name), "../../..").unwrap();
        assert!(cache.snapshot(&name).is_none());
        assert!(cache.snapshot(&name.at("v1").unwrap()).is_none());
    }

    #[test]
    fn a_power_cut_leaves_no_reference_or_a_whole_one() {
        let folder = tempfile::TempDir::new().unwrap();
        let cache = Cache { root: folder.path().to_owned(), disk: Disk::recorded() };
        let name = Name::parse(Kind::Model, "a/b").unwrap();
        let commits = ["0123456789abcdef0123456789abcdef01234567", &"f".repeat(40)];
        fs::create_dir_all(cache.folder(&name)).unwrap();
        let mut model = ModelDisk::new(&cache.folder(&name));
        let mut num_states = 0;
        for (at, commit) in commits.into_iter().enumerate() {
            let before = at.checked_sub(1).map(|at| commits[at].to_owned());
            let num_done = cache.disk.operations().len();
            cache.write_reference(&name, commit).unwrap();
            let operations = cache.disk.operations();
            for (at, operation) in operations.iter().enumerate().skip(num_done) {
                model.apply(operation);
                let is_done = at + 1 == operations.len();
                let num_names = model.num_unsynced_names();
                let first = (0..=num_names).map(LastingNames::First);
                for names in first.chain((1..=num_names).map(LastingNames::AllBut)) {
                    for data in Unsynced::ALL {
                        let left = tempfile::TempDir::new().unwrap();
                        model.leave(left.path(), data, names);
                        num_states += 1;
                        let found = fs::read_to_string(left.path().join("refs/main")).ok();
                        let is_new = found.as_deref() == Some(commit);
                        assert!(
                            is_new || (!is_done && found == before),
                            "after {operation:?} with {data:?} and {names:?}: {found:?}"
                        );
                    }
                }
            }
        }
        assert!(num_states > 40, "{num_states}");
    }

    #[test]
    fn paths_of_others_stay_inside() {
        for path in ["a", "a/b.c", ".gitattributes", "a b/c"] {
            assert!(is_inner_path(path), "{path}");
        }
        for path in ["", "/a", "../a", "a/../b", "./a", "a/./b", "a//b", "a/", "."] {
            assert!(!is_inner_path(path), "{path}");
        }
    }
}
