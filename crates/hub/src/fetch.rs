//! Fetches the needed files of a model or a data set into the cache.

use std::path::Path;

use paceline_data::text::TextFormat;
use paceline_failure::{Failure, Result};
use paceline_files::Printable;
use paceline_host::text::{plural, say, say_unbroken, warn};
use paceline_model::pretrained::{CONFIG_FILE, WEIGHTS_FILE, WEIGHTS_INDEX_FILE};
use rustix::fs::statvfs;

use super::blob::Fetcher;
use super::cache::{Cache, Snapshot, is_yes, variable};
use super::lookup::{Wanted, parts};
use super::name::{Kind, Name};
use super::remote::{Hub, Listing, RemoteFile, Trouble};

/// Small files of a model. Only the first one is in every model.
const OF_MODEL: [&str; 4] =
    [CONFIG_FILE, "generation_config.json", "tokenizer.json", "tokenizer_config.json"];
/// The card of a data set, which has its license.
const CARD: &str = "README.md";

/// Fetches the needed files of a model or a data set into the cache, at `revision` or its usual one, and says where they
/// are; with `quiet`, only that.
pub fn fetch(wanted: Wanted, named: &str, revision: Option<&str>, quiet: bool) -> Result<()> {
    let kind = wanted.kind();
    let [words, command] = kind.names();
    let command = format!("paceline fetch {command} {named}");
    let refused = |problem: String| Failure::Usage(format!("{command}: {problem}"));
    let Some(mut name) = Name::parse(kind, named) else {
        return Err(refused(format!(
            "this is no name of a {words} on the Hugging Face Hub; pass OWNER/NAME"
        )));
    };
    if let Some(revision) = revision {
        name = name.at(revision).ok_or_else(|| {
            Failure::Usage(format!("--revision {revision}: pass a branch, a tag or a commit"))
        })?;
    }
    let cache = Cache::from_vars(variable).map_err(refused)?;
    let fetched = match ["HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE"]
        .into_iter()
        .find(|name| is_yes(variable(name)))
    {
        Some(offline) => {
            Err(Trouble::Unreachable(format!("{offline} is set, so no network is used; unset it")))
        }
        None => {
            let hub = Hub::from_vars(variable).map_err(Failure::Usage)?;
            into_cache(&hub, &cache, &name, quiet)
        }
    };
    let is_whole =
        |there: &Snapshot| wanted.missing(there, cache.listed(&name, &there.commit)).is_none();
    let (snapshot, facts) = match (fetched, cache.snapshot(&name).filter(is_whole)) {
        (Ok(done), _) => done,
        (Err(Trouble::Refused(problem)), _) => return Err(refused(problem)),
        // As in `huggingface_hub`, files fetched before are used.
        (Err(Trouble::Unreachable(problem)), Some(snapshot)) => {
            warn(&format!("{problem}; the cache has what was fetched before, which may be older"));
            (snapshot, "in the cache already".to_owned())
        }
        (Err(Trouble::Unreachable(problem)), None) => {
            return Err(refused(format!("{problem}\n{}", by_hand(&cache, &name))));
        }
    };
    if !quiet {
        say(&format!("{name}, commit {}: {facts}", snapshot.commit));
    }
    say_unbroken(&snapshot.folder.display().to_string());
    if !quiet {
        used_by(&name).iter().for_each(|line| say(line));
    }
    Ok(())
}

/// Fetches the needed files that the cache lacks. Returns the snapshot and a report.
fn into_cache(
    hub: &Hub,
    cache: &Cache,
    name: &Name,
    quiet: bool,
) -> std::result::Result<(Snapshot, String), Trouble> {
    let Listing { commit, files: listed } = hub.listing(name)?;
    let mut files = needed(name.kind, &listed).map_err(Trouble::Refused)?;
    let folder = cache.folder(name);
    let write = |e: std::io::Error| {
        Trouble::Refused(format!("cannot write to {}: {e}", folder.printable()))
    };
    cache.prepare(name).map_err(write)?;
    let fetcher = Fetcher { hub, cache, name, commit: &commit, quiet };
    let mut fetched = 0;
    if let Some(index) = files.iter().find(|file| file.path == WEIGHTS_INDEX_FILE) {
        fetched += fetcher.obtain(index)?;
        let index = cache.blob(name, &index.digest);
        files.extend(parts_among(&listed, &index).map_err(Trouble::Refused)?);
    }
    let all_bytes = total_bytes(files.iter())?;
    check_space(&folder, total_bytes(files.iter().filter(|file| !fetcher.has(file)))?)?;
    for file in &files {
        fetched += fetcher.obtain(file)?;
    }
    // Only when all are there: a snapshot is also found by its commit.
    for file in &files {
        cache.link(name, &commit, &file.path, &file.digest).map_err(write)?;
    }
    // From now on the name is found, with all of its files.
    cache.write_reference(name, &commit).map_err(write)?;
    let facts = format!(
        "{}, {}, of which {} were fetched",
        plural(files.len(), "file"),
        megabytes(all_bytes),
        megabytes(fetched)
    );
    Ok((Snapshot { folder: cache.snapshot_folder(name, &commit), commit }, facts))
}

/// The parts of the weights among a model's files.
fn parts_among(
    listed: &[RemoteFile],
    index: &Path,
) -> std::result::Result<Vec<RemoteFile>, String> {
    let parts = parts(index).map_err(|problem| format!("its {WEIGHTS_INDEX_FILE} {problem}"))?;
    let part = |path: String| {
        let file = listed.iter().find(|file| file.path == path).cloned();
        file.ok_or_else(|| {
            format!(
                "its {WEIGHTS_INDEX_FILE} names {path}, which it does not have; choose another revision or model"
            )
        })
    };
    parts.into_iter().map(part).collect()
}

/// The files that are needed, without the parts that an index names. Fails without settings, weights or texts.
fn needed(kind: Kind, files: &[RemoteFile]) -> std::result::Result<Vec<RemoteFile>, String> {
    let has = |path: &str| files.iter().any(|file| file.path == path);
    let is_text = |path: &str| TextFormat::of_part(Path::new(path)).is_some();
    let weights = if has(WEIGHTS_FILE) { WEIGHTS_FILE } else { WEIGHTS_INDEX_FILE };
    let is_needed = |file: &&RemoteFile| match kind {
        Kind::Model => OF_MODEL.contains(&&*file.path) || file.path == weights,
        Kind::Data => is_text(&file.path) || file.path == CARD,
    };
    Err(match kind {
        Kind::Model if !has(CONFIG_FILE) => {
            format!("it has no {CONFIG_FILE}, so it is no model of transformers")
        }
        Kind::Model if !has(weights) => format!(
            "it has neither {WEIGHTS_FILE} nor {WEIGHTS_INDEX_FILE}, and other files of weights are not read; choose \
             another revision or model"
        ),
        Kind::Data if !files.iter().any(|file| is_text(&file.path)) => {
            format!("it has no {} files, and others are not read", TextFormat::of_parts())
        }
        _ => return Ok(files.iter().filter(is_needed).cloned().collect()),
    })
}

/// The bytes of these files. Fails on overflow: a list may state any size.
fn total_bytes<'a>(
    mut files: impl Iterator<Item = &'a RemoteFile>,
) -> std::result::Result<u64, Trouble> {
    let total = files.try_fold(0u64, |sum, file| sum.checked_add(file.num_bytes));
    total.ok_or_else(|| {
        Trouble::Refused(
            "the sizes that the list of its files states add up to more than any disk has; choose another \
             revision, or a server that states them right (HF_ENDPOINT)"
                .into(),
        )
    })
}

/// Fails if the files do not fit onto the disk.
fn check_space(folder: &Path, num_bytes: u64) -> std::result::Result<(), Trouble> {
    // If the system does not say, a write will fail.
    let Ok(disk) = statvfs(folder) else { return Ok(()) };
    let free = disk.f_bavail.saturating_mul(disk.f_frsize);
    if num_bytes <= free {
        return Ok(());
    }
    Err(Trouble::Refused(format!(
        "{} are to be fetched, and the disk of {} has {} left; make room, or set HF_HOME to a folder elsewhere",
        megabytes(num_bytes),
        folder.printable(),
        megabytes(free)
    )))
}

/// The files to put into place by hand if there is no network.
fn by_hand(cache: &Cache, name: &Name) -> String {
    let folder = cache.folder(name);
    let parts = format!("the train* and test* files ({})", TextFormat::of_parts());
    let (files, flags) = match name.kind {
        Kind::Model => (
            "config.json, tokenizer.json, generation_config.json and model.safetensors (or its index and parts)",
            "--pretrained DIR (paceline generate: --model DIR)",
        ),
        Kind::Data => (&*parts, "--data-dir DIR"),
    };
    format!(
        "Without a network there are two ways. Put {files} into any folder DIR, and pass {flags}. Or fetch {} on a \
         machine that has a network, and copy the whole folder {} from its cache to {}.",
        name.path,
        folder.file_name().unwrap_or_default().printable(),
        folder.printable()
    )
}

/// The commands that use the fetched files.
fn used_by(name: &Name) -> Vec<String> {
    let mut lines = match name.kind {
        Kind::Model => vec![
            format!("Use it: paceline generate --model {name} --prompt TEXT"),
            format!(
                "        paceline train --model llama --pretrained {name} --data text --data-dir DIR|NAME"
            ),
        ],
        Kind::Data => vec![format!(
            "Use it: paceline train --model llama --pretrained DIR|NAME --num-labels N --data text --data-dir {name}"
        )],
    };
    if name.alias().is_some() && name.revision == super::name::MAIN {
        lines.push("        paceline train --recipe smollm2-yelp".into());
    }
    lines
}

fn megabytes(num_bytes: u64) -> String {
    format!("{:.1} MB", num_bytes as f64 / 1e6)
}
